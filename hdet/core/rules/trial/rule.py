"""What annealed trials say of a learning rate, and what to do about it: the rule inside `hdet.AutoLR`.

A run is told nothing by its own losses about a rate that it does not have; and a look a few steps ahead prefers a rate that is too low, because
most of what a high rate costs is noise, which goes when the rate falls. So copies of the run train beside it for ``steps`` steps at several
multiples of its rate, each falling to zero, and are scored on batches that none of them has seen. How much that says depends on the trial's length,
and on where in the run it begins (docs/evidence/autolr.md, "What a trial can tell"). Hence the rounds:

- One *scan* at the first step, with multiples far apart. It finds only what is grossly wrong: a rate that breaks at once (then the run goes on as
  the lower arm), or so low that 128 times as much is far ahead even though short runs prefer much higher rates.
- Then a second scan, of eight times the rate: if that, too, is behind a higher one, the rate is raised to it. What learns all there is in so few
  steps, as how frequent each class is, is too high for a long run. If it is still far behind, the next eight times are tried.
- One *check* early in the run, but after the warm-up, at a quarter of the rate and at four times, for as many steps as the budget has. Where one
  of them is clearly better, the base value moves half the way to it, and the check is repeated while the budget lasts. Else it stays, and the
  run is bit for bit the one that it would have been.
- Before it, and only where the scan's lower arm was clearly better: a trial *anew*. Arms go from the run's first weights, at an eighth of the rate
  and at a 64th. If one of them comes further in its few steps than the run has in all of its own, the run goes on as that arm. In the scan it
  would be too early to say that: some losses rise at first, at any rate that is good later.

A rate that was raised is watched to the end of the run, and copies of the run are kept meanwhile: where its loss doubles, the run goes back to one, and
to the rate of before. Where examples come again, and will often, it goes back to that rate alone.

With a judge the run itself is judged all along. Where it overfits, it goes back to the weights that were best, at a quarter of the rate.

Later on in the run there is no check: there the rate that anneals soonest looks best, a right one's half as well as a wrong one's.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from statistics import mean

from ...controller import Controller
from ...evidence import Evidence, Run
from ...plan import Decision, Learned, Moment, Plan, Restore, SnapshotOf
from ...schema import COUNT, FLAG, Kind, ListOf, Number, Or, Row
from ...validate import whole, within
from .costs import AGAIN, FEWEST, FORWARD, LONGEST, Costs
from .judge import FIRST, JudgedRun
from .overfitting import ROW, Overfitting
from .peaks import Peaks
from .protocol import HELD_OUT, ORIGIN, REPEATS, TRIALS, Told, snapshots
from .rises import FEW, Rises
from .rounds import LATEST, Rounds
from .scores import Arms, Finding, begun_anew, checked, risen, scanned, taken_back
from .watch import LOOKS, Watch

__all__ = ["TrialRule"]

NEAR_PEAK = 0.9
"""Of its peak: what the schedule has to have reached before a check, which would prefer a higher rate in a warm-up."""
STRAYED = 4.0
"""By which factor an arm's first step, at the run's own rate, may be longer or shorter than the run's. Two draws of dropout or noise differ by less;
a clip that AutoLR has not been told of makes it ten."""


def _of(part: str, name: str) -> property:
    """An attribute that is one of a part: a state has it, by the rule's own name."""
    owner = attrgetter(part)
    return property(attrgetter(f"{part}.{name}"), lambda self, value: setattr(owner(self), name, value))


class TrialRule(Controller):
    """Moves learning rates by what arms of trials score (`hdet.measure.trials.Trials`), all of them together.

    Args:
        budget: the part of the run's compute that trials may take, in (0, 1). What cannot be learned within it is left alone: below some
            2 800 steps at 3 %, everything.
        judged: of how many held-out mini-batches, the same on all replicas, scores are; 0: of the batches that follow a trial.
        falls_to: the part of its peak to which the schedule falls in the end, in [0, 1]; None: what the scheduler says (`Run.falls_to`). When a
            rate is raised depends on it and on the judge (`Rises`).
        place: "device" or "host", where the arms live.
    """

    name = "auto"
    needs_replicas = False
    plans_lengths = True
    judges_held_out = True
    state_keys: Mapping[str, Kind] = {
        "round": Number(0, 2, whole=True), "repeated": Number(0, AGAIN, whole=True), "lowered": FLAG, "risen": FLAG, "spent": Number(0),
        "trial": COUNT, "used": COUNT, "began": COUNT, "ready": COUNT, "first": ListOf(Number()), "said": Or(FLAG, False), "scan": Or(ListOf(Number()), []),
        "peaks": ListOf(Row(Number(), Number())), "edge": Or(Number(0), 0.0), "strayed": Or(Number(0), 0.0), "epochs": Or(Number(0), 0.0),
        "level": Or(ListOf(Number()), []), "window": Or(ListOf(Number()), []), "watched": Or(COUNT, 0), "anew": Or(FLAG, False),
        "judged_run": Or(ROW, Overfitting().row), "returned": Or(COUNT, 0), "last_judged": Or(ListOf(Number()), []),
    }  # fmt: skip

    rounds, round, repeated = (_of("course", name) for name in ("rounds", "round", "repeated"))
    lowered, anew, scan = (_of("course", name) for name in ("lowered", "anew", "scan"))
    peaks, said, edge = (_of("found", name) for name in ("peaks", "said", "edge"))
    level, window, watched = (_of("watch", name) for name in ("level", "window", "watched"))
    judged_run, last_judged = (_of("judge.overfitting", name) for name in ("row", "last"))
    returned = _of("judge", "returned")

    def __init__(
        self,
        budget: float = 0.03,
        judged: int = 0,
        freeze_after: float | None = None,
        falls_to: float | None = None,
        place: str = "device",
    ) -> None:
        super().__init__(freeze_after)
        self.budget, self.place = within(budget, "budget", "(0, 1)", "it is a part of the run's compute"), place
        self.judged = judged and whole(judged, "judged", 2, why="the error of a difference comes from their scatter")
        self._given = None if falls_to is None else within(falls_to, "falls_to", "[0, 1]", "it is a part of the schedule's peak")
        self.falls_to: float | None = None
        """The part of its peak to which the schedule falls, when the run is known; None: of one of the rates that is not known."""
        self.risen = False
        """Has the schedule come near its peak?"""
        self.spent = 0.0
        """Steps' worth of compute that trials have taken; `cost` has what judging the run itself took, too."""
        self.trial = 0
        """How many have begun."""
        self.used, self.began = 0, 0
        """Steps of the trial that goes on (0: there is none), and the step of the run at which it began."""
        self.ready = 0
        """The step from which on the rate is the one that was decided: it rises in a straight line, and a check in between would be of the old one."""
        self.strayed = 0.0
        """How many times as far as the run an arm at its rate has gone in a step, where that is too far, or not far enough."""
        self.epochs = 0.0
        """`Rises.epochs`."""
        self.course, self.found, self.watch, self.judge = Rounds(), Peaks(), Watch(), JudgedRun()
        self.first: list[float] = []
        """The loss before the first step, as far as that is known: the judge's; or in training, without a scan the mean of the first steps."""
        self._epochs = 0.0
        self._costs: Costs | None = None
        """Of this run, when its length is known."""
        self._pace = 1.0
        """Optimizer steps for each step of the schedule."""
        self._done = 0.0
        """The part of the run that is."""
        self._doubted = False
        """Was a lower rate better in the scan? Then the run's beginning is kept."""
        self._resumed = False
        """Have weights been loaded, or taken back, in the middle of a trial?"""
        self._lost = False
        """The same, since this process began."""

    def start(self, run: Run) -> None:
        """Raises ValueError where the run's length is not known, the controller has a warm-up, or no knob is a learning rate."""
        super().start(run)
        if run.total_steps is None:
            raise ValueError(
                "AutoLR finds a rate for a run of known length: pass total_steps=... to the Ensemble (T_max is not read: it may be a period), or a scheduler that has total_steps"
            )
        if run.clock.warmup_steps:
            raise ValueError(f"AutoLR begins at the first step: warmup_steps must be 0, got {run.clock.warmup_steps}")
        self._rates = [k for k, knob in enumerate(run.knobs) if knob.rate]
        if not self._rates:
            raise ValueError("AutoLR moves learning rates, and there is no such knob: leave knobs out, or add a LearningRate")
        self._costs = Costs(self.budget, run.total_steps, self.judged)
        self.rounds = self._costs.rounds()
        falls = [self._given] if self._given is not None else [run.falls_to[k] if run.falls_to else None for k in self._rates]
        known = [part for part in falls if part is not None]
        self.falls_to = max(known) if len(known) == len(falls) else None
        self._epochs = self.epochs = run.epochs
        self._interval, self._fixed = run.sync_interval, run.local and run.replicas > 1

    def report(self) -> str:
        """What it is going to do, in a sentence; or what it has found."""
        if self._costs is None:
            return "trials, when the length of the run is known"
        lost = "the trial that was under way when weights were loaded or taken back is lost, and paid for; " if self._lost else ""
        judge = self.judge.sentence(self.costs, self._pace, self.frozen, self._fixed) if self.judged else ""
        return f"{lost}{self._of_the_rate()}{judge}"

    def _of_the_rate(self) -> str:
        if not self.rounds and not self.peaks:
            return self.costs.too_short(stays=not self._judges_run)
        if self.strayed:
            return (
                f"no trials any more: with the same batch and rate, an arm went {self.strayed:.2g} times as far as the run in a step. Arms do not do what "
                "the loop does: tell AutoLR what is between backward and step (before_step=, such as clipping), and give ensemble.step the loop's own "
                "losses (closure=)"
            )
        if self.peaks:
            trials = f"after trials that cost as much as {self.spent:.0f} steps" if self.spent else "without a trial"
            return f"{self.found.sentence(self.finished)}, {trials}{self._rises.found()}{'' if self.finished else '; more are to come'}"
        if self.frozen:
            return "no trial was made before freeze_after, the rate stays"
        if self.finished:
            return (
                f"no trial was made, the rate stays: one needs a schedule near its peak in the first {LATEST:.0%} of the run, and {FEWEST} steps in "
                f"{LONGEST:.0%} of what is left then"
            )
        return f"{self.course.to_come(self._total)}, of at most {self.budget:.0%} of the run's compute{self._rises.forecast()}"

    def restart(self, now: Moment) -> None:
        """A trial that was under way is lost, and what it took is spent. The next one begins with the next cycle, which comes at once. A trial of which
        no step was done begins anew."""
        done = now.step + now.done - self.began
        self._resumed = self.used > 0 and done > 0
        self._lost = self._lost or self._resumed
        if not self._resumed:
            self.used = 0
        self._spend(done)
        self._doubted = self.course.anew = False  # snapshots are gone
        self.watch.kept, self.judge.overfitting.kept = [], False

    @property
    def _total(self) -> int:
        """Steps of the run, in those of the schedule."""
        return self.costs.total

    @property
    def costs(self) -> Costs:
        """Of the trials of this run."""
        assert self._costs is not None, "start comes first"
        return self._costs

    @property
    def cost(self) -> float:
        """Steps' worth of compute that all of it has taken."""
        return self.spent + (self.judge.cost(self._costs) if self._costs else 0.0)

    def _spend(self, done: int | None = None) -> None:
        """For the trial that goes on, or as many of its steps."""
        if self.used and not self.course.over:
            arms = len(self.course.octaves())
            whole = self.costs.trial(arms, self.used, self.course.from_first)
            self.spent += whole if done is None else min(whole, arms * done)
        self.used = 0

    # -- plan ----------------------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return self.finished and not self._watches and not self._judges_run

    @property
    def finished(self) -> bool:
        """Is no trial to come? A raised rate may still be taken back."""
        return self.frozen or self.course.over

    @property
    def _watches(self) -> bool:
        return self.finished and not self.frozen and self.found.raised

    @property
    def _judges_run(self) -> bool:
        """Is the run itself judged?"""
        return not self.frozen and not self._fixed and self.costs.every(self._pace) > 0

    def plan(self, now: Moment) -> Plan:
        plan = self._planned(now)
        if not self._judges_run:
            begins = self.judged and self.rounds and not now.step and TRIALS not in plan.measure  # what is learned counts from there
            return replace(plan, measure={**plan.measure, HELD_OUT: self.judged}) if begins else plan
        return self.judge.into(plan, now, self.costs, self._pace, self._interval, self.place)

    def _planned(self, now: Moment) -> Plan:
        done = now.step + now.done
        self._pace = done / now.schedule_step if done and now.schedule_step else 1.0  # some loops step the schedule several times
        self._done = now.schedule_step / self._total
        if self.used and not self.finished and now.step < self.began + self.used + self.costs.scored(self.used):
            return self._trial(now)
        self._spend()  # it should have ended
        if self._resumed:
            self._resumed = False
            return Plan(steps=None if self._fixed else 1, spread=False)
        while not self.finished:
            due, latest = self.course.due(self._total)
            if now.schedule_step < due:
                return self._wait(due - now.schedule_step if now.step else FIRST)
            if now.schedule_step < latest and not self.course.scans:
                if not self.risen:
                    return self._wait(max(1, min(math.ceil(self._interval / self._pace), latest - 1 - now.schedule_step)))
                if now.schedule_step < self.ready:
                    return self._wait(self.ready - now.schedule_step)
            left = int((self._total - now.schedule_step) * self._pace)
            self.course.anew = self._doubted
            spent = self.cost + self.costs.judging(self.judge.overfitting.at, self._pace)
            steps = self.costs.steps(self.course.scans, self.anew, len(self.course.octaves()), spent, left, self._pace)
            if now.schedule_step < latest and steps >= FEWEST:
                self.trial, self.used, self.began = self.trial + 1, steps, now.step
                self._doubted = False
                return self._trial(now)
            self.course.next()
        if self._watches:
            return self._watching()
        return Plan(spread=False, measure=self._repeats() if self._judges_run else {})

    def _watching(self) -> Plan:
        measure = self._repeats()
        if self._fixed:
            return Plan(spread=False, measure=measure)
        steps = min(self._interval, math.ceil(LOOKS * self._total * self._pace)) if measure else None
        return self.watch.plan(steps, measure, self.place)

    def _wait(self, steps: int) -> Plan:
        """``steps``: of the schedule."""
        kept = {ORIGIN: SnapshotOf(self.place)} if self._doubted else {}
        length = None if self._fixed else min(self._interval, math.ceil(steps * self._pace))
        return Plan(steps=length, spread=False, measure=self._repeats(), snapshots=kept)

    def _repeats(self) -> dict[str, None]:
        """Between trials, and after them: whether examples of the first steps come again."""
        return {REPEATS: None} if self._done * FEW < 1 else {}

    def _trial(self, now: Moment) -> Plan:
        """The cycle ends with it, unless its length is not ours to choose."""
        scores, scan = self.costs.scored(self.used), self.course.scans
        length = None if self._fixed else self.began + self.used + scores - now.step
        settings = {"trial": self.trial, **self.course.settings(self._rises.end), "steps": self.used, "scores": scores}
        # What breaks in a scan is taken back by it.
        keep = snapshots(len(settings["multiples"]), ORIGIN if settings["origins"] else "", self.place)
        return Plan(steps=length, spread=False, measure={TRIALS: settings}, snapshots=keep, judged=not scan or self._fixed)

    # -- learn ---------------------------------------------------------------------------------------------------------------

    def decide(self, evidence: Evidence) -> Learned:
        self._look(evidence)
        seen = [loss for loss in evidence.losses if loss is not None]
        self._come_again(part for row in evidence.measured.get(REPEATS, ()) if row is not None for part in row)
        rows = [row for row in evidence.measured.get(TRIALS, ()) if row is not None]
        if not self.used or not rows:
            held_out = self._held_out(evidence)
            self._begins(held_out if self.judged else seen)
            overfitted = self._overfitted(evidence, seen, held_out)
            if overfitted is not None:
                return overfitted
            return self._watched(evidence, seen) if self._watches else self._nothing(evidence)
        steps, octaves, from_first = self.used, self.course.octaves(), self.course.from_first
        self._spend()
        told = [Told.read(row, len(octaves), steps) for row in rows]
        begun_with = mean(one.began for one in told)
        self._begins([begun_with])
        self.strayed = next((one.far for one in told if not 1 / STRAYED < one.far < STRAYED), 0.0)
        self._come_again(one.part for one in told)
        if self.strayed:
            warnings.warn(f"AutoLR: {self.report()}", stacklevel=2)
        judges = told[:1] if self.judged else told
        scores = {octave: [loss for one in judges for loss in one.scores[number]] for number, octave in enumerate(octaves)}
        trained = {octave: [loss for one in told for loss in one.trained[number]] for number, octave in enumerate(octaves)}
        arms = Arms(scores, steps, begun_with if from_first else self.first[0], {} if self.judged else trained)
        correction, peak = self._in_force(evidence)
        found = self._found(arms, peak, correction, broke=any(one.broken for one in told))
        self.course.go_on(found)
        if self.strayed:
            self.course.end()
        self._doubted, self.course.anew = found.doubted and not self._fixed, False
        if found.snapshot is not None and self._fixed:
            found = replace(found, snapshot=None, note=f"{found.note} (in its rate alone: replicas have gradients of their own)")
        return self._carried_out(found, evidence, math.ceil(steps / self._pace) if found.factor > 1 else 0)

    def _begins(self, losses: Sequence[float]) -> None:
        """Those before the first step, as far as they are known."""
        self.first = self.first or ([mean(losses)] if losses else [])
        if self.first and self.judged:
            self.judge.overfitting.begins(self.first[0])

    def _found(self, arms: Arms, peak: float, correction: float, broke: bool) -> Finding:
        """``peak``: the one in force, ``correction`` times the schedule's. ``broke``: are the run's weights not finite?"""
        raised, below = correction > 1, min(arms.scores)
        if self.repeated and not math.isclose(peak, self.peaks[-1][1], rel_tol=1e-6):
            return Finding(1.0, "the rate is not where the last trial has put it, so another one says nothing: kept")
        why = ""
        if self.strayed:
            why = "arms do not do what the loop does"
        elif self._rises.overfit:
            why = self._rises.why()
        elif not self.course.scans and arms.flat:
            why = f"in {arms.steps} steps no rate is any better or worse, so there is hardly anything left to learn"
        elif not self.course.scans and self._rises.stays_high and arms.gain(below) > 0:
            why = f"in {arms.steps} steps 2^{below:g} times the rate is better, and the schedule stays high"
        elif self.course.rising and broke:
            why = f"the run breaks in {arms.steps} steps"
        if why and raised:
            found = taken_back(peak, correction, why)
            return replace(found, snapshot=ORIGIN) if broke and self.course.rising else found
        if self.strayed:
            return Finding(1.0, "")
        return self._followed(arms, peak, raised, broke)

    def _followed(self, arms: Arms, peak: float, raised: bool, broke: bool) -> Finding:
        if self.course.rising:
            found = risen(arms, self._rises, raised, *self.scan)
        elif self.course.scans:
            found = scanned(arms, self._rises, broke)
        else:
            return begun_anew(arms) if self.anew else checked(arms, self._rises, peak)
        self.scan = [arms.learned(), max(*self.scan[1:], *map(arms.learned, arms.scores))]
        return found

    def _carried_out(self, found: Finding, evidence: Evidence, ramp: int = 0) -> Learned:
        """``ramp``: steps of the schedule, in which a rate rises."""
        correction, peak = self._in_force(evidence)
        self.found.add(peak / correction, peak, found)
        self.watch.watched, self.ready = evidence.step, evidence.step + ramp if ramp else 0
        end = None if found.snapshot is None else Restore(found.snapshot)
        return Learned(self._of_rates(Decision(factor=found.factor, note=found.note, ramp=ramp), evidence), end)

    def _of_rates(self, decision: Decision, evidence: Evidence) -> list[Decision]:
        """For all of them; nothing for other knobs."""
        return [decision if k in self._rates else Decision() for k in range(len(evidence.knobs))]

    def _in_force(self, evidence: Evidence) -> tuple[float, float]:
        """(the correction, the peak with it)"""
        first = self._rates[0]
        return evidence.corrections[first], evidence.peak[first] * evidence.corrections[first]

    def _watched(self, evidence: Evidence, seen: Sequence[float]) -> Learned:
        """After the trials, a cycle under a raised rate."""
        correction, peak = self._in_force(evidence)
        if self._rises.overfit and correction > 1:
            return self._carried_out(taken_back(peak, correction, self._rises.why()), evidence)
        rose = self.watch.rose(seen, evidence.step, self._interval / self._pace)
        if rose is None or not correction > 1:
            return self._nothing(evidence)
        found = taken_back(peak, correction, f"the loss rose from {rose[0]:.4g} to {rose[1]:.4g}")
        if self.watch.kept:  # the older one: in the window before it may have begun to rise
            found = replace(found, note=f"{found.note}, and to the weights of before", snapshot=self.watch.kept[0])
        return self._carried_out(found, evidence)

    @staticmethod
    def _held_out(evidence: Evidence) -> list[float]:
        """The judge's losses of the run itself, by mini-batch; empty: it was not judged."""
        rows = [row for row in evidence.measured.get(HELD_OUT, ()) if row]
        return [mean(of_batch) for of_batch in zip(*rows, strict=True)]

    def _overfitted(self, evidence: Evidence, seen: Sequence[float], losses: Sequence[float]) -> Learned | None:
        """What follows from the judge's ``losses`` of the run itself, if anything does."""
        if not self._judges_run:
            self.spent += FORWARD * len(losses)
            return None
        found = self.judge.found(losses, seen, evidence.step, self._rises.again, self._in_force(evidence)[1])
        if found is None:
            return None
        if found.snapshot is None:
            warnings.warn(f"AutoLR: {found.note}", stacklevel=2)
            return Learned(self._of_rates(Decision(note=found.note), evidence))
        self.watch.forget()
        return self._carried_out(found, evidence)

    def hold(self, evidence: Evidence) -> Learned:
        self._look(evidence)
        return self._nothing(evidence)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        super().load_state_dict(state)
        self.epochs = max(self.epochs, self._epochs)

    def _look(self, evidence: Evidence) -> None:
        """At the schedule."""
        self._done = evidence.step / self._total
        first, self.found.in_force = self._rates[0], self._in_force(evidence)[1]
        self.risen = self.risen or (evidence.highest or evidence.scheduled)[first] >= NEAR_PEAK * evidence.peak[first]

    def _come_again(self, parts: Iterable[float]) -> None:
        """By replica, each of which has data of its own: `Told.part`."""
        self.epochs = max(self.epochs, self._total * self._pace * sum(parts))

    @property
    def _rises(self) -> Rises:
        again = self.epochs > self._epochs or self._done * self.epochs >= 1  # it was found out, or is told
        return Rises(self.judged > 0, self.falls_to, self.epochs, again)
