"""What a trial may take: how many steps a budget has for a scan, and for a check. Costs are in steps of the run; an arm's step is one."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, partial

__all__ = ["AGAIN", "ALONE", "CHECK", "FEWEST", "LONGEST", "SCAN", "Costs"]

SCAN, CHECK, ALONE = 0.0, 0.06, 0.1
"""The parts of the run after which the rounds begin; `ALONE` is the check of a run that is too short for a scan."""
FEWEST = 16
"""Steps of a trial, or it says nothing."""
ENOUGH = 24
"""Steps of a trial that a round is planned for."""
LONGEST = 0.1
"""Of the run that is left, a trial's length at most."""
SCORED = 2
"""A score for so many steps of a trial,"""
SCORES = (12, 96)
"""at least and at most. Scores are forward passes alone, and a difference that is lost in their noise was trained for in vain."""
SCANNED = 28
"""Steps of a scan at most: what is grossly wrong shows in them, and the rest of the budget tells more in the check."""
LONG = 30_000
"""Steps of a run from which on a scan is longer, in proportion. What 28 steps like is too far from what is best for a run of 100 000: one was raised by
eight there from a good rate. (In three times as many steps again a rate that is far too low no longer looks worse.)"""
CHECKED = 224
"""Steps of a check for which it takes all that is left of the budget. In fewer, pretrained weights look best at a rate that is far too low."""
ANEWED = 64
"""Steps of a trial anew for which it takes all that is left of the budget. A longer one leaves half of it to a check: if the run was right to go on, its
rate may still be somewhat too high."""
JUDGED = 0.02
"""Of the run: how often a judge judges the run itself, between trials and after them."""
JUDGING, TIMES = 1 / 3, 5
"""The most of the budget that this may take: it is less often then; by fewer of the judge's mini-batches, if that is less than so many times;"""
BATCHES = 4
"""and not at all, if those are fewer than so many, where the judge has as many: their scatter would say nothing of an error. A check is made only where
so much is left beside it."""
AGAIN = 2
"""How often a scan, or a check that has moved the rate, is repeated."""
ARMS = 3
FORWARD = 1 / 3
"""What a forward pass alone costs, in steps."""
EXACT = 1e-9
"""A budget that suffices to the last digit does."""


@dataclass(frozen=True)
class Costs:
    """Of the trials of one run.

    Args:
        budget: the part of the run's compute that they may take.
        total: steps of the run.
        judged: of how many held-out mini-batches scores are; 0: of the batches that follow a trial.
    """

    budget: float
    total: int
    judged: int = 0

    @cached_property
    def judges(self) -> int:
        """Of how many held-out mini-batches the run itself is judged; 0: it is not."""
        return next((number for number in range(self.judged, self._fewest - 1, -1) if number and self._every(number, 1.0)), 0)

    @property
    def _fewest(self) -> int:
        return min(self.judged, BATCHES)

    @property
    def check(self) -> float:
        """Of the shortest check."""
        return self.trial(ARMS, ENOUGH, from_first=False)

    @property
    def least(self) -> float:
        """Of the budget, for a check, and for judging the run beside it."""
        return self.check + TIMES * FORWARD * self._fewest

    def every(self, pace: float = 1.0) -> int:
        """Steps of the schedule after which the run itself is judged again; 0: it is not. ``pace``: optimizer steps for each of those."""
        return self._every(self.judges, pace) if self.judges else 0

    def _every(self, judges: int, pace: float) -> int:
        budget = self.budget * self.total * pace
        part = min(JUDGING * budget, budget - self.check) if budget >= self.least - EXACT else JUDGING * budget
        most = min(1 / JUDGED, part / (FORWARD * judges))
        return math.ceil(self.total / most) if most >= TIMES - EXACT else 0

    def to_judge(self) -> float:
        """The budget with which the run could be judged."""
        return math.ceil(1000 * TIMES * FORWARD * self._fewest / JUDGING / self.total - EXACT) / 1000

    def judging(self, since: int = 0, pace: float = 1.0) -> float:
        """The run itself, from a step of the schedule on."""
        every = self.every(pace)
        return FORWARD * self.judges * (self.total - since) / every if every else 0.0

    def scored(self, steps: int) -> int:
        """Steps of the run that follow on a trial's, and whose batches score its arms."""
        return 0 if self.judged else min(max(steps // SCORED, SCORES[0]), SCORES[1])

    def trial(self, arms: int, steps: int, from_first: bool) -> float:
        """A score is a forward pass, a third of a step. ``from_first``: from the run's first weights? Those are scored too, and by a judge the weights with which
        any trial begins."""
        scored = arms + (from_first or self.judged > 0)
        return arms * steps + FORWARD * scored * (self.judged or self.scored(steps))

    def rounds(self) -> tuple[float, ...]:
        """Those that the budget affords."""
        budget = self.budget * self.total + EXACT
        if budget < self.least:
            return ()
        both = self.check + self.trial(ARMS, ENOUGH, from_first=True)
        return (ALONE,) if budget - self.judging() < both else (SCAN, CHECK)

    def steps(self, scan: bool, anew: bool, arms: int, spent: float, left: int, pace: float) -> int:
        """Of a trial. A scan leaves half of what is left to the rounds to come; a check leaves something only where it has enough. ``spent``: what has
        been, and what is put aside; ``left``: optimizer steps of the run; ``pace``: optimizer steps for each of the schedule's, which ``total`` counts."""
        affords, cost = self.budget * self.total * pace - spent, partial(self.trial, arms, from_first=scan or anew)
        if scan:
            worth = min(affords / 2, cost(int(SCANNED * max(1.0, self.total / LONG))))
        elif anew:
            worth = max(affords / 2, min(affords, cost(ANEWED)))
        else:
            worth = max(affords / (1 + AGAIN), min(affords, cost(CHECKED)))
        steps = bisect_right(range(max(0, int(worth)) + 1), worth + EXACT, key=cost) - 1
        return min(steps, int(LONGEST * left), left - self.scored(steps) - 1)

    def too_short(self, stays: bool) -> str:
        """Why there are no rounds, and what would help. ``stays``: can nothing else move the rate?"""
        steps, budget = math.ceil(self.least / self.budget - EXACT), math.ceil(100 * self.least / self.total - EXACT) / 100
        says = f"too short a run for trials{', the rate stays' if stays else ''}: {self.total} steps are below {steps}. Train longer"
        # A trial is a part of the run that is left, too.
        return f"{says}, or pass budget={budget:g}" if budget < 1 and LONGEST * (1 - ALONE) * self.total >= FEWEST else says
