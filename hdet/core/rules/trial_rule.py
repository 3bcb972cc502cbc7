"""What annealed trials say of a learning rate, and what to do about it: the rule inside `hdet.AutoLR`.

A run is told nothing by its own losses about a rate that it does not have; and a look a few steps ahead prefers a rate that is too low, because
most of what a high rate costs is noise, which goes when the rate falls. So copies of the run train beside it for ``steps`` steps at several
multiples of its rate, each falling to zero, and are scored on batches that none of them has seen. How much that says depends on the trial's length,
and on where in the run it begins (docs/evidence/autolr.md, "What a trial can tell"). Hence the rounds:

- One *scan* at the first step, with multiples far apart. It finds only what is grossly wrong: a rate that is too high even for a few steps
  (then the run goes on as the lower arm), or so low that 128 times as much is better even though short runs prefer much higher rates.
- One *check* early in the run, but after the warm-up, at a quarter of the rate and at four times, for as many steps as the budget has. Where one
  of them is clearly better, the base value moves half the way to it, and the check is repeated while the budget lasts. Else it stays, and the
  run is bit for bit the one that it would have been.

Later on in the run there is no check: there the rate that anneals soonest looks best, a right one's half as well as a wrong one's.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from ..controller import Controller
from ..evidence import Evidence, Run
from ..plan import Decision, Learned, Moment, Plan, Restore, SnapshotOf
from ..schema import COUNT, FLAG, Kind, ListOf, Number, Or, Row
from ..validate import within
from .rises import Rises

__all__ = ["TRIALS", "Round", "TrialRule"]

TRIALS = "trials"
"""The measurement's name."""
ORIGIN = "origin"
"""The snapshot with which the arms of a scan begin."""
BROKEN = 1e30
"""The loss of an arm that has none that is finite."""
FEWEST = 16
"""Steps of a trial, or it says nothing."""
LONGEST = 0.1
"""Of the run that is left, a trial's length at most."""
CLEAR = 3.0
"""Standard errors by which an arm has to be better than the rate in force."""
SCORED = 2
"""A score for so many steps of a trial,"""
SCORES = (12, 96)
"""at least and at most. Scores are forward passes alone, and a difference that is lost in their noise was trained for in vain."""


Finding = tuple[float, str, str | None]
"""By which factor the rates move, a note, and the snapshot as which the run goes on (None: as itself)."""


@dataclass(frozen=True)
class Round:
    """Arms that train at the same time."""

    at: float
    """The part of the run after which it begins."""
    octaves: tuple[float, ...]
    """From the rate in force to each arm's, ascending."""

    @property
    def scan(self) -> bool:
        """Is it at the first step, from the run's own beginning?"""
        return self.at == 0


SCAN = Round(0.0, (-3.0, 0.0, 7.0))
CHECK = Round(0.06, (-2.0, 0.0, 2.0))
ALONE = Round(0.1, (-2.0, 0.0, 2.0))
"""The check of a run that is too short for a scan."""
ENOUGH = 24
"""Steps of a trial that a round is planned for."""
SCANNED = 28
"""Steps of a scan at most: what is grossly wrong shows in them, and the rest of the budget tells more in the check."""
LONG = 30_000
"""Steps of a run from which on a scan is longer, in proportion. What 28 steps like is too far from what is best for a run of 100 000: one was raised by
eight there from a good rate. (In three times as many steps again a rate that is far too low no longer looks worse.)"""
CHECKED = 224
"""Steps of a check for which it takes all that is left of the budget. In fewer, pretrained weights look best at a rate that is far too low."""
RAISES, LOWERS = 0.0025, 0.004
"""Of what the run has learned so far: a gain that is smaller moves nothing. Short trials lean towards low rates, so less is asked of a higher one."""
RISEN, LATEST = 0.9, 0.35
"""Of its peak: what the schedule has to have reached before a check, which would prefer a higher rate in a warm-up. Of the run: how long that may take."""
PART = 0.5
"""Of the way to the arm that is better: if it is a little better, what is best in so few steps lies half-way, and shorter runs prefer higher rates."""
RAISED = 3.0
"""Octaves by which a scan raises a rate that is far too low: the best rate of a few steps is up to five above that of the run."""
LITTLE = 0.3
"""The part of what the higher arm of a scan has learned, above which the rate in force is not far too low: a language model learns the letters'
frequencies in its first steps, at any high rate alike, and that says nothing about the run."""
STRAYED = 4.0
"""By which factor an arm's first step, at the run's own rate, may be longer or shorter than the run's. Two draws of dropout or noise differ by less;
a clip that AutoLR has not been told of makes it ten."""
NEARER = 1.0
"""Octaves by which the higher arm of a scan lies nearer when it is repeated, at a rate that was raised."""
FIRST = 4
"""Steps of the first cycle, where there is no scan: their mean loss is near that before the first step."""
AGAIN = 2
"""How often a scan, or a check that has moved the rate, is repeated."""
FLAT = 0.0002
"""Of what has been learned: where neither arm of a check is better or worse by as much, all there is to learn so far has been learned, at any of these rates.
Then a rise is taken back: it can bring nothing more, and be too high for what comes, as in a curriculum."""
WATCHED, WORSE = 200, 2.0
"""Steps, at least, of a window over whose cycles losses are averaged, after the trials. Of the loss: between two windows a raised rate is taken back,
where it rises by more than this. It does where the data gets harder, as in a curriculum: no trial has tried the rate there."""
WITHIN = 2.0
"""Octaves around the rate in force, within which the best one is said to lie. The scores would say more, and be wrong: what is best in some
60 steps is up to three octaves below what is best for the run."""


class TrialRule(Controller):
    """Moves learning rates by what arms of trials score (`hdet.measure.trials.Trials`), all of them together.

    Args:
        budget: the part of the run's compute that trials may take, in (0, 1). What cannot be learned within it is left alone: below some
            2 800 steps at 3 %, everything.
        keep: the snapshots that a plan with so many arms, and an origin, needs.
        judged: of how many held-out mini-batches, the same on all replicas, scores are; 0: of the batches that follow a trial.
        falls_to: the part of its peak to which the schedule falls in the end, in [0, 1]; None: what the scheduler says (`Run.falls_to`). When a
            rate is raised depends on it and on the judge (`Rises`).
    """

    name = "auto"
    needs_replicas = False
    plans_lengths = True
    judges_held_out = True
    state_keys: Mapping[str, Kind] = {
        "round": Number(0, 2, whole=True), "repeated": Number(0, AGAIN, whole=True), "lowered": FLAG, "risen": FLAG, "spent": Number(0),
        "trial": COUNT, "used": COUNT, "began": COUNT, "ready": COUNT, "first": ListOf(Number()), "found": ListOf(Row(Number(), Number())),
        "peaks": ListOf(Row(Number(), Number())), "edge": Or(Number(0), 0.0), "strayed": Or(Number(0), 0.0), "epochs": Or(Number(0), 0.0),
        "level": Or(ListOf(Number()), []), "window": Or(ListOf(Number()), []), "watched": Or(COUNT, 0),
    }  # fmt: skip

    def __init__(
        self,
        budget: float = 0.03,
        keep: Callable[[int, str], Mapping[str, SnapshotOf]] = lambda arms, origin: {},
        judged: int = 0,
        freeze_after: float | None = None,
        falls_to: float | None = None,
    ) -> None:
        super().__init__(freeze_after)
        self.budget, self.judged, self._keep = within(budget, "budget", "(0, 1)", "it is a part of the run's compute"), judged, keep
        self._given = None if falls_to is None else within(falls_to, "falls_to", "[0, 1]", "it is a part of the schedule's peak")
        self.falls_to: float | None = None
        """The part of its peak to which the schedule falls, when the run is known; None: of one of the rates that is not known."""
        self.rounds: Sequence[Round] = ()
        """Those that the budget affords."""
        self.round = 0
        """Of `rounds`: the next one, or the one that goes on."""
        self.repeated = 0
        """How often it has been repeated."""
        self.lowered = False
        """Has this scan lowered the rate?"""
        self.risen = False
        """Has the schedule come near its peak?"""
        self.spent = 0.0
        """Steps' worth of compute that trials have taken."""
        self.trial = 0
        """How many have begun."""
        self.used, self.began = 0, 0
        """Steps of the trial that goes on (0: there is none), and the step of the run at which it began."""
        self.ready = 0
        """The step from which on the rate is the one that was decided: it rises in a straight line, and a check in between would be of the old one."""
        self.found: list[list[float]] = []
        """By check: between which rates the best peak is said to lie."""
        self.edge = 0.0
        """The rate of the arm that was the best in the last check, if it was the highest or the lowest one; else 0."""
        self.strayed = 0.0
        """How many times as far as the run an arm at its rate has gone in a step, where that is too far, or not far enough."""
        self.epochs = 0.0
        """`Rises.epochs`."""
        self.level: list[float] = []
        """The mean loss of the last window after the trials; empty: there is none yet."""
        self.window: list[float] = []
        """The mean losses of the cycles of the one that goes on."""
        self.watched = 0
        """The step at which it began."""
        self.peaks: list[list[float]] = []
        """By trial: the schedule's peak, and the one that is in force after it."""
        self.first: list[float] = []
        """The training loss before the first step, as far as that is known: without a scan, the mean of the first steps."""
        self._epochs = 0.0
        self._total = 0
        """Steps of the run; 0 until that is known."""
        self._pace = 1.0
        """Optimizer steps for each step of the schedule."""
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
        affords = int((self.budget * run.total_steps - self._judged_first) / (3 * self._cost(ENOUGH)))
        self.rounds = () if affords < 1 else (ALONE,) if affords < 2 else (SCAN, CHECK)
        falls = [self._given] if self._given is not None else [run.falls_to[k] if run.falls_to else None for k in self._rates]
        known = [part for part in falls if part is not None]
        self.falls_to = max(known) if len(known) == len(falls) else None
        self.spent = self._judged_first if self.rounds else 0.0
        self._epochs = self.epochs = run.epochs
        self._total, self._interval, self._fixed = run.total_steps, run.sync_interval, run.local and run.replicas > 1

    def report(self) -> str:
        """What it is going to do, in a sentence; or what it has found."""
        lost = "the trial that was under way when weights were loaded or taken back is lost, and paid for; " if self._lost else ""
        return f"{lost}{self._report()}"

    def _report(self) -> str:
        if not self._total:
            return "trials, when the length of the run is known"
        if not self.rounds:
            return self._too_short()
        if self.strayed:
            return (
                f"no trials any more: with the same batch and rate, an arm went {self.strayed:.2g} times as far as the run in a step. Arms do not do what "
                "the loop does: tell AutoLR what is between backward and step (before_step=, such as clipping), and give ensemble.step the loop's own "
                "losses (closure=)"
            )
        if self.peaks:
            yours, now = self.peaks[-1]
            between = f"{self._between()}; " if self.found else ""
            again = any(moved > peak for peak, moved in self.peaks)
            what = f"now {now:.2g}" if now != yours else "in force again" if again else "kept"
            return f"{between}yours {yours:.2g}, {what}, after trials that cost as much as {self.spent:.0f} steps{self._rises.found()}"
        if self.finished:
            return (
                f"no trial was made, the rate stays: one needs a schedule near its peak in the first {LATEST:.0%} of the run, and {FEWEST} steps in "
                f"{LONGEST:.0%} of what is left then"
            )
        at = [math.ceil(one.at * self._total) for one in self.rounds]
        return f"trials from steps {', '.join(map(str, at))}, of at most {self.budget:.0%} of the run's compute{self._rises.forecast()}"

    def _too_short(self) -> str:
        """Why there are no rounds, and what would help."""
        least = 3 * self._cost(ENOUGH) + self._judged_first
        steps, budget = math.ceil(least / self.budget - 1e-9), math.ceil(100 * least / self._total) / 100
        says = f"too short a run for trials, the rate stays: {self._total} steps are below {steps}. Train longer"
        # A trial is a part of the run that is left, too.
        return f"{says}, or pass budget={budget:g}" if budget < 1 and LONGEST * (1 - ALONE.at) * self._total >= FEWEST else says

    def restart(self, now: Moment) -> None:
        """A trial that was under way is lost, and what it took is spent. The next one begins with the next cycle, which comes at once. A trial of which
        no step was done begins anew."""
        done = now.step + now.done - self.began
        self._resumed = self.used > 0 and done > 0
        self._lost = self._lost or self._resumed
        if not self._resumed:
            self.used = 0
        self._spend(done)

    def _cost(self, steps: int) -> float:
        """Of an arm, in steps of the run: a score is a forward pass, a third of a step."""
        return steps + (self.judged or _scores(steps)) / 3

    @property
    def _judged_first(self) -> float:
        """What it costs to judge the weights with which the first trial begins."""
        return self.judged / 3

    def _scored(self, steps: int) -> int:
        """Steps of the run that follow on a trial's, and whose batches score its arms."""
        return 0 if self.judged else _scores(steps)

    def _spend(self, done: int | None = None) -> None:
        """For the trial that goes on, or as many of its steps."""
        if self.used and self.round < len(self.rounds):
            whole = self._cost(self.used)
            self.spent += len(self._octaves()) * (whole if done is None else min(whole, done))
        self.used = 0

    # -- plan ----------------------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return self.finished and not self._raised

    @property
    def finished(self) -> bool:
        """Is no trial to come? A raised rate may still be taken back."""
        return self.frozen or self.round >= len(self.rounds)

    @property
    def _raised(self) -> bool:
        return not self.frozen and bool(self.peaks) and self.peaks[-1][1] > self.peaks[-1][0]

    def plan(self, now: Moment) -> Plan:
        self._pace = now.step / now.schedule_step if now.step and now.schedule_step else 1.0  # some loops step the schedule several times
        if self.used and not self.finished and now.step < self.began + self.used + self._scored(self.used):
            return self._trial(now)
        self._spend()  # it should have ended
        if self._resumed:
            self._resumed = False
            return Plan(steps=None if self._fixed else 1, spread=False)
        while not self.finished:
            this = self.rounds[self.round]
            due, latest = (math.ceil(part * self._total) for part in (this.at, CHECK.at if this.scan else LATEST))
            if now.schedule_step < due:
                return self._wait(due - now.schedule_step if now.step else FIRST)
            if now.schedule_step < latest and not this.scan:
                if not self.risen:
                    return self._wait(self._interval)
                if now.schedule_step < self.ready:
                    return self._wait(self.ready - now.schedule_step)
            steps = self._affordable(now) if now.schedule_step < latest else 0
            if steps >= FEWEST:
                self.trial, self.used, self.began = self.trial + 1, steps, now.step
                return self._trial(now)
            self._next()
        return Plan(spread=False)

    def _wait(self, steps: int) -> Plan:
        """``steps``: of the schedule."""
        return Plan(steps=None if self._fixed else min(self._interval, math.ceil(steps * self._pace)), spread=False)

    def _affordable(self, now: Moment) -> int:
        """Steps of a trial. A scan leaves half of what is left to the rounds to come; a check leaves something only where it has enough."""
        left, arms = self.budget * self._total * self._pace - self.spent, len(self._octaves())
        if self.rounds[self.round].scan:
            worth = min(left / 2, arms * self._cost(int(SCANNED * max(1.0, self._total / LONG))))
        else:
            worth = max(left / (1 + AGAIN), min(left, arms * self._cost(CHECKED)))
        worth /= arms
        steps = int(worth - self.judged / 3) if self.judged else _steps(worth)
        left_of_run = int((self._total - now.schedule_step) * self._pace)
        return min(steps, int(LONGEST * left_of_run), left_of_run - self._scored(steps) - 1)

    def _octaves(self) -> tuple[float, ...]:
        """Of the arms: the lower one, the rate in force, the higher one (not in a scan that has lowered the rate)."""
        this = self.rounds[self.round]
        below, same, above = this.octaves
        if not this.scan:
            return this.octaves
        return (below, same) if self.lowered else (below, same, above - NEARER * self.repeated)

    def _trial(self, now: Moment) -> Plan:
        """The cycle ends with it, unless its length is not ours to choose."""
        multiples, scores = [2.0**octave for octave in self._octaves()], self._scored(self.used)
        length = None if self._fixed else self.began + self.used + scores - now.step
        scan = self.rounds[self.round].scan
        of, origin = ("peak", ORIGIN) if scan else ("base", "")
        # The scan's higher arm is to show how much there is to learn, not the noise that its rate would leave.
        ends = [0.0 if scan and multiple > 1 else self._rises.end for multiple in multiples]
        settings = {
            "trial": self.trial, "multiples": multiples, "of": of, "origin": origin, "steps": self.used, "scores": scores, "ends": ends,
        }  # fmt: skip
        # What breaks in a scan is taken back by it.
        keep = self._keep(len(multiples), origin)
        return Plan(steps=length, spread=False, measure={TRIALS: settings}, snapshots=keep, judged=not scan or self._fixed)

    # -- learn ---------------------------------------------------------------------------------------------------------------

    def decide(self, evidence: Evidence) -> Learned:
        self._look(evidence)
        seen = [loss for loss in evidence.losses if loss is not None]
        told = [row for row in evidence.measured.get(TRIALS, ()) if row is not None]
        if not self.used or not told:
            self.first = self.first or ([mean(seen)] if seen else [])
            return self._watch(evidence, seen) if self.finished and self._raised else self._nothing(evidence)
        steps, octaves = self.used, self._octaves()
        self._spend()
        losses = 1 + len(octaves) * (self.judged or _scores(steps))
        # Older records end with the losses: arms went as far as the run, no example has come again, and what there was at first is the cycle's mean.
        older = (1.0, 0.0, mean(seen) if seen else 0.0)
        fars, parts, began = zip(*([*row[losses:], *older[len(row) - losses :]] for row in told), strict=True)
        self.first = self.first or [mean(began)]
        self.strayed = next((far for far in fars if not 1 / STRAYED < far < STRAYED), 0.0)
        self.epochs = max(self.epochs, self._total * sum(parts))  # each replica has a part of the data of its own
        arms = _by_arm([row[1:losses] for row in (told[:1] if self.judged else told)], len(octaves))
        correction, peak = self._in_force(evidence)
        if self.strayed:
            warnings.warn(f"AutoLR: {self.report()}", stacklevel=2)
        factor, note, adopted = self._found(
            dict(zip(octaves, arms, strict=True)), steps, peak, correction, broke=any(row[0] for row in told)
        )
        if adopted is not None and self._fixed:
            adopted, note = None, f"{note} (in its rate alone: replicas have gradients of their own)"
        # The schedule counts steps of its own.
        ramp = math.ceil(steps / self._pace) if factor > 1 else 0
        self.peaks.append([peak / correction, peak * factor])
        self.watched, self.ready = evidence.step, evidence.step + ramp if ramp else 0
        return Learned(
            self._of_rates(Decision(factor=factor, note=note, ramp=ramp), evidence), None if adopted is None else Restore(adopted)
        )

    def _found(self, arms: Mapping[float, Sequence[float]], steps: int, peak: float, correction: float, broke: bool) -> Finding:
        """``arms``: scores, by octave. ``peak``: the one in force, ``correction`` times the schedule's. ``broke``: are the run's weights not finite?"""
        scan, raised, below = self.rounds[self.round].scan, correction > 1, min(arms)
        if self.strayed:
            self.round = len(self.rounds)
            return self._back(peak, correction, "arms do not do what the loop does") if raised else (1.0, "", None)
        if self.repeated and not math.isclose(peak, self.peaks[-1][1], rel_tol=1e-6):
            self._next()
            return 1.0, "the rate is not where the last trial has put it, so another one says nothing: kept", None
        why = ""
        if raised and self._rises.overfit:
            why = f"examples come again, {self.epochs:.0f} times in this run"
        elif raised and not scan and self._flat(arms):
            why = f"in {steps} steps no rate is any better or worse, so there is hardly anything left to learn"
        elif raised and not scan and self._rises.stays_high and mean(arms[below]) < mean(arms[0.0]):
            why = f"in {steps} steps 2^{below:g} times the rate is better, and the schedule stays high"
        if why:
            self._next()
            return self._back(peak, correction, why)
        return self._scanned(arms, steps, broke) if scan else self._checked(arms, steps, peak)

    def _in_force(self, evidence: Evidence) -> tuple[float, float]:
        """(the correction, the peak with it)"""
        first = self._rates[0]
        return evidence.corrections[first], evidence.peak[first] * evidence.corrections[first]

    def _back(self, peak: float, correction: float, why: str) -> Finding:
        """A rise is taken back."""
        self.found.clear()  # it was of the raised rate
        self.edge = 0.0
        return 1 / correction, f"{why}: back to the rate of before, {peak / correction:.2g}", None

    def _of_rates(self, decision: Decision, evidence: Evidence) -> list[Decision]:
        return [decision if k in self._rates else Decision() for k in range(len(evidence.knobs))]

    def _watch(self, evidence: Evidence, seen: Sequence[float]) -> Learned:
        """After the trials, a cycle under a raised rate."""
        if seen or self.window or self.level:
            self.window.append(mean(seen) if seen else BROKEN)
        if not self.window or evidence.step - self.watched < WATCHED:
            return self._nothing(evidence)
        before, self.level, self.window, self.watched = self.level, [mean(self.window)], [], evidence.step
        correction, peak = self._in_force(evidence)
        if not before or not self.level[0] > WORSE * before[0] > 0 or not correction > 1:
            return self._nothing(evidence)
        self.peaks.append([peak / correction, peak / correction])
        factor, note, _ = self._back(peak, correction, f"the loss rose from {before[0]:.4g} to {self.level[0]:.4g}")
        return Learned(self._of_rates(Decision(factor=factor, note=note), evidence))

    def hold(self, evidence: Evidence) -> Learned:
        self._look(evidence)
        return self._nothing(evidence)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        super().load_state_dict(state)
        self.epochs = max(self.epochs, self._epochs)

    def _look(self, evidence: Evidence) -> None:
        """At the schedule."""
        first = self._rates[0]
        self.risen = self.risen or (evidence.highest or evidence.scheduled)[first] >= RISEN * evidence.peak[first]

    @property
    def _rises(self) -> Rises:
        return Rises(self.judged > 0, self.falls_to, self.epochs)

    def _scanned(self, arms: Mapping[float, Sequence[float]], steps: int, broke: bool) -> Finding:
        below, above = min(arms), max(arms)
        lower, same = arms[below], arms[0.0]
        if max(lower) >= BROKEN:
            self._repeat(lowered=True)
            return 4.0**below, f"even 2^{below:g} times the rate breaks in {steps} steps: back to the start", ORIGIN
        if broke or _far_better(lower, same):
            self._repeat(lowered=True)
            return 2.0**below, f"2^{below:g} times the rate is better in {steps} steps from the start: the run goes on as that arm", "arm 0"
        if above > 0 and _better(arms[above], same) and self._rises.allowed(scan=True, far_behind=self._far_behind(same, arms[above])):
            self._repeat(lowered=False)
            return 2.0**RAISED, f"2^{above:g} times the rate is better in {steps} steps from the start: raised by 2^{RAISED:g}", None
        self._next()
        tried = ("neither " if above > 0 else "not even ") + " nor ".join(f"2^{octave:g}" for octave in arms if octave)
        return 1.0, f"in {steps} steps from the start {tried} times the rate is better: kept", None

    def _checked(self, arms: Mapping[float, Sequence[float]], steps: int, peak: float) -> Finding:
        """Of the ``peak`` in force."""
        octave = min(arms, key=lambda octave: (mean(arms[octave]), abs(octave)))
        best, same, other = arms[octave], arms[0.0], arms[-octave]
        gain, worth = mean(same) - mean(best), (RAISES if octave > 0 else LOWERS) * abs(self._learned(same))
        factor, but = 1.0, ""
        if not _better(best, same):
            but = "not clearly"
        elif gain < worth:
            but = "too little"
        elif mean(same) - mean(other) >= gain / 2:  # the run is about to break
            but = "as the other side was"
        elif octave > 0 and not self._rises.allowed(scan=False, far_behind=self._far_behind(same, best)):
            but = "which is not safe here"
        if but:
            self._next()
        else:
            factor = 2.0 ** (PART * octave)
            self._repeat(lowered=False)
        now = peak * factor
        self.found.append([now / 2.0**WITHIN, now * 2.0**WITHIN])
        self.edge = peak * 2.0**octave if octave else 0.0
        was = f"{peak * 2.0**octave:.2g} was the best{f' ({but})' if but else ''}" if octave else "no other was better"
        what = f"now {now:.2g}" if factor != 1 else "kept"
        return factor, f"{self._between()}: in {steps} steps {was}, {peak:.2g} was in force, {what}", None

    def _between(self) -> str:
        """Where the last check says that the best peak lies. Beyond an arm nothing was tried, so nothing is said."""
        low, high = self.found[-1]
        if not self.edge:
            return f"best peak {low:.2g} to {high:.2g}"
        if self.edge**2 > low * high:
            return f"best peak {low:.2g} to {self.edge:.2g} or more (higher was not tried)"
        return f"best peak {self.edge:.2g} to {high:.2g} or less (lower was not tried)"

    def _far_behind(self, same: Sequence[float], higher: Sequence[float]) -> bool:
        """Has the rate in force hardly learned anything, beside a higher one?"""
        return self._learned(same) < LITTLE * self._learned(higher)

    def _flat(self, arms: Mapping[float, Sequence[float]]) -> bool:
        same = arms[0.0]
        return all(abs(mean(arm) - mean(same)) < FLAT * self._learned(same) for arm in arms.values())

    def _learned(self, arm: Sequence[float]) -> float:
        """How far below the run's first losses."""
        return sum(first - mean(arm) for first in self.first)

    def _next(self) -> None:
        self.round, self.repeated, self.lowered = self.round + 1, 0, False

    def _repeat(self, lowered: bool) -> None:
        self.repeated, self.lowered = self.repeated + 1, lowered
        if self.repeated > AGAIN:
            self._next()


def _steps(worth: float) -> int:
    """Of a trial that, with its scores, costs each arm what so many steps of the run do."""
    low, high = SCORES
    within = worth / (1 + 1 / (3 * SCORED))
    return int((worth - low / 3 if within < low * SCORED else worth - high / 3 if within > high * SCORED else within) + 1e-9)


def _scores(steps: int) -> int:
    return min(max(steps // SCORED, SCORES[0]), SCORES[1])


def _by_arm(rows: Sequence[Sequence[float]], arms: int) -> list[list[float]]:
    """[replica][arm * scores] -> [arm][replica * scores]"""
    scores = len(rows[0]) // arms
    return [[x for row in rows for x in row[a * scores : (a + 1) * scores]] for a in range(arms)]


def _better(a: Sequence[float], b: Sequence[float]) -> bool:
    """Is ``a`` clearly lower than ``b``, batch by batch?"""
    gains = [y - x for x, y in zip(a, b, strict=True)]
    if len(gains) < 2 or mean(gains) <= 0:
        return False
    return mean(gains) > CLEAR * stdev(gains) / math.sqrt(len(gains))


def _far_better(a: Sequence[float], b: Sequence[float]) -> bool:
    """Is ``a`` so much lower that one would see it without the same batches? Pretrained weights lose a little under any high rate, at first; long runs
    make up for it, and are the better for it."""
    return _better(a, b) and mean(b) - mean(a) > CLEAR * stdev(a) / math.sqrt(len(a))
