"""The line's rule: losses along the way of an interval in, a value for the knob out. No replicas, no probe data, any layout.

With shared gradients all replicas lie on one line, so any multiplier can be scored without a replica that has it:
theta(rho) = anchor + rho * (average - anchor), from the weights at the interval's beginning through the average of its second half
(method, section 4). A training batch is scored at several rho; the same examples at all of them, so that differences are paired.

What is read off, and why so (docs/controllers.md has the measurements):

1. Intervals grow with the run: 1, 2, 4, 8, 14, 24, 40 % of it. As long as the run has gone on, a short interval says what the whole
   run will: signal dominates noise. Later it votes for rates that are too low, and only long ones are unbiased.
2. Far below the right value the losses still fall at rho = 4, 16, 64: the minimum along the line times the value in force is an estimate
   of the right value. Near it the minimum is at 1, whatever the distance within a factor of two. So estimates are remembered.
3. A value is moved for good reason only: as long as the estimates agree with it within a band, the user's own stays.
4. Rising is done in two parts: to about half of the estimate within the schedule's warm-up, where a rate that is too high does lasting
   damage and one that is too low costs nothing, and to all of it afterwards, where it is the other way round.
5. A value that is found far too high within the first steps has done its damage: the weights of the interval's beginning are taken back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .base import BaseController
from .peak import LARGEST_T
from .protocol import Decision, Evidence

__all__ = ["Line", "LineRule", "Reading", "Stage", "read_line"]


class Line(Protocol):
    """The line of one knob over the interval that ends. Every rank gets the same answers."""

    value: float
    """The knob's mean value over the steps that the average was taken of, as a part of its schedule's peak."""

    def difference(self, a: float, b: float) -> tuple[float, float]:
        """Mean over the examples of L(theta(a)) - L(theta(b)), and its t."""
        ...


class Stage(NamedTuple):
    """What to do with an estimate R of the right value at the end of an interval."""

    until: float
    """The interval's end, as a part of the run."""
    low: float
    """A value of the user's below low * R is moved,"""
    aim: float
    """to aim * R, as any value that is no longer the user's."""
    high: float
    """A value that would rise above high * R within the next interval is held there."""


STAGES = (
    Stage(0.01, 0.3, 0.3, math.inf),
    Stage(0.02, 0.4, 0.4, 1.0),
    Stage(0.04, 0.5, 0.5, 1.0),
    Stage(0.08, 0.5, 0.6, 1.3),
    Stage(0.14, 0.6, 1.5, 1.5),
    Stage(0.24, 0.6, 1.0, 1.7),
    Stage(0.40, 0.5, 1.0, 2.0),
)
EARLY = 2
"""The last stage in which a value can be found far too high, and weights be taken back."""
LATE = 4
"""The stage in which the estimate is acted on in full; after it values rise on clear evidence only."""


class Reading(NamedTuple):
    """What a line says."""

    kind: str
    """"higher", "lower", "near", "nothing" (no difference is significant), or "dead" (nothing helps, not even 16 times as far)."""
    rho: float | None
    """Where the loss is lowest; None where nothing is known."""
    slope: float
    """d loss / d ln(rho) at 1, between rho = 1/2 and 2."""
    t: float


class LineRule(BaseController):
    """One setting for all starts and problems: values enter as parts of their schedule's peak, losses as differences and their t.

    Args:
        significant: |t| of a paired difference that counts.
        farthest: the largest rho that is scored.
        restart: weights are taken back when a value is lowered by more than this factor in the first 4 % of the run.
        freeze_after: see `BaseController`.

    State by knob: the estimate (as a part of the peak; 0: none), and whether the value is still the user's. No estimate, no move.
    """

    name = "line"
    needs_replicas = False
    spreads = False
    state_keys = ("estimates", "moved", "stage", "restarted", "keeps")

    def __init__(
        self, significant: float = 1.5, farthest: float = 256.0, restart: float = 2.5, freeze_after: float | None = None
    ) -> None:
        super().__init__(freeze_after)
        for name, value, least in (("significant", significant, 0), ("farthest", farthest, 4), ("restart", restart, 1)):
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value > least):
                raise ValueError(f"{name} must be a number above {least}, got {value!r}")
        self.significant, self.farthest, self.restart = significant, farthest, restart
        self.estimates: list[float] = []
        self.moved: list[bool] = []
        self.stage = -1.0
        """The last one that was decided, -1 before the first."""
        self.restarted = False
        """Were weights taken back at the last decision? Then the next interval begins with an optimizer that has no moments yet."""
        self.keeps = False
        """Does the interval go on with its anchor? The first does, and one in which nothing was found."""

    @property
    def idle(self) -> bool:
        return self.frozen or self.stage >= len(STAGES) - 1

    def check_run(self, total_steps: int | None, floor: Sequence[float]) -> None:
        """Raises ValueError without the run's length, of which intervals are parts."""
        super().check_run(total_steps, floor)
        if total_steps is None:
            raise ValueError("the line's intervals are parts of the run: pass total_steps, or a scheduler that has it")

    def next_end(self, total_steps: int) -> float:
        """The step from which on the next decision is due; infinity if there is none."""
        return math.inf if self.idle else STAGES[int(self.stage) + 1].until * total_steps

    def decide(self, evidence: Evidence) -> list[Decision]:
        if not self.estimates:
            self.estimates, self.moved = [0.0] * len(evidence.knobs), [False] * len(evidence.knobs)
        if evidence.line is None or evidence.total_steps is None:
            return [Decision() for _ in evidence.knobs]
        # Of the stages whose end has passed the last: with long cycles several may have.
        self.stage = float(max(i for i, stage in enumerate(STAGES) if i == 0 or stage.until * evidence.total_steps <= evidence.step))
        readings = [read_line(line, self.significant, self.farthest, last_chance=self._untouched(k)) for k, line in enumerate(evidence.line)]
        skip, self.restarted = self.restarted, False
        decisions = [self._decide(k, reading, evidence, skip) for k, reading in enumerate(readings)]
        self.restarted = any(decision.restart for decision in decisions)
        nothing = all(reading.rho is None for reading in readings)
        self.keeps = not self.restarted and ((nothing and self.stage < LATE) or (self.stage == 0 and not any(self.moved)))
        return decisions

    def hold(self, evidence: Evidence) -> list[Decision]:
        return [Decision() for _ in evidence.knobs]

    def _untouched(self, k: int) -> bool:
        """Has nothing been found in 14 % of the run?"""
        return self.stage == LATE and self.estimates[k] == 0.0

    def _decide(self, k: int, reading: Reading, evidence: Evidence, skip: bool) -> Decision:
        assert evidence.line is not None
        i, now = int(self.stage), evidence.corrections[k]
        stage, value = STAGES[i], evidence.line[k].value
        error = abs(reading.slope / reading.t) if reading.t else None
        report = {"slope": reading.slope, "error": error, "t": reading.t}
        if reading.kind == "dead":
            self.moved[k] = True
            return Decision(factor=1 / 32, restart=True, note="no progress from the start, and none further along: lowered 32 times", **report)
        if reading.rho is not None and (reading.kind == "higher" or not skip):
            if i <= EARLY and reading.t > self.significant and reading.rho < 0.9:
                return self._fall(k, value, now, evidence, report)
            self._learn(k, reading, value, i)
        if not self.estimates[k]:
            return Decision(note="nothing found yet", **report)
        then = self._place(k, reading, now, stage, i, _coming(evidence, k))
        return Decision(factor=then / now, **report)

    def _fall(self, k: int, value: float, now: float, evidence: Evidence, report: dict[str, float | None]) -> Decision:
        """Too high, early: to a quarter of what was in force, however high the schedule will be by then."""
        estimate = self.estimates[k]
        self.estimates[k] = min(estimate, 0.7 * value) if estimate else 0.5 * value
        then = max(value / 4, STAGES[int(self.stage)].aim * self.estimates[k]) / _coming(evidence, k)
        if then >= now:
            return Decision(**report)
        self.moved[k] = True
        back = now / then > self.restart
        return Decision(factor=then / now, restart=back, note="too high" + (": the interval is taken back" if back else ""), **report)

    def _learn(self, k: int, reading: Reading, value: float, i: int) -> None:
        """The estimate rises to what is found, and falls half the way: short intervals find too little, and ever less."""
        assert reading.rho is not None
        # Between 1 and 4 the minimum along the line understates the distance.
        found = value * reading.rho ** (1.5 if 1 < reading.rho < 4 else 1.0)
        before = self.estimates[k]
        if not before or (found > before and (i <= LATE or reading.kind == "higher")):
            self.estimates[k] = found
        elif i <= LATE:
            self.estimates[k] = math.sqrt(before * found)

    def _place(self, k: int, reading: Reading, now: float, stage: Stage, i: int, coming: float) -> float:
        """The correction that follows from the estimate. ``coming``: the schedule at the end of the next interval, as a part of its peak."""
        estimate = self.estimates[k]
        aim = stage.aim * estimate
        if not self.moved[k]:
            if now < stage.low * estimate:
                self.moved[k] = True
                return aim
            return min(now, stage.high * estimate / coming) if i > 0 else now
        if i < LATE:
            return aim if aim > now else max(aim, min(now, aim / coming)) if now * coming > 1.5 * aim else now
        if i > LATE and not (reading.rho is not None and reading.rho > 1.25):
            return now
        return max(min(max(aim, 0.6 * now), 3 * now), now if i > LATE else 0.0)


def read_line(line: Line, significant: float, farthest: float, *, last_chance: bool = False) -> Reading:
    """Score rho = 1/2, 1, 2 and go on where the loss falls. ``last_chance``: is it time to tell what is dead from what is slow?"""
    up, down, across = line.difference(2.0, 1.0), line.difference(0.5, 1.0), line.difference(2.0, 0.5)
    slope, t = across[0] / (2 * math.log(2)), max(-LARGEST_T, min(LARGEST_T, across[1]))
    # Far from the right value a larger step shows what a small one hides.
    if up[1] < -significant or (up[1] < 0 < down[1] and line.difference(8.0, 1.0)[1] < -significant):
        rho = 2.0
        while rho < farthest and line.difference(2 * rho, rho)[0] < 0:
            rho *= 2
        return Reading("higher", rho if rho >= farthest else _minimum(line, rho), slope, t)
    if down[1] < -significant:
        rho = 0.5
        while rho > 1 / 16 and line.difference(rho / 2, rho)[0] < 0:
            rho /= 2
        return Reading("lower", rho if rho <= 1 / 16 else _minimum(line, rho), slope, t)
    if max(abs(up[1]), abs(down[1]), abs(across[1])) > significant:
        return Reading("near", _minimum(line, 1.0), slope, t)
    if last_chance and all(line.difference(rho, 1.0)[1] > -0.5 for rho in (2.0, 4.0, 16.0)) and line.difference(0.0, 1.0)[1] < significant:
        return Reading("dead", None, slope, t)
    return Reading("nothing", None, slope, t)


def _minimum(line: Line, rho: float) -> float:
    """Of the parabola in ln(rho) through rho/2, rho and 2 rho, within half an octave."""
    left, right = line.difference(rho / 2, rho)[0], line.difference(2 * rho, rho)[0]
    bend = left + right
    return rho * 2 ** (max(-0.5, min(0.5, 0.5 * (left - right) / bend)) if bend > 0 else 0.0)


def _coming(evidence: Evidence, k: int) -> float:
    """The schedule at the end of the next interval, which is as long as the run so far: while it rises at most four times what it is."""
    now = evidence.scheduled[k] / evidence.peak[k] if evidence.peak[k] > 0 else 1.0
    rising = evidence.step < 0.1 * (evidence.total_steps or 0)
    return max(min(1.0, 4 * now), 1e-3) if rising else 1.0
