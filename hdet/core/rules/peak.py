"""What rules share that correct a schedule: where their votes count, how a t becomes a move, how far moves may go."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ..controller import Controller
from ..evidence import Evidence
from ..plan import Decision
from ..schema import COUNT, FLAG, Kind, ListOf, Number, Or, read
from ..validate import within

__all__ = ["LARGEST_T", "PeakController", "gated", "ratio"]

LARGEST_T = 1e3
"""t is cut here: where the evidence does not scatter at all, any slope would be infinitely significant."""
ENOUGH = 2
"""Decisions near the peak. With fewer next to nothing can be corrected: a probe's rise needs two."""


class PeakController(Controller):
    """Votes move a correction only near the schedule's peak: from ``begin`` of it on the way up to ``end`` of it on the way down.

    Before, the value is low on purpose and every vote says "higher"; after, a lower value is the point of the schedule. Once the
    schedule has fallen below ``end`` the rule is idle, also where the peak lay within one cycle. If fewer than two decisions came before, it
    warns. The correction multiplies the schedule and stays within [1 / bound, bound].
    """

    state_keys: Mapping[str, Kind] = {"warm": ListOf(FLAG, "seen"), "phase": ListOf(Number(), "seen")}
    warm: list[bool]
    """[knob]: has the schedule been near its peak?"""
    phase: list[float]
    """[knob]: scheduled / peak when last seen."""
    looks: list[int]
    """[knob]: decisions near the peak; `ENOUGH` also where it was said that there were fewer."""

    def __init__(self, step: float, dead: float, scale: float, begin: float, end: float, bound: float, freeze_after: float | None) -> None:
        super().__init__(freeze_after)
        within(step, "step", "(0, inf)")
        within(scale, "scale", "(0, inf)")
        within(dead, "dead", "[0, inf)", "it counts standard errors")
        for name, value in (("begin", begin), ("end", end)):
            within(value, name, "[0, 1]", "it is a part of the schedule's peak")
        within(bound, "bound", "(1, inf)")
        self.step, self.dead, self.scale = step, dead, scale
        self.begin, self.end, self.bound = begin, end, bound
        self.begin_run(0)

    @property
    def idle(self) -> bool:
        """Frozen, or the schedule of every knob is past its peak for good."""
        return self.frozen or (bool(self.warm) and all(w and p < self.end for w, p in zip(self.warm, self.phase, strict=True)))

    def report(self) -> str:
        """When a value moves; or that nothing does any more."""
        if self.idle:
            return "rests: nothing is measured any more, and what was found stays in force"
        return f"a value moves where |t| is above {self.dead:g}, while the schedule is near its peak"

    def decide(self, evidence: Evidence) -> list[Decision]:
        """Where the schedule is now, then the rule's `vote`."""
        self.observe(evidence)
        self.looks = [count + self.counts(k) for k, count in enumerate(self.looks)]
        return self.vote(evidence)

    def observe(self, evidence: Evidence) -> None:
        """Where the schedule is now: also where another controller decides, so that its peak is not missed."""
        if not self.warm:
            self.begin_run(len(evidence.knobs))
        self.phase = _parts(evidence.scheduled, evidence.peak)
        reached = _parts(evidence.highest or evidence.scheduled, evidence.peak)
        self.warm = [w or p >= self.begin for w, p in zip(self.warm, reached, strict=True)]
        missed = [k for k, count in enumerate(self.looks) if self.warm[k] and self.phase[k] < self.end and count < ENOUGH]
        if missed and not self.frozen:
            self.looks = [ENOUGH if k in missed else count for k, count in enumerate(self.looks)]
            warnings.warn(
                f"the schedule of {', '.join(evidence.knobs[k] for k in missed)} has fallen below {self.end:.0%} of its peak before the controller "
                f"{self.name!r} has decided twice near it, which it does once in {evidence.sync_interval} steps: it rests from now on. Make cycles "
                f"shorter, sync=hdet.Sync(...), so that two or more end between {self.begin:.0%} of the peak on the way up and {self.end:.0%} on the "
                "way down",
                stacklevel=2,
            )

    def begin_run(self, knobs: int) -> None:
        """The state at the first decision, when the number of knobs is known; without knobs, that before it."""
        self.warm, self.phase, self.looks = [False] * knobs, [0.0] * knobs, [0] * knobs

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "looks": list(self.looks)}

    def check_state(self, state: Any, knobs: int | None = None) -> dict[str, Any]:
        values = super().check_state(state, knobs)
        seen = len(values["warm"])
        return {**values, **read(state, {"looks": Or(ListOf(COUNT, seen), [ENOUGH] * seen)}, f"{type(self).__name__}'s")}  # or older

    def vote(self, evidence: Evidence) -> list[Decision]:
        """One Decision per knob, by `decision`, or with `turn` for its factor."""
        raise NotImplementedError(f"{type(self).__name__} has no vote(evidence)")

    def counts(self, k: int) -> bool:
        """Is knob k near its schedule's peak?"""
        return self.warm[k] and self.phase[k] >= self.end

    def decision(self, k: int, slope: float, error: float, evidence: Evidence, note: str = "") -> Decision:
        """The usual one: ln(correction) moves as `gated` says of t, or not at all if there is something to ``note``."""
        t = ratio(slope, error)
        move = 0.0 if note else gated(t, self.step, self.dead, self.scale)
        return Decision(factor=self.turn(k, move, evidence), slope=slope, error=error, t=t, note=note)

    def turn(self, k: int, move: float, evidence: Evidence) -> float:
        """The factor for a move of ln(correction): 1 away from the peak, and never further out than the bound."""
        if move == 0 or not self.counts(k):
            return 1.0
        now, limit = math.log(evidence.corrections[k]), math.log(self.bound)
        # Where something else (a cycle taken back) has put it outside, it may come back by moves of its own only.
        then = min(now + move, max(limit, now)) if move > 0 else max(now + move, min(-limit, now))
        return math.exp(then - now)


def _parts(values: Sequence[float], peaks: Sequence[float]) -> list[float]:
    """[knob]: of its peak."""
    return [value / peak if peak > 0 else 1.0 for value, peak in zip(values, peaks, strict=True)]


def ratio(slope: float, error: float) -> float:
    """t = slope / error, within +-LARGEST_T."""
    if error > 0:
        return max(-LARGEST_T, min(LARGEST_T, slope / error))
    return math.copysign(LARGEST_T, slope) if slope else 0.0


def gated(t: float, step: float, dead: float, scale: float) -> float:
    """The move of ln(correction) for a vote: -step * tanh((|t| - dead) / scale), with the sign of t; 0 for |t| <= dead."""
    return math.copysign(step * math.tanh(max(abs(t) - dead, 0.0) / scale), -t)
