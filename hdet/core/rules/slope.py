"""Training losses alone: their joint slope in the logarithms of the multipliers, pooled over cycles.

Per cycle, X = centred ln(rho), [replica][knob], and y = centred losses give M = X'X and c = X'y. Pooled with forgetting f,
A <- f A + M and b <- f b + c, the slope is g = A^-1 b (recursive least squares; a noise that is the same in all cycles cancels).

Its error comes from cycles, not from replicas: with shared gradients, or common data, replicas share their noise, lie on one line,
and leave no residual. What a cycle finds beyond what is pooled already, e = c - M g, has E[e_k^2] = s^2 (M + M V M)_kk, where
s^2 V = s^2 A^-1 B A^-1 is the covariance of g, B <- f^2 B + M. So s^2 is the running mean of e_k^2 / (M + M V M)_kk, and t = g / (s sqrt(V)).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..evidence import Evidence
from ..plan import Decision
from ..schema import Kind, ListOf, Number
from .pooled import PooledController
from .regression import centred, dot, gram_of, inverse, present, solve

__all__ = ["SlopeController"]

LEAST = 3.0
"""So many cycles, counted with forgetting, have to tell the noise before anything may move."""
NOISE_MEMORY = 0.9
"""Weight of the cycle before in the noise, which changes more slowly than the slope."""
UNHEARD_OF = 1e90
"""Noise of this size comes from a damaged state, and a state with it would not load."""

Matrix = list[list[float]]
_SQUARE = ListOf(ListOf(Number(), "seen"), "seen")


class SlopeController(PooledController):
    """ln(correction) moves by -step * tanh((|t| - dead) / scale); no unit enters. Needs neither a probe nor more than the losses given to
    ``step(loss)``, but is greedy: it asks which rate had the lower loss within the cycle (docs/choosing.md).

    Args: see `PooledController`. Replicas without a loss are left out, with fewer than two the cycle teaches nothing; several knobs are
    told apart by the cycles together, and an Ensemble refuses more than N - 1 of them.
    """

    name = "slope"
    regresses = True
    state_keys: Mapping[str, Kind] = {
        **PooledController.state_keys, "information": _SQUARE, "squares": _SQUARE, "moments": ListOf(Number(), "seen"),
        "noise": Number(0), "seen": Number(0),
    }  # fmt: skip

    def begin_run(self, knobs: int) -> None:
        super().begin_run(knobs)
        self.information: Matrix = _zeros(knobs)  # A
        self.squares: Matrix = _zeros(knobs)  # B
        self.moments = [0.0] * knobs  # b
        self.noise = self.seen = 0.0  # sums of s^2 and of 1, with forgetting

    def vote(self, evidence: Evidence) -> list[Decision]:
        fade = self.fade(evidence)
        losses, design = present(evidence.multipliers, evidence.losses)
        note = "" if len(losses) >= 2 else "fewer than two usable losses"
        if not note:
            self._learn(design, centred(losses), fade)
        slope, covariance = self._pooled()
        if slope is None or self.seen < LEAST:
            return [Decision(note=note)] * len(self.moments)
        variances = [self.noise / self.seen * row[k] for k, row in enumerate(covariance)]
        return [self.decision(k, g, math.sqrt(variances[k]), evidence, note) for k, g in enumerate(slope)]

    def _learn(self, design: Sequence[Sequence[float]], losses: Sequence[float], fade: float) -> None:
        gram, cross = gram_of(design), [dot(x, losses) for x in design]
        slope, covariance = self._pooled()
        if slope is not None:
            shares = []
            for k, row in enumerate(gram):
                expected = row[k] + dot(row, [dot(v, row) for v in covariance])
                beyond = cross[k] - dot(row, slope)
                if expected > 0:
                    shares.append(beyond * beyond / expected)
            if shares and all(share < UNHEARD_OF for share in shares):  # no NaN either
                self.noise = NOISE_MEMORY * self.noise + math.fsum(shares) / len(shares)
                self.seen = NOISE_MEMORY * self.seen + 1
        self.information = _added(self.information, gram, fade)
        self.squares = _added(self.squares, gram, fade * fade)
        self.moments = [fade * b + c for b, c in zip(self.moments, cross, strict=True)]

    def _pooled(self) -> tuple[list[float] | None, Matrix]:
        """g and V; None while cycles do not tell the knobs apart."""
        slope, rows = solve(self.information, self.moments), inverse(self.information)
        if slope is None or rows is None:
            return None, []
        half = [[dot(row, column) for column in self.squares] for row in rows]
        return slope, [[dot(row, column) for column in rows] for row in half]


def _zeros(knobs: int) -> Matrix:
    return [[0.0] * knobs for _ in range(knobs)]


def _added(old: Matrix, new: Matrix, weight: float) -> Matrix:
    return [[weight * a + b for a, b in zip(*rows, strict=True)] for rows in zip(old, new, strict=True)]
