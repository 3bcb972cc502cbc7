"""The probe's rule: losses of common mini-batches in, a bounded move of each knob's correction out
(docs/method.md). Pure Python.

Every replica scores the same mini-batches at the average of its own weights over the cycle. t is
the mean slope over the mini-batches by its standard error; t < 0: a higher value was better.

1. Votes count near the schedule's peak only. Before it the value is low on purpose, and every vote
   says "higher"; after it a lower value is the point of the schedule.
2. A rise needs two votes in a row, of which the weaker counts; a fall needs one.
3. ln(correction) moves by step * tanh((|t| - dead) / scale), with scale 6 or 2.

With local gradients each replica's weights have noise of their own, which all its mini-batches see
alike, so their scatter does not show it. The residual of the regression over replicas does: it is
pooled over cycles and added to the error. (With N - 1 knobs there is no residual, and the error is
too small.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..core.evidence import Evidence, KnobSpec
from ..core.plan import Decision
from ..core.schema import Check, list_of, number
from ..core.validate import within
from .near_peak import NearPeak
from .regression import mean_and_error, slopes, unexplained

__all__ = ["PROBE", "ProbeRule"]

PROBE = "probe"
"""The measurement: [replica][chunk], losses on mini-batches common to all replicas."""

SHARED, LOCAL = 6.0, 2.0
"""Standard errors beyond those that count as noise at which a move reaches tanh(1), 76 % of
``step``. Of shared gradients, where errors do not hold what is common to all mini-batches, and of
local ones, where they do."""
FORGET = 0.9
"""of the replicas' own noise, from cycle to cycle"""
KNOWN = 4.0
"""Degrees of freedom from which on that noise is known well enough to move anything."""
LARGEST_T = 1e3
"""t is cut here: where losses do not scatter at all, any slope would be infinitely significant."""


class ProbeRule(NearPeak):
    """Moves corrections near the schedule's peak. Values enter as ratios only (now / peak of the
    same knob), so nothing here knows a unit.

    Args:
        step: the largest move of ln(correction) in one cycle.
        dead: standard errors that count as noise; a vote within them moves nothing.
        bound: the correction stays within [1 / bound, bound].
        freeze_after: see `Controller`.

    Replicas without a finite probe are left out. Fewer than two, or knobs that cannot be told apart
    in a cycle: no move, and the next rise needs two votes again.

    Raises:
        ValueError: a setting out of its range.
    """

    regresses = True
    columns = (*NearPeak.columns, "last")
    state_keys: Mapping[str, Check] = {
        **NearPeak.state_keys,
        "last": list_of(number(-LARGEST_T, LARGEST_T)),
        "noise": list_of(number(0), 2),
    }

    def __init__(
        self,
        step: float = 0.9,
        dead: float = 2.0,
        bound: float = 1e3,
        freeze_after: float | None = None,
    ) -> None:
        super().__init__(freeze_after)
        within(step, "step", "(0, inf)")
        within(dead, "dead", "[0, inf)", "it counts standard errors")
        within(bound, "bound", "(1, inf)")
        self.step, self.dead, self.bound = step, dead, bound

    def begin_run(self, knobs: int) -> None:
        super().begin_run(knobs)
        self.last = [0.0] * knobs
        """[knob]: t of the decision before."""
        self.noise = [0.0, 0.0]
        """Of replicas with gradients of their own: squares that no knob explains, and how many are
        free."""

    def report(self) -> str:
        if self.idle:
            return "rests: nothing is measured any more, and values stay where they are"
        return (
            f"a value moves where |t| is above {self.dead:g}, while the schedule is near its peak"
        )

    def may_move(self, knob: KnobSpec) -> bool:
        return True

    def decide(self, evidence: Evidence) -> list[Decision]:
        is_near = self.look(evidence)
        probes = evidence.measured.get(PROBE)
        fits = None if probes is None else slopes(evidence.multipliers, probes)
        if probes is None or fits is None:
            self.last = [0.0] * len(self.last)
            note = "" if probes is None else "the replicas' probes cannot be compared"
            return [Decision(note=note)] * len(self.last)
        own, is_known = [0.0] * len(fits), True
        if evidence.local:
            own, is_known = self._errors_of_replicas(evidence.multipliers, probes)
        scale = LOCAL if evidence.local else SHARED
        decisions = []
        for k, of_chunks in enumerate(fits):
            slope, error = mean_and_error(of_chunks)
            error = math.hypot(error, own[k])
            t = _ratio(slope, error)
            counts = is_known and is_near[k]
            move = self._move(t, self.last[k], scale) if counts else 0.0
            factor = self._factor(move, evidence.corrections[k])
            decisions.append(Decision(factor=factor, slope=slope, error=error, t=t))
            self.last[k] = t
        return decisions

    def _errors_of_replicas(self, multipliers: Any, probes: Any) -> tuple[list[float], bool]:
        """[knob]: the standard error of its slope that comes from what each replica has seen alone;
        and whether it is known as well as it can be."""
        squares, free, variances = unexplained(multipliers, probes)
        if free > 0:
            self.noise = [FORGET * self.noise[0] + squares, FORGET * self.noise[1] + free]
        variance = self.noise[0] / self.noise[1] if self.noise[1] > 0 else 0.0
        return [math.sqrt(variance * x) for x in variances], free == 0 or self.noise[1] >= KNOWN

    def _move(self, t: float, before: float, scale: float) -> float:
        """The move of ln(correction) for a vote ``t`` and the one before it: of two for a rise the
        weaker counts."""
        vote = t if t > 0 else -min(-t, max(-before, 0.0))
        size = self.step * math.tanh(max(abs(vote) - self.dead, 0.0) / scale)
        return math.copysign(size, -vote)

    def _factor(self, move: float, correction: float) -> float:
        """For a move of ln(correction), which never goes further out than the bound."""
        now, limit = math.log(correction), math.log(self.bound)
        # Where a cycle that was rolled back has put it outside, it may come back by its own moves.
        moved = min(max(now + move, min(-limit, now)), max(limit, now))
        return math.exp(moved - now)


def _ratio(slope: float, error: float) -> float:
    """t = slope / error, within +-LARGEST_T."""
    if error > 0:
        return max(-LARGEST_T, min(LARGEST_T, slope / error))
    return math.copysign(LARGEST_T, slope) if slope else 0.0
