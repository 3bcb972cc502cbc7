"""Which peak learning rates a short trial allows for a run, and where a rate outside of them goes.

A trial trains copies of a model, its *arms*, from the same weights for a few steps: each at a
multiple of the run's rate, rising for `RISE` steps and then falling to zero. Then it computes the
losses of the batches that follow, which no arm has seen. The rule has two parts.

1. **Losses.** An arm *ties* if its mean loss is within `TIE` standard errors of the best one's.
   Between the last arm that ties and the first that does not, the rate at which the loss crosses
   that threshold is interpolated. The best rate of a run falls with its length, so the interval
   reaches further down:

       low  = (lowest rate that ties) * (steps of the trial / steps of the run) ** EXPONENT
       high = (highest rate that ties)

   An end is open where the outermost arm ties. If no arm has learned anything, both are.
2. **Displacement**: how far the weights have moved, median over matrices of
   |change| / |first weights|. Rates that move less than `TOO_LITTLE` or more than `TOO_MUCH` are
   outside, too. The lower bound does not hold for weights that are trained already.

A rate inside of the interval is left alone. One below goes to the rate that moves the weights by
`LITTLE`, one above to the rate that moves them by `MUCH`; or to the nearest end of the interval,
if that lies outside. docs/evidence/autolr.md has the measurements behind the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import mean, stdev
from typing import Any

__all__ = [
    "BROKEN",
    "MULTIPLES",
    "RISE",
    "SCORES",
    "STEPS",
    "Arm",
    "RateInterval",
    "Trial",
    "arm_factor",
]

STEPS, RISE, SCORES = 28, 5, 28
"""Of a trial: steps of an arm, those in which its rate rises, and batches that score it."""
MULTIPLES = (1 / 8, 1.0, 8.0, 64.0, 512.0)
"""Of the run's rate, at which arms train."""

TIE = 3.0
"""Standard errors of the best arm's mean loss, within which another arm ties with it."""
EXPONENT = 0.3
"""The best rate of a run falls with its length to minus this power (0.32 in arXiv 2409.19913)."""
TOO_LITTLE, TOO_MUCH = 0.01, 2.0
"""Displacements in a trial. Good rates of whole runs move the weights by 0.06 to 1.2 (10 to 90 % of
workloads)."""
BROKEN = 1 / 64
"""What a rate is multiplied by if every arm broke; another trial follows."""
LITTLE, MUCH = 0.05, 0.27
"""Where a rate goes that lies below the interval, or above it, as displacements."""


@dataclass(frozen=True)
class Arm:
    """A copy of the model that has trained at another rate for a short while."""

    rate: float
    """Its peak."""
    losses: tuple[float, ...] = ()
    """Mean loss of each scoring batch. Empty if it broke, was stopped, or was not scored."""
    displacement: float | None = None
    """Median over matrices of |change| / |first weights|. None if it broke or was stopped."""

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

    rate: float
    """The run's own peak."""
    arms: tuple[Arm, ...]
    """By ascending rate. One arm without losses: the run's own first steps."""
    first_losses: tuple[float, ...] = ()
    """Of the first weights, on the same batches."""
    steps: int = STEPS
    pretrained: bool = False
    """Are the weights trained already (`displacement.are_pretrained`)?"""
    uncertainty: float = 1.0
    """Factor by which displacements may be too large."""
    given_up: str = ""
    """Why it says nothing; empty if it does."""
    ceiling: float = 1.0
    """Factor by which the highest rate that ties may be too low: arms on parts of a batch."""

    @property
    def broke(self) -> bool:
        """Has every arm broken?"""
        return (
            len(self.arms) > 1
            and not self.given_up
            and all(not arm.losses and arm.displacement is None for arm in self.arms)
        )

    def interval(self, total_steps: int) -> RateInterval:
        """What it says of a run of so many steps."""
        low, high = self._by_losses(total_steps)
        low_reason, high_reason = "learned less than higher rates", "learned less than lower rates"
        too_little, too_much = self._rate_that_moves(TOO_LITTLE), self._rate_that_moves(TOO_MUCH)
        if too_little is not None and not self.pretrained and too_little > low:
            low, low_reason = too_little, "hardly moves the weights"
        if too_much is not None and too_much * self.uncertainty < high:
            high, high_reason = too_much * self.uncertainty, "moves the weights too far"
        if low > high:
            low = 0.0  # of two that contradict: too low costs time, too high may cost the run
        suggestion, reason = self.rate, "inside the interval"
        if self.given_up:
            low, high, reason = 0.0, math.inf, f"the trial was given up: {self.given_up}"
        elif self.broke:
            suggestion, reason = self.rate * BROKEN, "every rate that was tried broke"
        elif self.rate < low:
            wanted = None if self.pretrained else self._rate_that_moves(LITTLE)
            suggestion, reason = max(low, min(high, wanted or low)), low_reason
        elif self.rate > high:
            wanted = self._rate_that_moves(LITTLE if self.pretrained else MUCH)
            suggestion, reason = max(low, min(high, wanted or high)), high_reason
        return RateInterval(self.rate, low, high, suggestion, reason, total_steps, self)

    @property
    def has_learned(self) -> bool:
        """Is the best arm clearly better than the first weights?"""
        best = min(self.arms, key=lambda arm: arm.loss)
        return bool(best.losses) and best.loss < mean(self.first_losses) - TIE * best.error

    def _by_losses(self, total_steps: int) -> tuple[float, float]:
        if not self.first_losses or not self.has_learned:
            return 0.0, math.inf
        best = min(self.arms, key=lambda arm: arm.loss)
        threshold = best.loss + TIE * best.error
        tied = [number for number, arm in enumerate(self.arms) if arm.loss <= threshold]
        low, high = 0.0, math.inf
        if tied[0] > 0:
            lowest = _crossing(self.arms[tied[0] - 1], self.arms[tied[0]], threshold)
            low = lowest * min(1.0, self.steps / total_steps) ** EXPONENT
        if tied[-1] < len(self.arms) - 1:
            high = _crossing(self.arms[tied[-1] + 1], self.arms[tied[-1]], threshold) * self.ceiling
        return low, high

    def _rate_that_moves(self, distance: float) -> float | None:
        """The weights so far in a trial: interpolated in logarithms, in proportion beyond the
        outermost arms. None: no arm has moved a matrix."""
        known = [(math.log(arm.rate), math.log(arm.displacement)) for arm in self.arms
                 if arm.displacement]  # fmt: skip
        if not known:
            return None
        wanted = math.log(distance)
        for (rate, moved), (next_rate, next_moved) in pairwise(known):
            if moved <= wanted <= next_moved and moved < next_moved:
                part = (wanted - moved) / (next_moved - moved)
                return math.exp(rate + part * (next_rate - rate))
        rate, moved = known[0] if wanted < known[0][1] else known[-1]
        return math.exp(rate + wanted - moved)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Trial:
        """Of what ``dataclasses.asdict`` gave, also by way of JSON."""
        arms = tuple(
            Arm(_number(arm["rate"]), _numbers(arm["losses"]),
                None if arm["displacement"] is None else _number(arm["displacement"]))
            for arm in data["arms"]
        )  # fmt: skip
        return Trial(
            _number(data["rate"]), arms, _numbers(data["first_losses"]),
            steps=int(_number(data["steps"])), pretrained=bool(int(data["pretrained"])),
            uncertainty=_number(data["uncertainty"]), given_up=_text(data["given_up"]),
            ceiling=_number(data["ceiling"]),
        )  # fmt: skip


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{type(value).__name__} in the place of a number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} in the place of a text")
    return value


def _numbers(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(map(_number, values))


def _crossing(outside: Arm, inside: Arm, threshold: float) -> float:
    """The rate between two arms at which the loss crosses the threshold, by logarithms of rates."""
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

    Example::

        interval = hdet.find_rate(model, optimizer, losses_of, batches, total_steps=10_000)
        print(interval)
        interval.plot().figure.savefig("rates.png")
    """

    rate: float
    """The peak that the optimizer was given."""
    low: float
    """The lowest rate; 0 if no lower rate was ruled out."""
    high: float
    """The highest rate; infinity if no higher rate was ruled out."""
    suggestion: float
    """`rate` where it lies inside, else where it should go."""
    reason: str
    """Why it moves, or stays."""
    total_steps: int
    """Steps of the run that it is for."""
    trial: Trial = field(repr=False)
    """What was measured."""

    @cached_property
    def curve(self) -> dict[str, list[float | None]]:
        """``rates``, ``losses``, ``errors`` and ``displacements`` of the arms. None: an arm that
        broke or was stopped."""
        arms = self.trial.arms
        return {
            "rates": [arm.rate for arm in arms],
            "losses": [arm.loss if arm.losses else None for arm in arms],
            "errors": [arm.error if arm.losses else None for arm in arms],
            "displacements": [arm.displacement for arm in arms],
        }

    @property
    def moves(self) -> bool:
        return self.suggestion != self.rate

    def __str__(self) -> str:
        low = f"{self.low:.2g}" if self.low else "no lower end"
        high = f"{self.high:.2g}" if math.isfinite(self.high) else "no upper end"
        to = f"use {self.suggestion:.2g}" if self.moves else "keep it"
        return f"good rates: {low} to {high}; yours: {self.rate:.2g} ({self.reason}): {to}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a log. An open end is None."""
        data = asdict(self)
        return {**data, "high": data["high"] if math.isfinite(self.high) else None}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> RateInterval:
        """Of what `to_dict` gave, also by way of JSON."""
        return RateInterval(
            _number(data["rate"]), _number(data["low"]),
            math.inf if data["high"] is None else _number(data["high"]),
            _number(data["suggestion"]), _text(data["reason"]), int(_number(data["total_steps"])),
            Trial.from_dict(data["trial"]),
        )  # fmt: skip

    def plot(self, axes: Any = None) -> Any:
        """Losses over rates with the interval, your rate and the suggestion, by matplotlib.

        Args:
            axes: where to draw; None: a new figure.

        Returns:
            The axes.
        """
        if axes is None:
            from matplotlib import pyplot

            axes = pyplot.figure(figsize=(6, 3.5), layout="constrained").subplots()
        arms = [arm for arm in self.trial.arms if arm.losses]
        rates = [arm.rate for arm in arms]
        axes.errorbar(rates, [arm.loss for arm in arms], [TIE * arm.error for arm in arms],
                      marker="o", capsize=3, label="loss after the trial")  # fmt: skip
        if self.trial.first_losses:
            axes.axhline(mean(self.trial.first_losses), ls=":", c="grey", label="before training")
        outer = _outer(self.trial.arms)
        axes.axvspan(max(self.low, outer[0]), min(self.high, outer[1]), alpha=0.15, color="green",
                     label=f"good rates for {self.total_steps} steps")  # fmt: skip
        axes.axvline(self.rate, color="grey", label=f"yours: {self.rate:.2g}")
        if self.moves:
            axes.axvline(self.suggestion, color="tab:red", label=f"now: {self.suggestion:.2g}")
        axes.set(xscale="log", xlabel="peak learning rate", ylabel="loss")
        axes.legend(fontsize="small")
        return axes


def _outer(arms: Sequence[Arm]) -> tuple[float, float]:
    """Where a plot ends."""
    rates = [arm.rate for arm in arms]
    return min(rates) / 4, max(rates) * 4
