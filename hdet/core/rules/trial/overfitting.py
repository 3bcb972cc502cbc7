"""Does a run overfit? What a judge has said of it so far, by losses of held-out mini-batches. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields
from statistics import mean, stdev
from typing import Any

from ...schema import COUNT, ListOf, Number, Row
from .protocol import BROKEN

__all__ = ["LOWERED_TO", "ROW", "Overfitting", "overfits"]

OVERFIT, SURELY = 0.05, 1.0
"""Of the most that a run has learned by its judge: a loss that is so much higher than it was is overfitting, if it is by so many standard errors, too. More
of those would be asked in vain of the few batches that a judge has; it has to be so `IN_A_ROW` in a row instead."""
IN_A_ROW, LOWERED_TO = 2, 0.25
"""Times in a row that a judge has to find the run worse, and no better than the last time, and the training loss lower, where examples have come again: the
noise of a good high rate raises both, and is gone when the rate falls; and a loss that jumps up may come down by itself. What the rate is multiplied by
then."""
LOSSES = ListOf(Number())
ROW = Row(COUNT, COUNT, LOSSES, LOSSES, COUNT, LOSSES, LOSSES, COUNT)
"""The kind of `Overfitting.row`."""


@dataclass
class Overfitting:
    """Steps are the schedule's."""

    count: int = 0
    """How often the run was judged."""
    at: int = 0
    """The step at which it was judged last."""
    top: list[float] = field(default_factory=list)
    """The highest finite loss, from that of the first weights on; empty: there was none."""
    best: list[float] = field(default_factory=list)
    """By mini-batch, of the weights that were best."""
    best_at: int = 0
    """The step at which that was."""
    trained: list[float] = field(default_factory=list)
    """The mean training losses of the cycles since it was judged last,"""
    trained_at_best: list[float] = field(default_factory=list)
    """and before it was best."""
    worse: int = 0
    """How often in a row it was worse than then."""
    last: list[float] = field(default_factory=list)
    """The mean loss of the last judging; empty where it was the best. `row`, which older states have too, is without it."""
    kept: bool = False
    """Is there a snapshot of the best weights? None outlives the process: it is no part of `row`."""

    @property
    def row(self) -> list[Any]:
        """Plain, and all there is but `last` and `kept`. A state is given to it."""
        return list(astuple(self)[:-2])

    @row.setter
    def row(self, row: Sequence[Any]) -> None:
        for one, value in zip(fields(self), row, strict=False):
            setattr(self, one.name, value)

    @property
    def snapshot(self) -> str:
        """The name of that of the best weights."""
        return f"best {self.best_at}"

    def begins(self, first: float) -> None:
        """``first``: the judge's loss of the run's first weights, from which what is learned is counted."""
        self.top = [max([*self.top, first])] if first < BROKEN / 2 else self.top

    def told(self, losses: Sequence[float], step: int, again: bool) -> bool:
        """By mini-batch, of the run's weights at this step: does it overfit? ``again``: have examples come again?"""
        trained, self.trained = self.trained, []
        self.count, self.at = self.count + 1, step
        self.begins(mean(losses) if max(losses) < BROKEN / 2 else BROKEN)
        if not self.best or mean(losses) < mean(self.best):
            self._is_best(losses, step, trained)
            return False
        fell = bool(trained and self.trained_at_best) and mean(trained) < mean(self.trained_at_best)
        comes_down, self.last = bool(self.last) and mean(losses) < self.last[0], [mean(losses)]
        worse = again and fell and bool(self.top) and overfits(losses, self.best, self.top[0])
        self.worse = (1 if comes_down else self.worse + 1) if worse else 0
        if self.worse < IN_A_ROW:
            return False
        self.worse = 0
        if not self.kept:  # there is no way back to better ones
            self._is_best(losses, step, trained)
        return True

    def _is_best(self, losses: Sequence[float], step: int, trained: list[float]) -> None:
        """Of the weights that there are now a snapshot is taken."""
        self.best, self.best_at, self.trained_at_best, self.worse, self.last, self.kept = list(losses), step, trained, 0, [], True


def overfits(now: Sequence[float], best: Sequence[float], top: float) -> bool:
    """Is a run much worse than it was? Losses by mini-batch of its judge; ``top``: the highest mean so far."""
    rises = [loss - before for loss, before in zip(now, best, strict=True)]
    return mean(rises) > max(OVERFIT * (top - mean(best)), SURELY * stdev(rises) / math.sqrt(len(rises)))
