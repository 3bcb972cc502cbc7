"""The hypergradient's rule: cosines of gradient and displacement in, a bounded move of each knob's correction out.

Had the rate been a little higher throughout the cycle, every displacement from its beginning would be longer by as much, so
d loss / d ln(eta) = <mean gradient now, displacement since the cycle began>, exactly to first order and without a second
replica (Baydin et al. 2018, arXiv 1703.04782, over more than one step). A gradient of a later mini-batch knows nothing of the noise in the
displacement, so the expectation is right; divided by both norms it is a cosine, which has no unit.

GREEDY: it asks what is good at once, not in the end. A cycle that has reached its noise floor says "lower" even where the rate is
right for the run, and more so the shorter the cycle (Wu et al. 2018, arXiv 1803.02021). Use it to leave a rate that is far too low or
far too high where nothing else can be afforded, with ``freeze_after``; `ProbeRule` does not have this bias.
"""

from __future__ import annotations

import math

from ..evidence import Evidence
from ..plan import Decision
from .peak import PeakController
from .regression import mean_and_error

__all__ = ["COSINES", "HypergradientRule"]

COSINES = "cosines"
"""The measurement: [replica][knob * samples + sample], cosines of gradient and displacement."""


class HypergradientRule(PeakController):
    """ln(correction) moves by -step * tanh((|t| - dead) / scale), t from the scatter of a cycle's samples.

    Args:
        step: the largest move of ln(correction) in one cycle.
        dead: standard errors that count as noise; a vote within them moves nothing.
        scale: standard errors beyond ``dead`` at which a move reaches tanh(1), 76 % of ``step``.
        begin, end, bound, freeze_after: see `PeakController` and `Controller`.

    ``slope`` and ``error`` of a decision are cosines. The replicas' cosines are averaged, those without one left out; no replica, or fewer
    than two samples: no move.
    """

    name = "hypergradient"
    measures = (COSINES,)
    needs_replicas = False

    def __init__(
        self,
        step: float = 0.3,
        dead: float = 2.0,
        scale: float = 4.0,
        begin: float = 0.95,
        end: float = 0.9,
        bound: float = 1e3,
        freeze_after: float | None = None,
    ) -> None:
        super().__init__(step, dead, scale, begin, end, bound, freeze_after)

    def vote(self, evidence: Evidence) -> list[Decision]:
        knobs = len(evidence.knobs)
        cosines = evidence.measured.get(COSINES)
        rows = [row for row in cosines or () if row is not None]
        samples = len(rows[0]) // knobs if rows else 0
        if samples < 2:
            return [Decision(note="" if cosines is None else "no gradients to compare with the displacement")] * knobs
        means = [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]
        return [self.decision(k, *mean_and_error(means[k * samples : (k + 1) * samples]), evidence) for k in range(knobs)]
