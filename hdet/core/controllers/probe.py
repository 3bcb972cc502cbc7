"""The probe's rule: paired losses of one cycle in, a bounded move of each knob's correction out (docs/method.md).

Every replica scores the same mini-batches at the average of its own weights over the cycle. t is the mean slope over the
mini-batches by its standard error; t < 0 says that a higher value was better. Then:

1. Votes move a correction only near the schedule's peak: from ``begin`` of it on the way up to ``end`` of it on the way down.
   Before, the value is low on purpose and every vote says "higher"; after, a lower value is the point of the schedule.
2. A rise needs two votes in a row, of which the weaker counts; a fall needs one. What goes up too far does lasting damage.
3. What exceeds the dead zone decides: ln(correction) moves by step * tanh((|t| - dead) / scale), so it is large when the
   evidence is overwhelming, far from the optimum, and nothing when t is within its noise, at the optimum.
4. The correction multiplies the schedule and stays within [1 / bound, bound].
5. Once the schedule has fallen below ``end`` the rule is idle: no more probes, and the replicas train alike to the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .protocol import Decision, Evidence, require_keys
from .regression import mean_and_error, slopes

__all__ = ["ProbeRule"]

LARGEST_T = 1e3
"""t is cut here: where mini-batches do not scatter at all, any slope would be infinitely significant."""


class ProbeRule:
    """One setting for all starts: values enter as ratios only (now / peak of the same knob), so nothing here knows a unit.

    Args:
        step: the largest move of ln(correction) in one cycle.
        dead: standard errors that count as noise; a vote within them moves nothing.
        scale: standard errors beyond ``dead`` at which a move reaches tanh(1), 76 % of ``step``.
        begin, end: parts of the schedule's peak, on the way up and on the way down, between which votes count.
        bound: the correction stays within [1 / bound, bound].

    Replicas without a finite probe are left out. Fewer than two, or knobs that cannot be told apart in a cycle: no move, and
    the next rise needs two votes again.
    """

    name = "probe"
    needs_probe = True

    def __init__(
        self,
        step: float = 0.9,
        dead: float = 2.0,
        scale: float = 6.0,
        begin: float = 0.95,
        end: float = 0.9,
        bound: float = 1e3,
    ) -> None:
        for name, value in (("step", step), ("scale", scale)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        if not (math.isfinite(dead) and dead >= 0):
            raise ValueError(f"dead must be a number of standard errors >= 0, got {dead!r}")
        for name, value in (("begin", begin), ("end", end)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be a part of the peak, in [0, 1], got {value!r}")
        if not (math.isfinite(bound) and bound > 1):
            raise ValueError(f"bound must be a number above 1, got {bound!r}")
        self.step, self.dead, self.scale, self.begin, self.end, self.bound = step, dead, scale, begin, end, bound
        # Per knob: has the schedule been near its peak; scheduled / peak when last seen; the previous t; ln(correction).
        self.warm: list[bool] = []
        self.phase: list[float] = []
        self.last: list[float] = []
        self.log_correction: list[float] = []

    @property
    def idle(self) -> bool:
        """No vote can move anything any more, so exploring would only cost: averages and probes may be saved, and the engine lets the
        spread rest. `update` is still to be called, with probes None."""
        return bool(self.warm) and all(w and p < self.end for w, p in zip(self.warm, self.phase, strict=True))

    def update(self, evidence: Evidence) -> list[Decision]:
        """One Decision per knob."""
        if not self.warm:
            knobs = len(evidence.knobs)
            self.warm, self.phase, self.last, self.log_correction = [False] * knobs, [0.0] * knobs, [0.0] * knobs, [0.0] * knobs
        found = None if evidence.probes is None else slopes(evidence.multipliers, evidence.probes)
        decisions = []
        for k in range(len(evidence.knobs)):
            self.phase[k] = evidence.scheduled[k] / evidence.peak[k] if evidence.peak[k] > 0 else 1.0
            self.warm[k] = self.warm[k] or self.phase[k] >= self.begin
            if found is None:
                self.last[k] = 0.0
                decisions.append(Decision(note="" if evidence.probes is None else "the replicas' probes cannot be compared"))
                continue
            slope, error = mean_and_error(found[k])
            t = max(-LARGEST_T, min(LARGEST_T, slope / error)) if error > 0 else math.copysign(LARGEST_T, slope) if slope else 0.0
            counts = self.warm[k] and self.phase[k] >= self.end
            decisions.append(Decision(factor=self._turn(k, self._move(t, self.last[k])) if counts else 1.0, slope=slope, error=error, t=t))
            self.last[k] = t
        return decisions

    def _move(self, t: float, before: float) -> float:
        """Change of ln(correction) for this vote and the one before it."""
        strength = t if t > 0 else min(-t, max(-before, 0.0))
        return math.copysign(self.step * math.tanh(max(strength - self.dead, 0.0) / self.scale), -t)

    def _turn(self, k: int, move: float) -> float:
        """The factor for a move, as far as the bound allows."""
        limit = math.log(self.bound)
        before, self.log_correction[k] = self.log_correction[k], min(max(self.log_correction[k] + move, -limit), limit)
        return math.exp(self.log_correction[k] - before)

    _STATE = ("warm", "phase", "last", "log_correction")

    def state_dict(self) -> dict[str, Any]:
        return {key: list(getattr(self, key)) for key in self._STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_keys(state, self._STATE, "ProbeRule's")
        self.warm = [bool(x) for x in state["warm"]]
        self.phase, self.last, self.log_correction = ([float(x) for x in state[key]] for key in self._STATE[1:])
