"""The line's rule: which rate the run needs, from training losses alone. No replicas, no probe data, any layout.

With shared gradients all replicas lie on one line, so any multiplier can be scored without a replica that has it:
theta(rho) = origin + rho * (average - origin) (method, section 4). The rule has three parts (measured in docs/choosing.md):

1. *Coarse scan*: a few steps far below the user's rate, then one search along the line from the beginning of the run: at which rho is the
   loss above that of the untrained model? This divergence threshold is a scale, whatever the rate was.
2. *Sweep*: from far below that threshold the rate doubles every few steps, until training breaks or more does not help (`range_test`).
   This gives the best mean rate of the run within a factor of two, and with the schedule's shape the best peak. Then weights and moments
   are restored to the beginning, at 5 to 9 % of the run (160 steps at most), and the rate rises from a 16th, evenly by the logarithm.
   The user's rate stays if it lies in a band around the estimate.
3. *Late*: two more line searches. They are greedy and vote for rates that are too low by a factor of up to about three, so only a minimum
   at rho >= 4 counts.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..controller import Controller
from ..evidence import Evidence, Run
from ..plan import Compare, Decision, Learned, Level, Moment, Plan, Restore, SnapshotOf
from ..schema import COUNT, Kind, ListOf, Number, Row
from ..validate import whole, within
from .line_search import FARTHEST, Asking, LineSearch, divergence_threshold, search_line
from .range_test import Doubling, Outcome, clear_rise, outcome

__all__ = ["LINE", "LineRule"]

LINE = "line"
"""The measurement: a weight line, which answers `Level` and `Compare`. Its settings in a plan: ``origin``, the name of a snapshot, and the
schedule's steps ``since`` and ``until``, over whose second half its other point is averaged; without these that point is the weights."""

OPENING = 1 / 16
"""of the user's rate, in the run's first steps: on top of the schedule's own beginning, so that the first steps spoil nothing"""
DOUBLING, STEPS = 0.0075, 8
"""Part of the run in which the rate doubles, and steps at most. With more steps less rate gives the same gain, which says nothing of a
longer run's best rate (docs/evidence.md)."""
BELOW = 32.0
"""The first doubling ends at the divergence threshold over this."""
LIMIT = 0.15
"""Of the run, or of as many steps as have the longest doublings: a sweep that has not found anything by then is given up."""
RISE, FROM = 0.08, 16.0
"""After the sweep: of the run, and the factor by which the rate rises in it."""
BAND = (0.7, 2.5)
"""The user's rate stays if the estimate, as a multiple of it, lies within."""
ENOUGH, UNSURE = 64.0, 10.0
"""Least losses in a doubling (examples times steps) for which the rule was measured. With fewer an estimate scatters by factors, and the
band is so many times wider either way: only a rate that is off by orders of magnitude is then seen."""
LATE = (0.26, 0.4)
"""of the run: where the late searches fall"""
FAR = 4.0
"""rho of a late search that counts"""
BROKEN = 1e20
"""A mean loss above this contains one that is not finite (`LineLosses` puts 1e30 there), because of the weights or of the mini-batch."""
COARSE_SCAN, SWEEP, RISEN, DONE = 0, 1, 2, 3
PATIENCE = 32
"""Steps in a row with fewer than two losses, after which the closure is taken to return one number for all examples."""
TOO_FEW = (
    "the closure gave {:g} losses over all ranks, but the error of a difference comes from the scatter over examples: return one loss for each "
    "example, e.g. cross_entropy(..., reduction='none').mean(-1)"
)
LONGEST = 0.1
"""A cycle's longest part of the run, because the rule acts at the ends of cycles."""
BEGINNING = "beginning"
"""The snapshot that a sweep goes back to."""


class LineRule(Controller):
    """One setting for all starts and problems: values enter as parts of their schedule's peak, losses as differences and their errors.

    Args:
        significant: |t| of a paired difference that counts.
        farthest: the largest rho that late searches score, and one over the smallest.
        freeze_after: see `Controller`; a sweep that is under way then ends without a result.
        doubling_steps: most steps in which the rate doubles in a sweep (fewer in a short run, `DOUBLING`). 8 is right for Adam, 16 for SGD.
        late: search the line twice more after the sweep? If not, it is `finished` when the rate that the sweep has found is in force.
        snapshot: where and how the run's beginning, and that of a late interval, are kept.

    Several knobs are swept together, so their ratios are the user's; the late searches tell them apart.
    """

    name = "line"
    needs_replicas = False
    needs_schedule_mean = True
    opening = OPENING
    state_keys: Mapping[str, Kind] | Sequence[str] = {
        "phase": Number(COARSE_SCAN, DONE, whole=True), "began": COUNT, "ended": COUNT, "untrained": ListOf(Number()),
        "doublings": ListOf(Row(Number(0), Number(high=math.inf), Number(0), Number())), "total": Number(-math.inf, math.inf), "cycles": COUNT,
        "threshold": Number(0), "late": Number(0, len(LATE), whole=True), "scheduled": Number(0), "risen": COUNT,
    }  # fmt: skip

    def __init__(
        self,
        significant: float = 1.5,
        farthest: float = 256.0,
        freeze_after: float | None = None,
        doubling_steps: int = STEPS,
        late: bool = True,
        snapshot: SnapshotOf | None = None,
    ) -> None:
        super().__init__(freeze_after)
        self.doubling_steps = whole(doubling_steps, "doubling_steps")
        self.significant, self.farthest = within(significant, "significant", "(0, inf)"), within(farthest, "farthest", "(4, inf)")
        self.searches_late, self.snapshot = late, SnapshotOf() if snapshot is None else snapshot
        self.phase = float(COARSE_SCAN)
        self.began = self.ended = 0.0  # steps at which coarse scan and sweep began, and at which the last doubling ended
        self.untrained: list[float] = []  # a `Doubling` at rate 0
        self.doublings: list[list[float]] = []  # those of the sweep so far
        self.total = self.cycles = 0.0  # of the doubling under way: the sum of its cycles' mean losses, and how many have one
        self.missing = 0  # how many have none
        self.batches = 1.0  # of the last doubling: its steps that have a loss
        self.threshold = 0.0  # the divergence threshold, as a part of the schedule's peak
        self.late = 0.0  # late searches that are done
        self.scheduled = 0.0  # the schedule at the end of the doubling before the last, as a part of its peak
        self.risen = 0.0  # the step at which the rate that was found is in force
        self.since = 0.0  # the step at which the late interval under way began
        self._total, self._interval = 0, 1  # steps of the run and of a cycle
        self._last_loss: float | None = None  # mean training loss of the last doubling, if it has one
        self._compared = False  # were the closure's losses compared with those given to step?
        self._examples = 0.0  # losses over all ranks, in the last answer
        self.unread = 0  # cycle ends in a row that were skipped, because the batch had fewer than two examples

    @property
    def idle(self) -> bool:
        return self.phase == DONE or (not self.sweeping and (self.frozen or self.late >= len(LATE)))

    @property
    def finished(self) -> bool:
        return self.phase == DONE

    @property
    def sweeping(self) -> bool:
        """Are the weights those of coarse scan and sweep, which will be restored?"""
        return self.phase in (COARSE_SCAN, SWEEP)

    def start(self, run: Run) -> None:
        """Raises ValueError for a run without a length, with too long cycles, a warm-up of the controller, or no learning rate; with bounds or
        products of rates, which would part in a sweep; or with replicas that do not train alike."""
        super().start(run)
        if run.total_steps is None:
            raise ValueError("the line's intervals are parts of the run: pass total_steps, or a scheduler that has it")
        self._total, self._interval = run.total_steps, run.sync_interval
        check_swept(run)
        check_alike(run, alone=self.searches_late)

    def next_end(self, total_steps: int, sync_interval: int) -> float:
        """The step from which on the next decision is due; infinity if there is none."""
        if self.idle:
            return math.inf
        if self.sweeping:
            return self.ended + self._steps_per_doubling(total_steps, sync_interval)
        return max(LATE[int(self.late)] * total_steps, self.risen) if self.searches_late else self.risen

    def plan(self, now: Moment) -> Plan:
        """Short cycles in coarse scan and sweep, which keep the run's beginning; the first one after them ends at a multiple of T."""
        if self.idle:
            return Plan(self._interval - now.step % self._interval, spread=False)
        if self.sweeping:
            steps = 1 if self.unread else min(self._interval, self._steps_per_doubling(self._total, self._interval))
            line: dict[str, Any] = {"origin": BEGINNING, "share": self.phase == COARSE_SCAN}
            return Plan(steps, spread=False, judged=False, measure={LINE: line}, snapshots={BEGINNING: self.snapshot})
        steps = 1 if self.unread else self._interval - now.step % self._interval
        if not self.searches_late:
            return Plan(steps, spread=False)
        origin = f"interval {int(self.late)}"
        until = math.ceil(self.next_end(self._total, self._interval) / self._interval) * self._interval
        line = {"origin": origin, "since": self.since, "until": until}
        return Plan(steps, spread=False, measure={LINE: line}, snapshots={origin: replace(self.snapshot, state=False)})

    def restart(self, now: Moment) -> None:
        """A sweep begins again here, because the weights that it would restore are lost. So does a late interval."""
        self.since, self.unread = float(now.schedule_step), 0
        if self.sweeping:
            self.phase, self.doublings, self.total, self.cycles, self.missing = float(COARSE_SCAN), [], 0.0, 0.0, 0
            self.began = self.ended = float(now.schedule_step)

    def decide(self, evidence: Evidence) -> Asking[Learned]:
        if self.sweeping:
            losses = [x for x in evidence.losses if x is not None]
            self.cycles += bool(losses)
            self.missing += not losses
            self.total += sum(losses) / len(losses) if losses else 0.0
        if evidence.step < self.next_end(evidence.total_steps or 0, evidence.sync_interval):
            return self._nothing(evidence)
        if self.phase == RISEN and not self.searches_late:
            self.phase = float(DONE)
            return self._nothing(evidence)
        level, _, self._examples = yield Level(LINE, 1.0)
        self.unread = 0 if self._examples >= 2 else self.unread + 1
        if self.unread:
            return self._leave_out(evidence)
        if self.phase == RISEN:
            return (yield from self._search_late(evidence))
        # A cycle whose mini-batch is bad (and not the weights), or that ends where the schedule is at 0, is skipped.
        bad = level >= BROKEN and (yield Level(LINE, 0.0))[0] >= BROKEN
        if bad or _value(evidence) <= 0:
            why = "nothing finite so far" if bad else "the schedule is at 0"
            return self._end(evidence, None, why) if self._used(evidence) >= LIMIT else self._nothing(evidence)
        loss = self._doublings_loss(evidence, level)
        self.ended = float(evidence.step)
        return (yield from (self._coarse_scan if self.phase == COARSE_SCAN else self._sweep)(evidence, loss))

    def hold(self, evidence: Evidence) -> Learned:
        """A sweep under way ends here, with the user's own values."""
        if self.sweeping and evidence.step >= self.next_end(evidence.total_steps or 0, evidence.sync_interval):
            return self._end(evidence, None, "frozen")
        if not self.sweeping and evidence.step >= self.risen:
            self.phase = float(DONE)
        return self._nothing(evidence)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.missing = 0  # of a doubling that begins anew

    def _leave_out(self, evidence: Evidence) -> Learned:
        """With fewer than two examples nothing has a standard error: the interval goes on. Raises ValueError after `PATIENCE` of them."""
        if self.unread >= PATIENCE:
            raise ValueError(TOO_FEW.format(self._examples))
        note = "the line was not read: the batch has less than two examples; the next one is read in its place"
        return Learned([Decision(note=note if k == 0 else "") for k in range(len(evidence.knobs))])

    # -- coarse scan and sweep --------------------------------------------------------------------------------------------------

    def _doublings_loss(self, evidence: Evidence, level: float) -> float:
        """Mean training loss of the doubling that ends; infinite where its last weights are broken.

        A mini-batch may have no finite loss, and a scaler may have skipped its step: such cycles are left out. Where they are most of the
        doubling, ``level``, the loss of the current batch, stands for it.
        """
        self.batches = max(1.0, self.cycles * min(evidence.sync_interval, self._steps_of(evidence)))
        shown = self._last_loss = self.total / self.cycles if self.cycles and self.cycles >= self.missing else None
        self.total, self.cycles, self.missing = 0.0, 0.0, 0
        return math.inf if level >= BROKEN else level if shown is None else shown

    def _used(self, evidence: Evidence) -> float:
        """Steps since the coarse scan began, as a part of the run; of a long run as a part of so much that 20 doublings are 15 %."""
        return (evidence.step - self.began) / min(evidence.total_steps or 1, self.doubling_steps / DOUBLING)

    def _steps_of(self, evidence: Evidence) -> int:
        return self._steps_per_doubling(evidence.total_steps or 0, evidence.sync_interval)

    def _steps_per_doubling(self, total_steps: int, sync_interval: int) -> int:
        """`DOUBLING` of the run, but at most `doubling_steps`, in whole cycles; or a part of a cycle, where one would be twice as many."""
        steps = min(DOUBLING * total_steps, self.doubling_steps)
        return round(steps / sync_interval) * sync_interval or max(1, round(steps))

    def _coarse_scan(self, evidence: Evidence, loss: float) -> Asking[Learned]:
        now, late = _value(evidence), self._used(evidence) >= LIMIT
        if not math.isfinite(loss):
            if late:
                return self._end(evidence, None, "nothing finite so far")
            return self._from(evidence, now / BELOW, "nothing finite at the first steps' rate: begun again, lower")
        level, error, _ = yield Level(LINE, 0.0)
        along = yield from divergence_threshold(compared, clear_rise(level, error))
        if along >= FARTHEST / 2 and (yield compared(FARTHEST, 0.0))[0] == 0:
            if late:
                return self._end(evidence, None, "the weights do not move")
            higher = Decision(factor=1 / OPENING, ramp=self._steps_of(evidence), note="the weights do not move: higher")
            return Learned([higher for _ in evidence.knobs])
        self.threshold = now * along
        self.untrained = [0.0, level, error / math.sqrt(self.batches)]
        yield from self._compare_losses(level)
        self.phase, self.scheduled = float(SWEEP), 0.0
        note = f"the divergence threshold is at {self.threshold:.3g} of the schedule's peak"
        return self._towards(evidence, self.threshold / BELOW, note, restart=True)

    def _compare_losses(self, begun: float) -> Asking[None]:
        """Once: warns if ``step(loss)`` and the closure give different losses. ``begun``: of the current batch at the run's beginning."""
        told, self._last_loss = self._last_loss, None
        if self._compared or told is None:
            return
        self._compared = True
        # Between its beginning and its end, because a rate that is far too high may have moved the loss meanwhile.
        read, error, _ = yield Level(LINE, 1.0)
        beyond = max(told - max(read, begun), min(read, begun) - told)
        if beyond > max(abs(told), abs(read)) / 3 and beyond > 3 * error:
            warnings.warn(
                f"step(loss) was {told:.4g} on the mean, but the closure's losses are {read:.4g}: give step the mean of the same losses (not "
                "divided by the number of micro-batches, nor multiplied by a scaler), or the rate that is found will be wrong",
                stacklevel=5,
            )

    def _sweep(self, evidence: Evidence, loss: float) -> Asking[Learned]:
        now = _value(evidence)
        # The t tells whether anything was learned; when that is known the forward pass is saved.
        t = 0.0 if self._so_far().best is not None else (yield compared(1.0, 0.0))[1]
        self.doublings.append([now / math.sqrt(2), loss, (yield Level(LINE, 1.0))[1] / math.sqrt(self.batches), t])
        found = self._so_far()
        used = self._used(evidence)
        if found.broke and len(self.doublings) <= 3 and used < LIMIT / 2:
            self.doublings, self.phase = [], float(COARSE_SCAN)
            return self._from(evidence, now / BELOW, "broken at once: the sweep begins again, lower")
        if found.over or used >= LIMIT:
            best = None if found.best is None else found.best * _peak_over_mean(evidence)
            why = "nothing was found" if best is None else "more does not help" if found.over else "out of time"
            if found.broke and not found.learned and best is not None and best > 1:
                return self._end(evidence, None, "training broke before anything was learned, which is no reason to go higher")
            return self._end(evidence, best, "training broke" if found.broke else why)
        return self._towards(evidence, 2 * now, "")

    def _so_far(self) -> Outcome:
        if not self.doublings:
            return Outcome(False, None, False, False)
        untrained = Doubling(*self.untrained)
        return outcome(untrained, [Doubling(*row) for row in self.doublings], clear_rise(untrained.loss, untrained.error))

    def _towards(self, evidence: Evidence, goal: float, note: str, restart: bool = False) -> Learned:
        """To be at ``goal`` at the next doubling's end, if the schedule grows as it did in the last."""
        now = evidence.scheduled[0] / evidence.peak[0] if evidence.peak[0] > 0 else 1.0
        growth = min(2.0, max(0.5, now / self.scheduled)) if self.scheduled > 0 else 1.0
        self.scheduled = now
        factor = goal / (_value(evidence) * growth)
        decision = Decision(factor=factor, ramp=self._steps_of(evidence), ramp_from=0.5 if restart else None, note=note)
        return Learned([decision for _ in evidence.knobs], Restore(BEGINNING) if restart else None)

    def _from(self, evidence: Evidence, goal: float, note: str) -> Learned:
        """From the beginning again, at this rate, at once."""
        return Learned([Decision(factor=goal / _value(evidence), ramp_from=1.0, note=note) for _ in evidence.knobs], Restore(BEGINNING))

    def _end(self, evidence: Evidence, best: float | None, note: str) -> Learned:
        """Back to the beginning, and from there to the estimate, or to the user's own values."""
        self.phase = float(RISEN)
        losses = self._steps_of(evidence) * self._examples
        width = 1.0 if losses >= ENOUGH else UNSURE
        stays = best is None or BAND[0] / width <= best <= BAND[1] * width
        if best is not None:
            note += f", the best peak is about {best:.3g} times the schedule's" + (", which stays" if stays else "")
            if width > 1:
                note += (
                    f" (from {losses:g} losses to a doubling of the rate: only what is off by a factor of {BAND[1] * width:g} can be told)"
                )
        goal = 1.0 if best is None or stays else best
        ramp = round(RISE * (evidence.total_steps or 0))
        self.risen, self.since = float(evidence.step + ramp), float(evidence.step)
        rise = Decision(ramp=ramp, ramp_from=1 / FROM, note=f"{note}: begun again")
        return Learned([replace(rise, factor=goal / correction) for correction in evidence.corrections], Restore(BEGINNING))

    # -- late ------------------------------------------------------------------------------------------------------------

    def _search_late(self, evidence: Evidence) -> Asking[Learned]:
        while self.late < len(LATE) and LATE[int(self.late)] * (evidence.total_steps or 0) <= evidence.step:
            self.late += 1
        if self.late >= len(LATE):
            self.phase = float(DONE)
        self.since = float(evidence.step)
        decisions = []
        for k in range(len(evidence.knobs)):
            found = yield from search_line(partial(Compare, LINE, knob=k), self.significant, self.farthest)
            decisions.append(_late(found, evidence.total_steps or 0))
        return Learned(decisions)


def _late(found: LineSearch, total_steps: int) -> Decision:
    """To half of rho where that is far; a rise takes 2 % of the run for each doubling, 10 % at most."""
    rho = found.rho or 1.0
    factor = rho / 2 if rho >= FAR else 1.0
    return Decision(
        factor=factor, ramp=round(0.02 * total_steps * min(max(math.log2(factor), 1.0), 5.0)), slope=found.slope,
        error=abs(found.slope / found.t) if found.t else None, t=found.t,
        note=f"far too low: rho {rho:.3g}" if rho >= FAR else "",
    )  # fmt: skip


def _peak_over_mean(evidence: Evidence) -> float:
    """Of the schedule: converts a mean rate to a peak."""
    return evidence.peak[0] / evidence.mean[0] if evidence.mean[0] > 0 else 1.0


def _value(evidence: Evidence) -> float:
    """The value in force as a part of its schedule's peak; in a sweep knobs move together, so the first stands for all."""
    return evidence.values[0] / evidence.peak[0] if evidence.peak[0] > 0 else evidence.corrections[0]


compared = partial(Compare, LINE)


def check_swept(run: Run) -> None:
    """Raises ValueError for knobs and a clock with which no sweep can be made."""
    rates = [knob for knob in run.knobs if knob.rate]
    if not rates:
        raise ValueError(
            f"none of the knobs {[knob.name for knob in run.knobs]} is a learning rate, and a LineController sweeps nothing else: leave it out"
        )
    product = next((knob.name for knob in run.knobs if knob.product), None)
    if product is not None:
        raise ValueError(
            f"the knob {product!r} is rate * decay, but a sweep moves rates by orders of magnitude, and decays would go the other way: pass "
            "product=False"
        )
    bounded = next((knob.name for knob in rates if knob.scale.bounded), None)
    if bounded is not None and len(rates) > 1:
        raise ValueError(
            f"the knob {bounded!r} has bounds, but a LineController sweeps all rates together, and one that is held back would part from them: "
            "leave bounds out, or use one knob, LearningRate(groups=None)"
        )
    if run.clock.warmup_steps:
        raise ValueError(
            f"warmup_steps (auto_lr_warmup_steps) is {run.clock.warmup_steps}, but a LineController finds the rate at the run's beginning: pass 0"
        )
    longest = max(1, int(LONGEST * (run.total_steps or 0)))
    if run.sync_interval > longest:
        raise ValueError(
            f"sync_interval (model_sync_interval) is {run.sync_interval} of {run.total_steps} steps, but a LineController acts at the ends of cycles, in the first "
            f"half of a run: pass at most {longest}"
        )


def check_alike(run: Run, alone: bool) -> None:
    """Raises ValueError where replicas are not equal during the searches; ``alone``: to the end, for no other controller follows."""
    others = [knob.name for knob in run.knobs if not knob.rate]
    if alone and others:
        raise ValueError(
            f"knob {others[0]!r} is no learning rate, and the line scales with no other: use "
            "SequentialController(LineController(model, late=False), ProbeController(...)), which leaves it to the probe"
        )
    follow = "SequentialController(LineController(model, late=False), ProbeController(...))"
    for wrong, remedy in (
        (alone and run.local and run.replicas > 1, f"gradients is 'local': pass gradients='shared', or {follow}"),
        (run.averaging != "Plain()", f"converge is {run.averaging}: leave it out"),
        (
            alone and run.together,
            f"replicas are co-resident: give it one model, and all micro-batches of a step to its closure, or {follow}",
        ),
    ):
        if wrong:
            raise ValueError(
                f"a LineController has all replicas on one line while it reads, with nothing that makes them differ, but {remedy}"
            )
