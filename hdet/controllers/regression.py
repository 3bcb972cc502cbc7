"""Least squares of paired losses on ln(multiplier): a slope per knob and mini-batch. Plain Python:
there are as many unknowns as knobs, and every rank gets bitwise the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress
from operator import mul

__all__ = ["mean_and_error", "slopes", "unexplained"]

Matrix = Sequence[Sequence[float]]
Rows = Sequence[Sequence[float] | None]


def slopes(multipliers: Matrix, probes: Rows) -> list[list[float]] | None:
    """Slope of the loss in ln(multiplier), [knob][mini-batch], all knobs jointly, over the replicas
    whose row is not None.

    Each mini-batch is fitted by itself: what its losses have in common cancels, and the scatter
    between mini-batches is the error (the residual over replicas is not: with shared
    gradients all replicas lie on one line and share their noise). None if the design cannot tell
    the knobs apart: fewer than two replicas, or multipliers that are collinear.
    """
    rows, design = _present(multipliers, probes)
    if len(rows) < 2:
        return None
    gram = _gram(design)
    centred = map(_centred, zip(*rows, strict=True))
    fits = [_solve(gram, [_dot(x, y) for x in design]) for y in centred]
    known = [fit for fit in fits if fit is not None]  # all or none: they have one matrix
    return [list(knob) for knob in zip(*known, strict=True)] if known else None


def unexplained(multipliers: Matrix, probes: Rows) -> tuple[float, int, list[float]]:
    """What is left of the replicas' mean losses when `slopes` is not None: the sum of its squares,
    its degrees of freedom N - 1 - knobs, and by knob what a variance of 1 of a replica's loss makes
    of the slope's."""
    rows, design = _present(multipliers, probes)
    gram, knobs = _gram(design), range(len(design))
    y = _centred([math.fsum(row) / len(row) for row in rows])
    fit = _solve(gram, [_dot(x, y) for x in design])
    inverse = [_solve(gram, [float(i == k) for i in knobs]) for k in knobs]
    assert fit is not None
    left = [
        own - math.fsum(slope * x[r] for slope, x in zip(fit, design, strict=True))
        for r, own in enumerate(y)
    ]
    variances = [column[k] for k, column in enumerate(inverse) if column is not None]
    return _dot(left, left), len(rows) - 1 - len(design), variances


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error from the scatter of at least two values."""
    n = len(values)
    mean = math.fsum(values) / n
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)


def _present(multipliers: Matrix, probes: Rows) -> tuple[list[Sequence[float]], list[list[float]]]:
    """The rows of replicas that are not left out, and the centred ln(multiplier) of these,
    [knob][replica]."""
    rows = [row for row in probes if row is not None]
    if len(rows) < len(probes):
        used = [row is not None for row in probes]
        multipliers = [list(compress(knob, used)) for knob in multipliers]
    return rows, [_centred(list(map(math.log, knob))) for knob in multipliers] if rows else []


def _centred(values: Sequence[float]) -> list[float]:
    centre = math.fsum(values) / len(values)
    return [v - centre for v in values]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(map(mul, a, b))


def _gram(design: Matrix) -> list[list[float]]:
    return [[_dot(a, b) for b in design] for a in design]


def _solve(matrix: Matrix, right: Sequence[float]) -> list[float] | None:
    """Gauss elimination with partial pivoting; None when a pivot falls below 1e-9 of the largest
    entry."""
    n = len(matrix)
    rows = [[*matrix[i], right[i]] for i in range(n)]
    scale = max(abs(v) for row in matrix for v in row)
    for column in range(n):
        pivot = max(range(column, n), key=lambda i: abs(rows[i][column]))
        if not abs(rows[pivot][column]) > 1e-9 * scale:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for i in range(column + 1, n):
            ratio = rows[i][column] / rows[column][column]
            rows[i] = [a - ratio * b for a, b in zip(rows[i], rows[column], strict=True)]
    solution = [0.0] * n
    for i in reversed(range(n)):
        solved = _dot(rows[i][i + 1 : n], solution[i + 1 :])
        solution[i] = (rows[i][n] - solved) / rows[i][i]
    return solution
