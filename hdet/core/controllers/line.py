"""The line's rule: where the run's rate has to be, from training losses alone. No replicas, no probe data, any layout.

With shared gradients all replicas lie on one line, so any multiplier can be scored without a replica that has it:
theta(rho) = anchor + rho * (average - anchor) (method, section 4). The rule has three parts (docs/controllers.md has the measurements):

1. *Feel*: a few steps far below the user's rate, then one look along the line from the beginning of the run: at which rho is the loss
   above that of the untrained model? The answer is a scale, whatever the rate was.
2. *Sweep*: from far below that, the rate doubles from octave to octave until training breaks or more does not help (`sweep`). What
   follows is an estimate of the best mean rate of the run, within a factor of two, and the schedule's shape says what that is at its peak.
   Then weights and moments are taken back to the beginning, at 5 to 9 % of the run (160 steps at most), and the rate rises gently: from a 16th,
   evenly by the logarithm. A user's rate that lies in a band around the estimate stays.
3. *Late*: the line is read twice more. Late readings are greedy, they vote for rates that are too low by a factor of up to three or so;
   only what is far beyond that counts: a minimum at rho >= 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from ..schema import COUNT, Kind, ListOf, Number, Row
from .base import BaseController
from .protocol import Decision, Evidence
from .reading import FARTHEST, Reading, edge, read_line
from .sweep import Octave, Outcome, clear_rise, outcome

__all__ = ["Line", "LineRule"]


class Line(Protocol):
    """The line of the interval that ends. Every rank gets the same answers."""

    examples: float
    """Losses over all ranks, in the last answer."""

    def difference(self, a: float, b: float, knob: int | None = None) -> tuple[float, float]:
        """Mean over the examples of L(theta(a)) - L(theta(b)), and its t. ``knob``: moved alone, the others at rho = 1; None: all together."""
        ...

    def mean(self, rho: float) -> tuple[float, float]:
        """Mean loss of the current batch, and its standard error."""
        ...


OPENING = 1 / 16
"""of the user's rate, in the run's first steps: on top of the schedule's own beginning, so that the first steps spoil nothing"""
OCTAVE, STEPS = 0.0075, 8
"""Of the run, and at most so many steps. What an octave shows depends on its steps: with more of them less rate is sufficient for the same gain, which
says nothing of a longer run's best rate (docs/results.md)."""
BELOW = 32.0
"""The first octave ends at the line's edge over this."""
LIMIT = 0.15
"""Of the run, or of as many steps as have the longest octaves: a sweep that has not found anything by then is given up."""
RISE, FROM = 0.08, 16.0
"""After the sweep: of the run, and the factor by which the rate rises in it."""
BAND = (0.7, 2.5)
"""The user's rate stays if the estimate, as a multiple of it, lies within."""
ENOUGH, UNSURE = 64.0, 10.0
"""Losses in an octave, examples times steps: the least with which the rule was found. With fewer an estimate scatters by factors, and the band is so
many times wider either way: a rate that is off by orders of magnitude is still seen, one that is not cannot be judged."""
LATE = (0.26, 0.4)
"""of the run: where the late readings fall"""
FAR = 4.0
"""rho of a late reading that counts"""
BROKEN = 1e20
"""A mean loss in which one is not finite, because of the weights or of the mini-batch: each such loss is taken for far more."""
FEEL, SWEEP, READ, DONE = 0, 1, 2, 3


class LineRule(BaseController):
    """One setting for all starts and problems: values enter as parts of their schedule's peak, losses as differences and their errors.

    Args:
        significant: |t| of a paired difference that counts.
        farthest: the largest rho that late readings score, and one over the smallest.
        freeze_after: see `BaseController`; a sweep that is under way then ends without a result.
        octave: steps in which the rate doubles, at most, in the sweep of a run that is long enough (`OCTAVE`). 8 is right for Adam, 16 for SGD.

    Several knobs are swept together, so their ratios are the user's; the late readings tell them apart.
    """

    name = "line"
    needs_replicas = False
    spreads = False
    opening = OPENING
    state_keys: Mapping[str, Kind] | Sequence[str] = {
        "phase": Number(FEEL, DONE, whole=True), "began": COUNT, "ended": COUNT, "untrained": ListOf(Number()),
        "octaves": ListOf(Row(Number(0), Number(high=math.inf), Number(0), Number())), "total": Number(-math.inf, math.inf), "cycles": COUNT,
        "edge": Number(0), "late": Number(0, len(LATE), whole=True), "scheduled": Number(0), "risen": COUNT,
    }  # fmt: skip

    def __init__(self, significant: float = 1.5, farthest: float = 256.0, freeze_after: float | None = None, octave: int = STEPS) -> None:
        super().__init__(freeze_after)
        if type(octave) is not int or octave < 1:
            raise ValueError(f"octave must be a whole number of steps above 0, got {octave!r}")
        self.octave = octave
        for name, value, least in (("significant", significant, 0), ("farthest", farthest, 4)):
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value > least):
                raise ValueError(f"{name} must be a number above {least}, got {value!r}")
        self.significant, self.farthest = significant, farthest
        self.phase = float(FEEL)
        self.began = 0.0
        """The step at which feel and sweep began."""
        self.ended = 0.0
        """The step at which the last octave ended."""
        self.untrained: list[float] = []
        """An `Octave` at rate 0."""
        self.octaves: list[list[float]] = []
        self.total = self.cycles = 0.0
        """Of the octave under way: the sum of its cycles' mean losses, and how many have one."""
        self.missing = 0
        """How many have none."""
        self.felt: float | None = None
        """The training loss that the last octave showed, if any."""
        self.batches = 1.0
        """Of how many steps."""
        self.edge = 0.0
        """The line's, as a part of the schedule's peak."""
        self.late = 0.0
        """Late readings that were taken."""
        self.scheduled = 0.0
        """The schedule at the end of the octave before the last, as a part of its peak."""
        self.risen = 0.0
        """The step at which the rate that was found is in force."""

    @property
    def idle(self) -> bool:
        return self.phase == DONE or (not self.sweeping and (self.frozen or self.late >= len(LATE)))

    @property
    def sweeping(self) -> bool:
        """Are the weights those of feel and sweep, which will be taken back?"""
        return self.phase in (FEEL, SWEEP)

    @property
    def feeling(self) -> bool:
        """Is the next reading the first one from where the weights will be taken back to?"""
        return self.phase == FEEL

    def check_run(self, total_steps: int | None, floor: Sequence[float]) -> None:
        """Raises ValueError without the run's length, of which the parts are parts."""
        super().check_run(total_steps, floor)
        if total_steps is None:
            raise ValueError("the line's intervals are parts of the run: pass total_steps, or a scheduler that has it")

    def next_end(self, total_steps: int, sync_interval: int) -> float:
        """The step from which on the next decision is due; infinity if there is none."""
        if self.idle:
            return math.inf
        if self.sweeping:
            return self.ended + octave_steps(total_steps, sync_interval, self.octave)
        return max(LATE[int(self.late)] * total_steps, self.risen)

    def cycle_steps(self, began: int, total_steps: int, sync_interval: int) -> int:
        """Steps of the cycle that begins at step ``began``: T, or less in feel and sweep; after those the first ends at a multiple of T."""
        if self.sweeping:
            return min(sync_interval, octave_steps(total_steps, sync_interval, self.octave))
        return sync_interval - began % sync_interval

    def anew(self, step: int) -> None:
        """The weights that a sweep would go back to are lost (a checkpoint was loaded, a cycle taken back): it begins again, here."""
        if self.sweeping:
            self.phase, self.octaves, self.total, self.cycles, self.missing = float(FEEL), [], 0.0, 0.0, 0
            self.began = self.ended = float(step)

    def decide(self, evidence: Evidence) -> list[Decision]:
        if self.sweeping:
            losses = [x for x in evidence.losses if x is not None]
            self.cycles += bool(losses)
            self.missing += not losses
            self.total += sum(losses) / len(losses) if losses else 0.0
        if evidence.line is None or evidence.total_steps is None:
            return [Decision() for _ in evidence.knobs]
        if self.phase == READ:
            return self._read(evidence, evidence.line)
        # The next cycle is read in the place of one whose mini-batch is bad, and not the weights, or that ends where the schedule is at 0.
        bad = evidence.line.mean(1.0)[0] >= BROKEN and evidence.line.mean(0.0)[0] >= BROKEN
        if bad or _value(evidence) <= 0:
            late = self._used(evidence) >= LIMIT
            why = "nothing finite so far" if bad else "the schedule is at 0"
            return self._end(evidence, None, why) if late else [Decision() for _ in evidence.knobs]
        loss = self._octaves_loss(evidence)
        self.ended = float(evidence.step)
        return self._feel(evidence, evidence.line, loss) if self.phase == FEEL else self._sweep(evidence, evidence.line, loss)

    def hold(self, evidence: Evidence) -> list[Decision]:
        """A sweep under way ends here, with the user's own values."""
        return self._end(evidence, None, "frozen") if self.sweeping and evidence.line is not None else [Decision() for _ in evidence.knobs]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.missing = 0  # of an octave that begins anew

    # -- feel and sweep --------------------------------------------------------------------------------------------------

    def _octaves_loss(self, evidence: Evidence) -> float:
        """Mean training loss of the octave that ends; infinite where the weights that it ends with are broken.

        A mini-batch may have no finite loss, and a scaler may have skipped its step: what has none is left out, and where that is most of the
        octave the current batch stands for it.
        """
        level = evidence.line.mean(1.0)[0] if evidence.line is not None else math.inf
        self.batches = max(1.0, self.cycles * min(evidence.sync_interval, self._octave(evidence)))
        self.felt = self.total / self.cycles if self.cycles and self.cycles >= self.missing else None
        self.total, self.cycles, self.missing = 0.0, 0.0, 0
        return math.inf if level >= BROKEN else level if self.felt is None else self.felt

    def _used(self, evidence: Evidence) -> float:
        """Part of the run since feel began, or of as much of it as has octaves of ``octave`` steps: there are 20 of them at most."""
        return (evidence.step - self.began) / min(evidence.total_steps or 1, self.octave / OCTAVE)

    def _octave(self, evidence: Evidence) -> int:
        return octave_steps(evidence.total_steps or 0, evidence.sync_interval, self.octave)

    def _feel(self, evidence: Evidence, line: Any, loss: float) -> list[Decision]:
        now, late = _value(evidence), self._used(evidence) >= LIMIT
        if not math.isfinite(loss):
            if late:
                return self._end(evidence, None, "nothing finite so far")
            return self._from(evidence, now / BELOW, "nothing finite at the first steps' rate: begun again, lower")
        level, error = line.mean(0.0)
        along = edge(line.difference, clear_rise(level, error))
        if along >= FARTHEST / 2 and line.difference(FARTHEST, 0.0)[0] == 0:
            if late:
                return self._end(evidence, None, "the weights do not move")
            factor = 1 / OPENING
            return [Decision(factor=factor, over=self._octave(evidence), note="the weights do not move: higher") for _ in evidence.knobs]
        self.edge = now * along
        self.untrained = [0.0, level, error / math.sqrt(self.batches)]
        self.phase, self.scheduled = float(SWEEP), 0.0
        return self._towards(evidence, self.edge / BELOW, f"the line's edge is at {self.edge:.3g} of the schedule's peak", restart=True)

    def _sweep(self, evidence: Evidence, line: Any, loss: float) -> list[Decision]:
        now = _value(evidence)
        # Whether something was learned; a pass over the batch that tells nothing new afterwards.
        t = 0.0 if self._so_far().best is not None else line.difference(1.0, 0.0)[1]
        self.octaves.append([now / math.sqrt(2), loss, line.mean(1.0)[1] / math.sqrt(self.batches), t])
        found = self._so_far()
        used = self._used(evidence)
        if found.broke and len(self.octaves) <= 3 and used < LIMIT / 2:
            self.octaves, self.phase = [], float(FEEL)
            return self._from(evidence, now / BELOW, "broken at once: the sweep begins again, lower")
        if found.over or used >= LIMIT:
            best = None if found.best is None else found.best * _peak_over_mean(evidence)
            why = "nothing was found" if best is None else "more does not help" if found.over else "out of time"
            if found.broke and not found.learned and best is not None and best > 1:
                return self._end(evidence, None, "training broke before anything was learned, which is no reason to go higher")
            return self._end(evidence, best, "training broke" if found.broke else why)
        return self._towards(evidence, 2 * now, "")

    def _so_far(self) -> Outcome:
        if not self.octaves:
            return Outcome(False, None, False, False)
        untrained = Octave(*self.untrained)
        return outcome(untrained, [Octave(*row) for row in self.octaves], clear_rise(untrained.loss, untrained.error))

    def _towards(self, evidence: Evidence, goal: float, note: str, restart: bool = False) -> list[Decision]:
        """To be at ``goal`` at the next octave's end, as far as the schedule's own growth can be told from its last."""
        now = evidence.scheduled[0] / evidence.peak[0] if evidence.peak[0] > 0 else 1.0
        growth = min(2.0, max(0.5, now / self.scheduled)) if self.scheduled > 0 else 1.0
        self.scheduled = now
        factor = goal / (_value(evidence) * growth)
        over = self._octave(evidence)
        return [Decision(factor=factor, over=over, restart=restart, rise_from=0.5 if restart else 1.0, note=note) for _ in evidence.knobs]

    def _from(self, evidence: Evidence, goal: float, note: str) -> list[Decision]:
        """From the beginning again, at this rate."""
        return [Decision(factor=goal / _value(evidence), restart=True, note=note) for _ in evidence.knobs]

    def _end(self, evidence: Evidence, best: float | None, note: str) -> list[Decision]:
        """Back to the beginning, and from there to the estimate, or to the user's own values."""
        self.phase = float(READ)
        losses = self._octave(evidence) * evidence.line.examples if evidence.line is not None else 0.0
        width = 1.0 if losses >= ENOUGH else UNSURE
        stays = best is None or BAND[0] / width <= best <= BAND[1] * width
        if best is not None:
            note += f", the best peak is about {best:.3g} times the schedule's" + (", which stays" if stays else "")
            if width > 1:
                note += (
                    f" (from {losses:g} losses to a doubling of the rate: only what is off by a factor of {BAND[1] * width:g} can be told)"
                )
        goal = 1.0 if best is None or stays else best
        over = round(RISE * (evidence.total_steps or 0))
        self.risen = float(evidence.step + over)
        return [
            Decision(factor=goal / correction, restart=True, rise_from=1 / FROM, over=over, note=f"{note}: begun again")
            for correction in evidence.corrections
        ]

    # -- late ------------------------------------------------------------------------------------------------------------

    def _read(self, evidence: Evidence, line: Any) -> list[Decision]:
        while self.late < len(LATE) and LATE[int(self.late)] * (evidence.total_steps or 0) <= evidence.step:
            self.late += 1
        if self.late >= len(LATE):
            self.phase = float(DONE)
        decisions = []
        for k in range(len(evidence.knobs)):
            reading = read_line(partial(line.difference, knob=k), self.significant, self.farthest)
            decisions.append(_late(reading, evidence.total_steps or 0))
        return decisions


def _late(reading: Reading, total_steps: int) -> Decision:
    """Half of the way in rho where that is far; a rise takes 2 % of the run for each octave, 10 % at most."""
    rho = reading.rho or 1.0
    far = rho >= FAR
    factor = rho / 2 if far else 1.0
    return Decision(
        factor=factor, over=round(0.02 * total_steps * min(max(math.log2(factor), 1.0), 5.0)), slope=reading.slope,
        error=abs(reading.slope / reading.across) if reading.across else None, t=reading.across,
        note=f"far too low: rho {rho:.3g}" if far else "",
    )  # fmt: skip


def octave_steps(total_steps: int, sync_interval: int, most: int = STEPS) -> int:
    """`OCTAVE` of the run, but not above ``most``, in whole cycles; less than one where that would be twice as many."""
    steps = min(OCTAVE * total_steps, most)
    return round(steps / sync_interval) * sync_interval or max(1, round(steps))


def _peak_over_mean(evidence: Evidence) -> float:
    """Of the schedule: what the rate has to be on the mean, it has to be so many times at the peak."""
    return evidence.peak[0] / evidence.mean[0] if evidence.mean[0] > 0 else 1.0


def _value(evidence: Evidence) -> float:
    """The value in force as a part of its schedule's peak; in a sweep knobs move together, and the first stands for all."""
    return evidence.values[0] / evidence.peak[0] if evidence.peak[0] > 0 else evidence.corrections[0]
