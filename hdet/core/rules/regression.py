"""Least squares of paired losses on ln(multiplier): a slope per knob and mini-batch, in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress
from operator import mul
from typing import TypeVar

__all__ = ["centred", "dot", "gram_of", "inverse", "mean_and_error", "present", "slopes", "solve", "unexplained"]

T = TypeVar("T")


def slopes(multipliers: Sequence[Sequence[float]], probes: Sequence[Sequence[float] | None]) -> list[list[float]] | None:
    """Slope of the loss in ln(multiplier), [knob][mini-batch], all knobs jointly, over the replicas whose row is not None.

    Each mini-batch is fitted by itself: what its losses have in common cancels, and the scatter between mini-batches is the
    honest error (the residual over replicas is not: with shared gradients all replicas lie on one line and share their noise).
    None if the design cannot tell the knobs apart: fewer than two replicas, or multipliers that are collinear.
    """
    rows, design = present(multipliers, probes)
    if len(rows) < 2:
        return None
    gram = gram_of(design)
    fits = []
    for losses in zip(*rows, strict=True):
        y = centred(losses)
        fit = solve(gram, [dot(x, y) for x in design])
        if fit is None:
            return None
        fits.append(fit)
    return [list(knob) for knob in zip(*fits, strict=True)]


def unexplained(multipliers: Sequence[Sequence[float]], probes: Sequence[Sequence[float] | None]) -> tuple[float, int, list[float]]:
    """What is left of the replicas' mean losses when `slopes` is not None: the sum of its squares, its degrees of freedom N - 1 - knobs, and by
    knob what a variance of 1 of a replica's loss makes of the slope's."""
    rows, design = present(multipliers, probes)
    gram = gram_of(design)
    y = centred([math.fsum(row) / len(row) for row in rows])
    fit, inverted = solve(gram, [dot(x, y) for x in design]), inverse(gram)
    assert fit is not None and inverted is not None
    left = [own - math.fsum(slope * x[r] for slope, x in zip(fit, design, strict=True)) for r, own in enumerate(y)]
    return dot(left, left), len(rows) - 1 - len(design), [column[k] for k, column in enumerate(inverted)]


def present(multipliers: Sequence[Sequence[float]], found: Sequence[T | None]) -> tuple[list[T], list[list[float]]]:
    """What was found of replicas that are not left out, and the centred ln(multiplier) of these, [knob][replica]."""
    rows = [row for row in found if row is not None]
    if len(rows) < len(found):
        used = [row is not None for row in found]
        multipliers = [list(compress(knob, used)) for knob in multipliers]
    return rows, [centred(list(map(math.log, knob))) for knob in multipliers] if rows else []


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error from the scatter of at least two values."""
    n = len(values)
    mean = math.fsum(values) / n
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)


def centred(values: Sequence[float]) -> list[float]:
    centre = math.fsum(values) / len(values)
    return [v - centre for v in values]


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(map(mul, a, b))


def gram_of(design: Sequence[Sequence[float]]) -> list[list[float]]:
    """Symmetric, so each product of two columns once."""
    lower = [[dot(a, b) for b in design[: i + 1]] for i, a in enumerate(design)]
    return [[lower[max(i, j)][min(i, j)] for j in range(len(design))] for i in range(len(design))]


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float] | None:
    """Gauss elimination with partial pivoting; None when a pivot falls below 1e-9 of the largest entry. As many rows as knobs: few."""
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
        solution[i] = (rows[i][n] - dot(rows[i][i + 1 : n], solution[i + 1 :])) / rows[i][i]
    return solution


def inverse(matrix: Sequence[Sequence[float]]) -> list[list[float]] | None:
    """[column][row]; None where `solve` finds nothing."""
    columns = [solve(matrix, [float(i == k) for i in range(len(matrix))]) for k in range(len(matrix))]
    found = [column for column in columns if column is not None]
    return found if len(found) == len(columns) else None
