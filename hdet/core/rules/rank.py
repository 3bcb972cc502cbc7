"""Ranks of training losses, for losses with heavy tails: the weights of natural evolution strategies (Wierstra et al. 2014).

The replica with the k-th lowest loss of N has the utility u_k = max(0, ln(N/2 + 1) - ln k) / sum - 1/N, equal losses share theirs. The
search gradient of ln(value) is p = sum_k u_k ln(rho_k). Its sum over cycles, with forgetting, by the root of its summed variance is t.

Where losses are independent and say nothing, every order is as likely, and p has the variance sum u^2 sum x^2 / (N - 1), x = centred ln(rho),
exactly. With shared gradients they are not: replicas lie on a line, and noise orders them along it, up or down. Then p^2 is what a
cycle knows of the variance. The larger of the two counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..evidence import Evidence
from ..plan import Decision
from ..schema import Kind, ListOf, Number
from .pooled import PooledController
from .regression import dot, present

__all__ = ["RankController", "utilities"]


def utilities(losses: Sequence[float]) -> list[float]:
    """u of each replica; they add up to 0. The same for every increasing function of the losses."""
    n = len(losses)
    raw = [max(0.0, math.log(n / 2 + 1) - math.log(k)) for k in range(1, n + 1)]
    total = math.fsum(raw)
    shared: dict[float, list[float]] = {}
    for loss, u in zip(sorted(losses), raw, strict=True):
        shared.setdefault(loss, []).append(u)
    return [math.fsum(shared[loss]) / len(shared[loss]) / total - 1 / n for loss in losses]


class RankController(PooledController):
    """ln(value) moves along the pooled p, by step * tanh((|t| - dead) / scale). Every increasing function of the losses leads to the
    same moves, so a spike counts no more than any other last place.

    ``slope`` and ``error`` of a decision are -p and its standard deviation under chance, means over cycles, in units of ln(rho), not of
    the loss. Each knob is judged by itself; what the others do to the ranks is noise to it, and permutations average that out.

    Args: see `PooledController`. Replicas without a loss are left out, with fewer than two the cycle teaches nothing.
    """

    name = "rank"
    knob_per_group = True
    state_keys: Mapping[str, Kind] = {
        **PooledController.state_keys, "gradients": ListOf(Number(), "seen"), "variances": ListOf(Number(0), "seen"), "weight": Number(0),
    }  # fmt: skip

    def begin_run(self, knobs: int) -> None:
        super().begin_run(knobs)
        self.gradients, self.variances, self.weight = [0.0] * knobs, [0.0] * knobs, 0.0

    def vote(self, evidence: Evidence) -> list[Decision]:
        fade = self.fade(evidence)
        losses, design = present(evidence.multipliers, evidence.losses)
        if len(losses) < 2:
            return [Decision(note="fewer than two usable losses")] * len(self.gradients)
        u = utilities(losses)
        self.weight = fade * self.weight + 1
        decisions = []
        for k, x in enumerate(design):
            p = dot(u, x)
            self.gradients[k] = fade * self.gradients[k] + p
            self.variances[k] = fade**2 * self.variances[k] + max(p * p, dot(u, u) * dot(x, x) / (len(u) - 1))
            slope, error = -self.gradients[k] / self.weight, math.sqrt(self.variances[k]) / self.weight
            decisions.append(self.decision(k, slope, error, evidence))
        return decisions
