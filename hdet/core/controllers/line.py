"""The line's rule: losses along the way of an interval in, a value for the knob out. No replicas, no probe data, any layout.

With shared gradients all replicas lie on one line, so any multiplier can be scored without a replica that has it:
theta(rho) = anchor + rho * (average - anchor), from the weights at the interval's beginning through the average of its second half
(method, section 4). A training batch is scored at several rho; the same examples at all of them, so that differences are paired.

What is read off, and why so (docs/controllers.md has the measurements):

1. Intervals grow with the run: they end at 1, 2, 4, 8, 14, 24, 40 % of it. Early on signal dominates noise, and an interval as long as
   half of the run so far says what the whole run will. Short ones vote for rates that are too low, the sooner the later they come.
2. Far below the right value the loss still falls at rho = 4, 16, 64: the minimum along the line times the value in force is an estimate
   of the right value. Near it the minimum is near 1 whatever the distance, so estimates are remembered.
3. The user's own value stays as long as it lies within a band around the estimate.
4. Rising is done in two parts: to half of the estimate within the schedule's warm-up, where a rate that is too high does lasting
   damage and one that is too low costs nothing; and to all of it afterwards, where it is the other way round. And little by little:
   a sudden rise is a shock to the moments, and does the same damage.
5. A value that is found far too high in the first steps has done its damage: the weights of the interval's beginning are taken back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from .base import BaseController
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
    """A value of the user's that would rise above high * R within the next interval is held there."""


STAGES = (
    Stage(0.01, 0.3, 0.3, math.inf),
    Stage(0.02, 0.4, 0.4, 1.0),
    Stage(0.04, 0.5, 0.5, 0.8),
    Stage(0.08, 0.5, 0.6, 0.9),
    Stage(0.14, 0.6, 1.6, 2.0),
    Stage(0.24, 0.6, 1.0, math.inf),
    Stage(0.40, 0.5, 1.0, math.inf),
)
FIRST, EARLY, WARM, FULL = 1, 2, 3, 4
"""Stages: the last of the first steps; the last in which a mere tendency makes a value fall; the last within a usual warm-up; the one in
which the estimate is acted on in full, after which only clear evidence moves anything."""
HELD = 1 / 3
"""A value of the user's is not held below this part of it without a clear minimum below: estimates from the warm-up can be too low by more."""
FALL = 4.0
"""What is found too high goes to this part of what was in force."""


class Reading(NamedTuple):
    """What a line says. t of: rho = 2 against 1, 1/2 against 1, 2 against 1/2."""

    up: float
    down: float
    across: float
    slope: float
    """d loss / d ln(rho) at 1, between rho = 1/2 and 2."""
    rho: float | None
    """Where the loss is lowest; None where no difference is significant."""
    higher: bool
    """Is it lower further along?"""
    worse: bool
    """Is the loss higher than at the anchor? (Only looked at where asked for.)"""


class LineRule(BaseController):
    """One setting for all starts and problems: values enter as parts of their schedule's peak, losses as differences and their t.

    Args:
        significant: |t| of a paired difference that counts.
        farthest: the largest rho that is scored.
        restart: weights are taken back when a value falls by more than this factor while the run is young.
        freeze_after: see `BaseController`.

    No estimate, no move. Losses that are not finite count as very high ones.
    """

    name = "line"
    needs_replicas = False
    spreads = False
    state_keys = ("estimates", "moved", "stage", "restarted", "keeps", "fresh")

    def __init__(self, significant: float = 1.5, farthest: float = 256.0, restart: float = 2.5, freeze_after: float | None = None) -> None:
        super().__init__(freeze_after)
        for name, value, least in (("significant", significant, 0), ("farthest", farthest, 4), ("restart", restart, 1)):
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value > least):
                raise ValueError(f"{name} must be a number above {least}, got {value!r}")
        self.significant, self.farthest, self.restart = significant, farthest, restart
        self.estimates: list[float] = []
        """[knob]: R as a part of the schedule's peak; 0: none yet."""
        self.moved: list[bool] = []
        """[knob]: is the value no longer the user's?"""
        self.stage = -1.0
        """The last one that was decided, -1 before the first."""
        self.restarted = False
        """Were weights taken back at the last decision? Then this interval began with an optimizer without moments, and says little."""
        self.keeps = False
        """Does the interval go on with its anchor, because nothing healthy was seen in it yet?"""
        self.fresh = True
        """Is the anchor still the beginning of the run?"""

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
        i = max(i for i, stage in enumerate(STAGES) if i == 0 or stage.until * evidence.total_steps <= evidence.step)
        self.stage = float(i)
        readings = [
            read_line(line, self.significant, self.farthest, from_anchor=self.fresh and i <= WARM) for line in evidence.line
        ]  # fmt: skip
        if self.restarted:
            readings = [reading if reading.higher else reading._replace(rho=None, worse=False) for reading in readings]
        decisions = [self._decide(k, i, reading, evidence) for k, reading in enumerate(readings)]
        self.restarted = any(decision.restart for decision in decisions)
        if self.restarted:
            decisions = [replace(decision, restart=True) for decision in decisions]
        found, healthy = any(r.rho is not None for r in readings), any(r.higher for r in readings)
        self.keeps = not self.restarted and (
            i == 0 or (not found and i < FULL) or (self.fresh and i <= EARLY and not healthy)
        )  # fmt: skip
        self.fresh = self.fresh and (self.keeps or self.restarted)
        return [replace(decision, over=_easing(decision, evidence.total_steps)) for decision in decisions]

    def hold(self, evidence: Evidence) -> list[Decision]:
        return [Decision() for _ in evidence.knobs]

    def _decide(self, k: int, i: int, reading: Reading, evidence: Evidence) -> Decision:
        assert evidence.line is not None
        now, value = evidence.corrections[k], evidence.line[k].value
        coming = _coming(evidence, k)
        then, note = now, ""
        if reading.worse or _too_high(i, reading):
            then = min(now, self._fall(k, i, value) / coming)
            self.moved[k], note = self.moved[k] or then < now, "too high" if then < now else ""
        else:
            if reading.rho is not None and (i > FIRST or reading.rho >= 1 or max(reading.up, reading.across) > CLEAR):
                self._learn(k, i, reading, value)
            if self.estimates[k]:
                then = self._place(k, i, reading, now, coming)
            if i <= FIRST and self.fresh and now > FALL * then:
                note = "far too high"
        error = abs(reading.slope / reading.across) if reading.across else None
        back = bool(note) and now > self.restart * then
        return Decision(
            factor=then / now, slope=reading.slope, error=error, t=reading.across, restart=back,
            note=note + (": the interval is taken back" if back else ""),
        )  # fmt: skip

    def _fall(self, k: int, i: int, value: float) -> float:
        """Where a value that is too high is to be by the end of the next interval."""
        before = self.estimates[k]
        self.estimates[k] = min(before, 0.7 * value) if before else 0.5 * value
        return max(value / FALL, STAGES[i].aim * self.estimates[k])

    def _learn(self, k: int, i: int, reading: Reading, value: float) -> None:
        """The estimate goes up to what is found, and down half the way, or all of it on clear evidence in the warm-up."""
        assert reading.rho is not None
        # Along the line the minimum understates the distance, on both sides.
        found = value * (max(reading.rho, 0.5) ** 2 if reading.rho < 1 else reading.rho**1.5 if reading.rho < 4 else reading.rho)
        before = self.estimates[k]
        if not before or (found > before and (i <= FULL or reading.higher)) or (i <= WARM and found < before and reading.across > 2):
            self.estimates[k] = found
        elif i <= FULL:
            self.estimates[k] = math.sqrt(before * found)

    def _place(self, k: int, i: int, reading: Reading, now: float, coming: float) -> float:
        """The correction that follows from the estimate. ``coming``: the schedule at the end of the next interval, as a part of its peak."""
        stage, estimate = STAGES[i], self.estimates[k]
        aim, then = stage.aim * estimate, now
        if not self.moved[k]:
            if stage.low * estimate > 1:
                self.moved[k], then = True, aim
            elif 0 < i <= FULL and not reading.higher:
                then = min(1.0, stage.high * estimate / coming)
                far = i <= FIRST and self.fresh and now > FALL * then  # then it is taken back, and not held
                then = then if far or (reading.rho or 1.0) < 0.75 else max(then, HELD)
        elif i < FULL:
            then = aim if aim > now else max(aim, min(now, aim / coming)) if now * coming > 1.5 * aim else now
        elif i == FULL:
            then = min(max(aim, 0.6 * now), 3 * now)
        elif reading.rho is not None and reading.rho > 1.25:
            then = max(now, min(aim, 3 * now))
        if i >= WARM and reading.rho is not None and reading.rho < 0.75 and reading.across > CLEAR:
            self.moved[k], then = True, min(then, 0.67 * now)
        return then


CLEAR = 2.5
"""t of what is acted on by itself."""


def _too_high(i: int, reading: Reading) -> bool:
    """The younger the run, the higher is a healthy line's minimum, so the less it takes."""
    if reading.rho is None:
        return False
    if i <= FIRST:
        return reading.rho < 0.95 and max(reading.up, reading.across) > CLEAR
    return (i <= EARLY and reading.rho < 0.9 or i == WARM and reading.rho < 0.6) and reading.across > 2.3


def _easing(decision: Decision, total_steps: int) -> int:
    """Steps over which a value rises: 2 % of the run for each octave, as in a warm-up, 10 % at most; and 8 % from nothing."""
    octaves = 4.0 if decision.restart else math.log2(max(decision.factor, 1.0))
    return round(0.02 * total_steps * min(max(octaves, 1.0), 5.0))


def _coming(evidence: Evidence, k: int) -> float:
    """The schedule at the end of the next interval, which is as long as the run so far: at most four times what it is, in a usual warm-up."""
    now = evidence.scheduled[k] / evidence.peak[k] if evidence.peak[k] > 0 else 1.0
    return max(min(1.0, 4 * now), 1e-3) if evidence.step < 0.1 * (evidence.total_steps or 0) else 1.0


def read_line(line: Line, significant: float, farthest: float, *, from_anchor: bool = False) -> Reading:
    """Score rho = 1/2, 1, 2 and go on where the loss falls. ``from_anchor``: also compare with rho = 0 where it does not."""
    up, down, across = line.difference(2.0, 1.0), line.difference(0.5, 1.0), line.difference(2.0, 0.5)
    # Far from the right value a large step shows what a small one hides.
    higher = up[1] < 0 and (
        min(up[1], across[1]) < -significant or (down[1] > 0 and line.difference(8.0, 1.0)[1] < -significant)
    )  # fmt: skip
    rho = None
    if higher:
        rho = 2.0
        while rho < farthest and line.difference(2 * rho, rho)[0] < 0:
            rho *= 2
        rho = rho if rho >= farthest else _minimum(line, rho)
    elif max(abs(up[1]), abs(down[1]), abs(across[1])) > significant:
        rho = _minimum(line, 0.5 if up[1] > 0 > down[1] else 1.0)
    worse = from_anchor and not higher and line.difference(1.0, 0.0)[1] > 2
    return Reading(up[1], down[1], across[1], across[0] / (2 * math.log(2)), rho, higher, worse)


def _minimum(line: Line, rho: float) -> float:
    """Of the parabola in ln(rho) through rho/2, rho and 2 rho, within half an octave."""
    left, right = line.difference(rho / 2, rho)[0], line.difference(2 * rho, rho)[0]
    bend = left + right
    return float(rho * 2 ** (max(-0.5, min(0.5, 0.5 * (left - right) / bend)) if bend > 0 else math.copysign(0.5, left - right)))
