"""What a trial costs, whether a run is long enough for it, and both in words."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .rule import MULTIPLES, SCORES, STEPS

__all__ = ["FORWARD", "MOST", "SHORTEST", "Budget"]

SHORTEST = 1000
"""Steps of a run from which on a trial is made by default, whatever part of it that costs."""
DEAR = 0.03
"""A trial that would cost more than this part of the run is shared by replicas: each trains arms of
its own, which costs less, and decides a little worse."""
FORWARD = 1 / 3
"""Cost of a forward pass alone, in steps."""
MOST = len(MULTIPLES) * STEPS + FORWARD * SCORES * (len(MULTIPLES) + 1)
"""The most that a trial costs, in steps of the run: no arm stops early."""


@dataclass(frozen=True)
class Budget:
    part: float | None  # of the run's compute, in [0, 1); None: a trial from `SHORTEST` steps on
    total_steps: int | None  # of the run; None: not known

    @property
    def allows_trial(self) -> bool:
        if self.total_steps is None:
            return False
        if self.part is None:
            return self.total_steps >= SHORTEST
        return self.part * self.total_steps >= MOST

    @property
    def is_dear(self) -> bool:
        """Would a trial cost more than `DEAR` of the run?"""
        return self.total_steps is not None and MOST > DEAR * self.total_steps

    @property
    def is_too_small(self) -> bool:
        """Is the run too short for the trial that was not forbidden?"""
        return self.part != 0 and self.total_steps is not None and not self.allows_trial

    def cost(self, steps: float) -> str:
        """So many steps of the run, in words."""
        part = f" ({100 * steps / self.total_steps:.1f} % of the run)" if self.total_steps else ""
        return f"{steps:.0f} steps{part}"

    def plan(self) -> str:
        """What is going to happen, in words."""
        if self.allows_trial:
            tried = ", ".join(f"{multiple:g}" for multiple in MULTIPLES)
            return (
                f"a trial in the first {STEPS + SCORES} steps, at {tried} times your rate; it "
                f"costs at most {self.cost(MOST)}"
            )
        looks = f"only how far the first {STEPS} steps move the weights is looked at"
        if self.part == 0:
            return looks
        if self.total_steps is None:
            return f"{looks}: a trial needs Ensemble(total_steps=...)"
        few, remedy = self._too_few()
        return f"{few}, so {looks}. {remedy}"

    def why_no_trial(self) -> list[str]:
        """What a run of known length lacked for a trial, in words; nothing for budget 0."""
        if self.allows_trial:
            return ["a trial needs a closure from the first step: ensemble.step(loss, closure=...)"]
        return [". ".join(self._too_few())] if self.is_too_small else []

    def _too_few(self) -> tuple[str, str]:
        remedy = "hdet.find_rate"
        if self.total_steps is not None and self.total_steps > MOST:
            remedy = f"budget={math.ceil(100 * MOST / self.total_steps) / 100:g}, or {remedy}"
        return f"{self.total_steps} steps are too few for a trial", f"Use {remedy}"
