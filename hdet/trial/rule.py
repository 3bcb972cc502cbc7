"""Which peak learning rates a short trial allows for a run, and where a rate outside of them goes.

A trial trains copies of a model, its *arms*, from the same weights for a few steps: each at a
multiple of the run's rate, rising for `RISE` steps and then falling to zero. Then it computes the
losses of the batches that follow, which no arm has seen. The rule has three parts.

1. **Losses.** An arm *ties* if its mean loss is within `TIE` standard errors of the best one's.
   Between the last arm that ties and the first that does not, the rate at which the loss crosses
   that threshold is interpolated. The best rate of a run falls with its length, so the interval
   does, too:

       low  = (lowest rate that ties) * (steps of the trial / steps of the run) ** LOW_EXPONENT
       high = (highest rate that ties) * (steps of the trial / steps of the run) ** HIGH_EXPONENT

   Good rates rise with the batch: where arms had one of n parts of it, both ends rise by sqrt(n)
   (arXiv 2205.10287).
   An end is open where the outermost arm ties. If no arm has learned anything, both are. Losses
   that are bitwise equal at all rates are no measurement: then nothing moves.
2. **Displacement**: how far the weights have moved, median over matrices of
   |change| / |first weights|. Rates that move less than `TOO_LITTLE` or more than `TOO_MUCH` are
   outside, too. The lower bound does not hold for weights that are trained already. A distance
   that no longer grows with the rate says nothing of how low a rate may be.
3. **The rate.** Inside of the interval it stays. One below goes to the rate that moves the weights
   by `LITTLE`, one above to the rate that moves them by `MUCH`; or to the nearest end of the
   interval, if that lies outside.

docs/evidence/autolr.md has the measurements behind the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import geometric_mean, mean, stdev
from typing import Any

__all__ = ["BROKEN", "FARTHEST", "MULTIPLES", "RISE", "SCORES", "STEPS", "TIE", "Arm",
           "RateInterval", "Trial", "arm_factor"]  # fmt: skip

# The shape of a trial.
STEPS, RISE, SCORES = 28, 5, 28  # of an arm, those in which its rate rises, batches that score it
MULTIPLES = (1 / 8, 1.0, 8.0, 64.0, 512.0)  # of the run's rate
# The rule: seven numbers.
TIE = 3.0  # standard errors of the best arm's mean loss
LOW_EXPONENT, HIGH_EXPONENT = 0.3, 0.15  # the best rate's is 0.32 in arXiv 2409.19913
TOO_LITTLE, TOO_MUCH = 0.01, 2.0  # good rates of 80 % of the workloads move weights by .06 to 1.2
LITTLE, MUCH = 0.05, 0.27  # where a rate goes from below, and from above
MIDDLE = 0.1  # `RateInterval.best` is the mean of the best arm's and the rate that moves them so
# Rates that are far too high to measure anything.
GROWS = 0.1  # a displacement that grows slower than rate ** GROWS says nothing of other rates
BROKEN = 1 / 64  # what a rate is multiplied by if every arm broke; another trial follows
FARTHEST = 64.0  # the displacement in the place of all larger ones of a run's own steps

# No measurement.
RATE_UNUSED = "steps are the same at rates far apart: the optimizer does not use its rate"
NO_EFFECT = "no rate changed the losses: do they depend on the optimizer's weights?"
NOTHING = "nothing that was measured depends on the rate"


@dataclass(frozen=True)
class Arm:
    """A copy of the model that has trained at another rate for a short while."""

    rate: float  # its peak
    losses: tuple[float, ...] = ()  # by scoring batch; none if it broke, was stopped or not scored
    displacement: float | None = None  # None if it broke, was stopped, or has no matrix

    @property
    def loss(self) -> float:
        """Mean over the scoring batches; infinity without any."""
        return mean(self.losses) if self.losses else math.inf

    @property
    def error(self) -> float:
        """Standard error of `loss`."""
        count = len(self.losses)
        return stdev(self.losses) / math.sqrt(count) if count > 1 else 0.0


@dataclass(frozen=True)
class Trial:
    """What was measured. Plain numbers, the same on every rank."""

    rate: float  # the run's own peak
    arms: tuple[Arm, ...]  # by ascending rate; one without losses: the run's own first steps
    first_losses: tuple[float, ...] = ()  # of the first weights, on the same batches
    steps: int = STEPS  # of an arm
    pretrained: bool = False  # are the first weights trained already?
    uncertainty: float = 1.0  # factor by which displacements may be too large
    given_up: str = ""  # why it says nothing; empty if it does
    smaller_batch: float = 1.0  # factor by which the batches of arms are smaller than the run's
    error: str = ""  # the first one that an arm has raised

    @property
    def broke(self) -> bool:
        """Has every arm broken?"""
        measured = any(arm.losses or arm.displacement is not None for arm in self.arms)
        return len(self.arms) > 1 and not measured and not self.given_up

    @property
    def needs_repeat(self) -> bool:
        """Is the rate so high that a far lower one has to be measured?"""
        return self.broke or (len(self.arms) == 1 and self.arms[0].displacement == FARTHEST)

    @property
    def unmeasured(self) -> str:
        """Why nothing follows; empty if something may."""
        scored = [arm.losses for arm in self.arms if arm.losses]
        is_same = len(scored) > 1 and len(set(scored)) == 1
        return self.given_up or (NO_EFFECT if is_same else "")

    @property
    def has_learned(self) -> bool:
        """Is the best arm clearly better than the first weights?"""
        best = min(self.arms, key=lambda arm: arm.loss)
        return bool(best.losses) and best.loss < mean(self.first_losses) - TIE * best.error

    def interval(self, total_steps: int) -> RateInterval:
        """What it says of a run of so many steps."""
        lowest, highest = self._tied_rates()
        part = min(1.0, self.steps / total_steps)
        low, high = lowest * part**LOW_EXPONENT, highest
        why_low, why_high = "learned less than higher rates", "learned less than lower rates"
        if self.rate <= highest:
            why_high = "too high for a run of this length"
        too_little, too_much = self._rate_that_moves(TOO_LITTLE), self._rate_that_moves(TOO_MUCH)
        if too_little is not None and not self.pretrained and too_little > low:
            low, why_low = too_little, "hardly moves the weights"
        high = max(high * part**HIGH_EXPONENT, min(low, high))
        if too_much is not None and too_much * self.uncertainty < high:
            high, why_high = too_much * self.uncertainty, "moves the weights too far"
        if low > high:
            low = 0.0  # of two that contradict: too low costs time, too high may cost the run
        suggestion, reason = self.rate, "inside the interval"
        if self.unmeasured:
            low, high, reason = 0.0, math.inf, self.unmeasured
        elif self.broke:
            suggestion, reason = self.rate * BROKEN, "every rate that was tried broke"
        elif self.rate < low:
            wanted = None if self.pretrained else self._rate_that_moves(LITTLE)
            suggestion, reason = max(low, min(high, wanted or low)), why_low
        elif self.rate > high:
            wanted = self._rate_that_moves(LITTLE if self.pretrained else MUCH)
            suggestion, reason = max(low, min(high, wanted or high)), why_high
        elif (low, high) == (0.0, math.inf):
            reason = NOTHING
        return RateInterval(self.rate, low, high, suggestion, reason, total_steps, self)

    def _tied_rates(self) -> tuple[float, float]:
        """The lowest and the highest; 0 and infinity where an end is open."""
        low, high, arms = 0.0, math.inf, self.arms
        if not self.first_losses or not self.has_learned:
            return low, high
        best = min(arms, key=lambda arm: arm.loss)
        threshold = best.loss + TIE * best.error
        tied = [number for number, arm in enumerate(arms) if arm.loss <= threshold]
        first, last = tied[0], tied[-1]
        if first > 0:
            low = _rate_between(arms[first - 1], arms[first], threshold)
        if last < len(arms) - 1:
            high = _rate_between(arms[last + 1], arms[last], threshold)
        scale = math.sqrt(self.smaller_batch)
        return low * scale, high * scale

    def _rate_that_moves(self, distance: float) -> float | None:
        """The weights so far in a trial: interpolated in logarithms, in proportion beyond the
        outermost arms. None: no arm has moved them, or far higher rates hardly move them
        farther."""
        known = [(math.log(arm.rate), math.log(arm.displacement))
                 for arm in self.arms if arm.displacement]  # fmt: skip
        if not known:
            return None
        wanted = math.log(distance)
        for (rate, moved), (next_rate, next_moved) in pairwise(known):
            if moved <= wanted <= next_moved and moved < next_moved:
                part = (wanted - moved) / (next_moved - moved)
                return math.exp(rate + part * (next_rate - rate))
        rate, moved = known[0] if wanted < known[0][1] else known[-1]
        if len(known) > 1 and moved < wanted < math.log(TOO_MUCH):
            before, moved_before = known[-2]
            if moved - moved_before < GROWS * (rate - before):
                return None
        return math.exp(rate + wanted - moved)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Trial:
        """Of what ``dataclasses.asdict`` gave, also by way of JSON."""
        arms = tuple(Arm(**{**arm, "losses": tuple(arm["losses"])}) for arm in data["arms"])
        return Trial(**{**data, "arms": arms, "first_losses": tuple(data["first_losses"])})


def _rate_between(outside: Arm, inside: Arm, threshold: float) -> float:
    """At which the loss crosses the threshold, by logarithms of rates."""
    if not math.isfinite(outside.loss):
        return inside.rate
    part = (outside.loss - threshold) / (outside.loss - inside.loss)
    return outside.rate * (inside.rate / outside.rate) ** part


def arm_factor(position: int) -> float:
    """An arm's rate in its step ``position`` (1 to `STEPS`), as a part of its peak."""
    return position / RISE if position <= RISE else (STEPS - position + 1) / (STEPS - RISE + 1)


@dataclass(frozen=True)
class RateInterval:
    """The peak rates that a trial allows for a run of this length.

    Attributes:
        rate: the peak that the optimizer was given.
        low: the lowest rate; 0 if no lower rate was ruled out.
        high: the highest rate; infinity if no higher rate was ruled out.
        suggestion: `rate` where it lies inside, else where it should go.
        reason: why it moves, or stays.
        total_steps: of the run that it is for.
        trial: what was measured.
        groups: how many move together; `rate` is the first one's.

    Example::

        found = hdet.find_rate(
            model, optimizer, losses_of, loader[:56], total_steps=10_000
        )
        if found.moves:
            print(found.suggestion, found.low, found.high, found.reason)
        found.plot().figure.savefig("rates.png")
    """

    rate: float
    low: float
    high: float
    suggestion: float
    reason: str
    total_steps: int
    trial: Trial = field(repr=False)
    groups: int = 1

    def apply(self, optimizer: Any, scheduler: Any = None, rate: float | None = None) -> None:
        """Multiplies the optimizer's rates, and those that a scheduler which was made before keeps,
        so that the peak is ``rate``, of the first group that has one; None: the suggestion. All
        of the schedule is multiplied, with its lowest rates. Call it before the first step, and
        before an Ensemble is made.

        Raises:
            ValueError: a scheduler that keeps its rates in a place of its own, which is found out
                by a simulation: make it afterwards. Nothing is changed then.
        """
        from ..simulation import apply_factor

        factor = (self.suggestion if rate is None else rate) / self.rate
        apply_factor(optimizer, scheduler, factor, self.total_steps)

    @property
    def moves(self) -> bool:
        """Does the rate lie outside?"""
        return self.suggestion != self.rate

    @property
    def best(self) -> float | None:
        """The best guess for those who have no rate, about the same whichever was given: between
        the best arm's rate, scaled to the length of the run, and the one that moves the weights by
        0.1, within the interval.

        The latter alone if no arm has learned anything, the former alone for weights that are
        trained already. None if that leaves neither: without a trial, or if it was given up.
        """
        trial, guesses = self.trial, list[float]()
        arm = min(trial.arms, key=lambda arm: arm.loss)
        if trial.unmeasured or not arm.losses:
            return None
        if trial.has_learned:
            guesses.append(arm.rate * min(1.0, trial.steps / self.total_steps) ** HIGH_EXPONENT)
        if not trial.pretrained and (moving := trial._rate_that_moves(MIDDLE)):
            guesses.append(moving)
        return max(self.low, min(self.high, geometric_mean(guesses))) if guesses else None

    def __str__(self) -> str:
        rate, arms = f"{self.rate:.2g}", [arm for arm in self.trial.arms if arm.losses]
        to = f"{rate} -> {self.suggestion:.2g}" if self.moves else f"{rate} stays"
        if self.moves and self.groups > 1:
            to += f", all {self.groups} groups x {self.suggestion / self.rate:.3g}"
        lines = [
            f"learning rate: {to} ({self.reason})",
            f"good rates for {self.total_steps} steps: {self._ends()}",
        ]
        if arms:
            tried = ", ".join(f"{arm.loss:.4g} at {arm.rate:.2g}" for arm in arms)
            lost = sum(arm.rate > arms[0].rate and not arm.losses for arm in self.trial.arms)
            tried += f"; {lost} higher rates broke or fell far behind" if lost else ""
            lines.append(f"losses after {self.trial.steps} steps: {tried}")
            learned, top = self.trial.has_learned, self.trial.arms[-1]
            if not (learned or self.trial.unmeasured):
                lines.append("no rate has learned anything in the trial: only displacement counts")
            is_outermost = top.loss == min(arm.loss for arm in arms) and not self.trial.unmeasured
            if learned and is_outermost and self.low <= top.rate <= self.high:
                lines.append(f"the best loss is at the highest rate: try {top.rate:.2g} next")
            elif self.best is not None:
                lines.append(f"best guess without a rate of your own: {self.best:.2g}")
        elif len(self.trial.arms) == 1 and not self.trial.given_up:
            lines.append(f"no trial: only how far {self.trial.steps} steps move the weights counts")
        if self.trial.error:
            lines.append(self.trial.error)
        return "\n".join(lines)

    def _ends(self) -> str:
        """In words."""
        if not math.isfinite(self.high):
            return f"{self.low:.2g} and higher" if self.low else "none was ruled out"
        return f"{self.low:.2g} to {self.high:.2g}" if self.low else f"up to {self.high:.2g}"

    def plot(self, axes: Any = None) -> Any:
        """Draws losses over rates with the interval, by matplotlib: into ``axes``, or a new figure.
        Returns the axes."""
        if axes is None:
            from matplotlib import pyplot

            axes = pyplot.figure(figsize=(6, 3.5), layout="constrained").subplots()
        scored = [arm for arm in self.trial.arms if arm.losses]
        x, y = [arm.rate for arm in scored], [arm.loss for arm in scored]
        bars = [TIE * arm.error for arm in scored]
        axes.errorbar(x, y, bars, marker="o", capsize=3, label="loss after the trial")
        if self.trial.first_losses:
            axes.axhline(mean(self.trial.first_losses), ls=":", c="grey", label="before training")
        rates = [arm.rate for arm in self.trial.arms]
        low, high = max(self.low, min(rates) / 4), min(self.high, max(rates) * 4)
        label = f"good rates for {self.total_steps} steps"
        axes.axvspan(low, high, alpha=0.15, color="green", label=label)
        axes.axvline(self.rate, color="grey", label=f"yours: {self.rate:.2g}")
        if self.moves:
            axes.axvline(self.suggestion, color="tab:red", label=f"now: {self.suggestion:.2g}")
        axes.set(xscale="log", xlabel="peak learning rate", ylabel="loss")
        axes.legend(fontsize="small")
        return axes

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a log. An open end is None."""
        return {**asdict(self), "high": self.high if math.isfinite(self.high) else None}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> RateInterval:
        """Of what `to_dict` gave, also by way of JSON."""
        high = math.inf if data["high"] is None else data["high"]
        return RateInterval(**{**data, "high": high, "trial": Trial.from_dict(data["trial"])})
