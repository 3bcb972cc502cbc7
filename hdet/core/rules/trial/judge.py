"""A judge and the run itself, between trials and after them: when it is judged, and what follows where it overfits. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from ...plan import Moment, Plan, SnapshotOf
from .costs import FORWARD, Costs
from .overfitting import LOWERED_TO, Overfitting
from .protocol import HELD_OUT, TRIALS
from .scores import Finding

__all__ = ["FIRST", "JudgedRun"]

FIRST = 4
"""Steps of the first cycle, where there is no scan: their mean loss is near that before the first step."""


class JudgedRun:
    """Of one run."""

    def __init__(self) -> None:
        self.overfitting = Overfitting()
        """What the judge has said of it."""
        self.returned = 0
        """How often it has overfitted."""

    def cost(self, costs: Costs) -> float:
        """Steps' worth of compute that judging has taken."""
        return FORWARD * self.overfitting.count * costs.judges

    def into(self, plan: Plan, now: Moment, costs: Costs, pace: float, interval: int, place: str) -> Plan:
        """The same cycle, at whose end the run is judged, if it is time: then it may be shorter. ``pace``: optimizer steps for each of the schedule's;
        ``interval``: those of a usual cycle."""
        told = self.overfitting
        kept = {**plan.snapshots, told.snapshot: SnapshotOf(place)} if told.kept else plan.snapshots
        if TRIALS in plan.measure:
            return replace(plan, snapshots=kept)
        every, length = costs.every(pace), plan.steps or interval
        if told.best or not now.step:
            due = math.ceil((told.at + every) * pace) - now.step if now.step else FIRST
        else:  # after a scan
            due = min(length, math.ceil(every * pace))
        length = min(length, max(due, 1))
        measure = {**plan.measure, HELD_OUT: costs.judges} if length >= due else plan.measure
        return replace(plan, steps=length, measure=measure, snapshots=kept)

    def found(self, losses: Sequence[float], trained: Sequence[float], step: int, again: bool, peak: float) -> Finding | None:
        """After a cycle. ``losses``: the judge's, by mini-batch, empty if it was not asked; ``trained``: of the replicas, in training; ``again``: have examples
        come again? ``peak``: the rate's that is in force. None: nothing follows."""
        told = self.overfitting
        told.trained += [mean(trained)] if trained else []
        before, snapshot = told.best, told.snapshot if told.kept else None
        if not losses or not told.told(losses, step, again):
            return None
        rose = f"the held-out loss rose from {mean(before):.4g} to {mean(losses):.4g}"
        if snapshot is None:  # a lower rate alone would only keep the run where it is worse
            return Finding(1.0, f"{rose}, and no copy of the better weights has outlived the checkpoint: go back to an earlier one")
        self.returned += 1
        return Finding(LOWERED_TO, f"{rose}: back to the weights of step {told.best_at}, at {LOWERED_TO * peak:.2g}", snapshot)

    def sentence(self, costs: Costs, pace: float, over: bool, local: bool) -> str:
        """For a report. ``over``: is the run judged no more? ``local``: have replicas gradients of their own?"""
        overfitted = f"it overfitted {'once' if self.returned == 1 else f'{self.returned} times'}" if self.returned else ""
        if over:
            return f"; {overfitted}" if overfitted else ""
        if local:
            return "; the run itself is not judged: replicas have gradients of their own"
        if not (every := costs.every(pace)):
            return f"; the run itself is not judged: that takes budget={costs.to_judge():.2g} or more"
        of = f" by {costs.judges} of the {costs.judged} mini-batches" if costs.judges < costs.judged else ""
        told = self.overfitting
        found = (
            f"; its best held-out loss was {mean(told.best):.4g}, at step {told.best_at}"
            if told.best and told.at + every > costs.total
            else ""
        )
        return f"; the run itself is judged every {every} steps{of}, {overfitted or 'and goes back where it overfits'}{found}"
