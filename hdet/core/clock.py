"""When a cycle ends and when the controller may act. Units are optimizer steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .validate import warn, whole, within

__all__ = ["Clock", "QuadraticPeriod"]


@dataclass(frozen=True)
class QuadraticPeriod:
    """A period T that grows as the learning rate falls, for `Sync.every` with local gradients: the
    quadratic synchronization rule (QSR, Gu et al. 2023, arXiv 2310.14423)::

        T = max(least, floor((alpha / rate) ** 2))

    It is decided where a cycle begins, from the highest base rate of the optimizer's groups,
    explored or not, corrections included. Where the rate rises in a cycle, T falls with it, within
    ``least`` steps. Until the schedule has reached its peak (a warm-up) T is that of the peak, as
    in the paper. The run's last cycle ends with the run.

    Args:
        least: H_base of the paper, 2 to 8 there.
        alpha: above 0, in the unit of the rate. T begins to grow where the rate falls below
            alpha / sqrt(least + 1).

    Raises:
        ValueError: a number that cannot be used; of `Ensemble`, a run of unknown length. Where no
            schedule is known, T is ``least``, which is warned of.

    Example::

        every = hdet.QuadraticPeriod(least=4, alpha=0.002)
        sync = hdet.Sync(every, gradients="local", moments="keep")
    """

    least: int
    alpha: float

    def __post_init__(self) -> None:
        whole(self.least, "least", of="steps")
        within(self.alpha, "alpha", "(0, inf)", "it is compared with the learning rate")

    def steps(self, rate: float) -> int:
        """T at this rate."""
        ratio = self.alpha / rate if rate > 0 else math.inf
        return max(self.least, int(min(ratio, _LONGEST) ** 2))


_LONGEST = 2.0**26
"""Of a ratio: its square is a whole number of steps that no run has."""


@dataclass(frozen=True)
class Clock:
    """The interval T between averages, the warm-up S_warm of the controller, and the length S of
    the run (None: open-ended)."""

    sync_interval: int
    """Of a ``period`` the shortest one."""
    warmup_steps: int = 0
    total_steps: int | None = None
    period: QuadraticPeriod | None = None
    begin: int = 0
    """Before this step replicas share gradients and train alike."""

    def __post_init__(self) -> None:
        whole(self.sync_interval, "sync_interval", of="steps")
        whole(self.warmup_steps, "warmup_steps", 0, of="steps")
        if self.total_steps is not None:
            whole(self.total_steps, "total_steps", of="steps")

    def warn_of_more_steps(self) -> None:
        warn(
            f"this is the step after the last one of a run with total_steps={self.total_steps}: "
            "give the Ensemble and the schedule the length that the loop has, in optimizer steps"
        )

    def interval(self, first: int, rate: float | None) -> int:
        """T of a cycle that begins after ``first`` steps, at this rate (None: it is not known)."""
        steps = self.sync_interval
        if self.period is not None and rate is not None:
            steps = self.period.steps(rate)
        return steps if first >= self.begin else min(steps, self.begin - first)

    def controls(self, first: int) -> bool:
        """May the controller use a cycle that begins after ``first`` steps? Only if it lies wholly
        after the warm-up."""
        return first >= max(self.warmup_steps, self.begin)

    def decisions_left(self, step: int, interval: int) -> int | None:
        """K of Eq. 7: decisions from the cycle that ended at ``step`` to the end of the run, this
        one included, if all cycles are as long."""
        if self.total_steps is None:
            return None
        return max(1, (self.total_steps - step) // interval + 1)
