"""What a trial costs, whether a run is long enough for it, and both in words."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .rule import MULTIPLES, SCORES, STEPS

__all__ = ["FORWARD", "MOST", "SHORTEST", "Budget"]

PART = 0.03
"""Of a run's compute: what a trial may cost by default, in runs that are long enough."""
SHORTEST = 1000
"""Steps of a run from which on a trial is made by default, whatever part of it that costs."""
FORWARD = 1 / 3
"""Cost of a forward pass alone, in steps."""
MOST = len(MULTIPLES) * STEPS + FORWARD * SCORES * (len(MULTIPLES) + 1)
"""The most that a trial costs, in steps of the run: no arm stops early."""


@dataclass(frozen=True)
class Budget:
    """Of one run.

    Attributes:
        part: of the run's compute, in [0, 1); None: `PART`, or one trial from `SHORTEST` steps on.
        total_steps: of the run; None: not known.
    """

    part: float | None
    total_steps: int | None

    @property
    def allows_trial(self) -> bool:
        if self.total_steps is None or self.part == 0:
            return False
        is_long = self.part is None and self.total_steps >= SHORTEST
        return is_long or (PART if self.part is None else self.part) * self.total_steps >= MOST

    @property
    def is_too_small(self) -> bool:
        """Is the run too short for the trial that was not forbidden?"""
        return self.part != 0 and self.total_steps is not None and not self.allows_trial

    def percent(self, steps: float) -> str:
        """Of the run, in words; empty where its length is not known."""
        total = self.total_steps
        return "" if total is None else f" ({100 * steps / total:.1f} % of the run)"

    def plan(self) -> str:
        """What is going to happen, in words."""
        if self.allows_trial:
            tried = ", ".join(f"{multiple:g}" for multiple in MULTIPLES)
            return (
                f"a trial in the first {STEPS + SCORES} steps, at {tried} times your rate; it "
                f"costs at most {MOST:.0f} steps{self.percent(MOST)}"
            )
        looks = f"only how far the first {STEPS} steps move the weights is looked at"
        if self.total_steps is None or self.part == 0:
            return looks
        if self.total_steps <= MOST:
            return (
                f"{self.total_steps} steps are too few for a trial, so {looks}. Use hdet.find_rate"
            )
        part = math.ceil(100 * MOST / self.total_steps) / 100
        return (
            f"{self.total_steps} steps are too few for a trial within the budget, so {looks}. "
            f"For a trial pass budget={part:g}, or use hdet.find_rate"
        )
