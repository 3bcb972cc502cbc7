"""The probe's rule: paired losses of one cycle in, a bounded move of each knob's correction out (docs/method.md).

Every replica scores the same mini-batches at the average of its own weights over the cycle. t is the mean slope over the
mini-batches by its standard error; t < 0 says that a higher value was better. Where votes count and how far they go is `PeakController`'s:

1. A rise needs two votes in a row, of which the weaker counts; a fall needs one. What goes up too far does lasting damage.
2. What exceeds the dead zone decides: ln(correction) moves by step * tanh((|t| - dead) / scale), so it is large when the
   evidence is overwhelming, far from the optimum, and nothing when t is within its noise, at the optimum.

With local gradients each replica's weights have noise of their own, which is the same in all mini-batches, so their scatter does not show it.
The residual of the regression over replicas does; it is pooled over cycles and added to the error. (With N - 1 knobs there is no residual,
and the error is too small.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..evidence import Evidence
from ..plan import Decision
from ..schema import Kind, ListOf, Number, Or, Row
from .peak import LARGEST_T, PeakController, gated, ratio
from .regression import mean_and_error, slopes, unexplained

__all__ = ["PROBE", "ProbeRule"]

PROBE = "probe"
"""The measurement: [replica][chunk], losses on mini-batches common to all replicas."""

SHARED, LOCAL = 6.0, 2.0
"""default scales"""
FORGET = 0.9
"""of the replicas' own noise, from cycle to cycle"""
KNOWN = 4.0
"""Degrees of freedom from which on that noise is known well enough to move anything."""


class ProbeRule(PeakController):
    """One setting for all starts: values enter as ratios only (now / peak of the same knob), so nothing here knows a unit.

    Args:
        step: the largest move of ln(correction) in one cycle.
        dead: standard errors that count as noise; a vote within them moves nothing.
        scale: standard errors beyond ``dead`` at which a move reaches tanh(1), 76 % of ``step``. None: 6 with shared gradients, where errors
            do not hold what is common to all mini-batches, 2 with local ones, where they do.
        begin, end: parts of the schedule's peak, on the way up and on the way down, between which votes count.
        bound: the correction stays within [1 / bound, bound].
        freeze_after: see `Controller`.

    Replicas without a finite probe are left out. Fewer than two, or knobs that cannot be told apart in a cycle: no move, and
    the next rise needs two votes again.
    """

    name = "probe"
    measures = (PROBE,)
    regresses = judges_held_out = True
    state_keys: Mapping[str, Kind] = {
        **PeakController.state_keys, "last": ListOf(Number(-LARGEST_T, LARGEST_T), "seen"), "noise": Or(Row(Number(0), Number(0)), [0.0, 0.0]),
    }  # fmt: skip

    def __init__(
        self,
        step: float = 0.9,
        dead: float = 2.0,
        scale: float | None = None,
        begin: float = 0.95,
        end: float = 0.9,
        bound: float = 1e3,
        freeze_after: float | None = None,
    ) -> None:
        super().__init__(step, dead, SHARED if scale is None else scale, begin, end, bound, freeze_after)
        self.local_scale = LOCAL if scale is None else scale

    def begin_run(self, knobs: int) -> None:
        super().begin_run(knobs)
        self.last = [0.0] * knobs  # the previous t of each
        self.noise = [0.0, 0.0]  # of replicas with gradients of their own: squares that no knob explains, and how many are free

    def vote(self, evidence: Evidence) -> list[Decision]:
        probes = evidence.measured.get(PROBE)
        found = None if probes is None else slopes(evidence.multipliers, probes)
        if found is None:
            self.last = [0.0] * len(self.last)
            return [Decision(note="" if probes is None else "the replicas' probes cannot be compared")] * len(self.last)
        own, known = self._own_noise(evidence)
        decisions = []
        for k, (knob, noise) in enumerate(zip(found, own, strict=True)):
            slope, error = mean_and_error(knob)
            error = math.hypot(error, noise)
            t = ratio(slope, error)
            scale = self.local_scale if evidence.local else self.scale
            factor = self.turn(k, self._move(t, self.last[k], scale), evidence) if known else 1.0
            decisions.append(Decision(factor=factor, slope=slope, error=error, t=t))
            self.last[k] = t
        return decisions

    def _own_noise(self, evidence: Evidence) -> tuple[list[float], bool]:
        """[knob]: the standard error of its slope that comes from what each replica has seen alone, 0 with shared gradients; and whether it is
        known as well as it can be."""
        probes = evidence.measured.get(PROBE)
        if not evidence.local or probes is None:
            return [0.0] * len(evidence.knobs), True
        squares, free, spread = unexplained(evidence.multipliers, probes)
        if free > 0:
            self.noise = [FORGET * self.noise[0] + squares, FORGET * self.noise[1] + free]
        variance = self.noise[0] / self.noise[1] if self.noise[1] > 0 else 0.0
        return [math.sqrt(variance * x) for x in spread], free == 0 or self.noise[1] >= KNOWN

    def _move(self, t: float, before: float, scale: float) -> float:
        """Change of ln(correction) for this vote and the one before it: of two for a rise the weaker."""
        return gated(t if t > 0 else -min(-t, max(-before, 0.0)), self.step, self.dead, scale)
