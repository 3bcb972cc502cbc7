"""The watch over a run whose rate trials have raised: its mean loss from window to window, and copies of it to go back to. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from ...plan import Plan, SnapshotOf
from .protocol import BROKEN

__all__ = ["LOOKS", "Watch"]

WATCHED, WORSE = 200, 2.0
"""Steps, at least, of a window over whose cycles losses are averaged, after the trials. Of the loss: between two windows a raised rate is taken back,
where it rises by more than this. It does where the data gets harder, as in a curriculum, which no trial has tried the rate on; or where the rate
breaks after all, thousands of steps later."""
LOOKS = 0.02
"""Of the run: how long cycles are, at most, in which it is looked whether examples come again. What is learned in one such part of a second epoch does
not harm."""


class Watch:
    """Steps are the schedule's."""

    def __init__(self) -> None:
        self.level: list[float] = []
        """The mean loss of the last window; empty: there is none yet."""
        self.window: list[float] = []
        """The mean losses of the cycles of the one that goes on."""
        self.watched = 0
        """The step at which it began."""
        self.kept: list[str] = []
        """Snapshots of the run with which the last window but one began, and the last. They are no part of a state."""

    def forget(self) -> None:
        """What the losses of other weights were."""
        self.level, self.window = [], []

    def plan(self, steps: int | None, measure: dict[str, None], place: str) -> Plan:
        """Of a cycle of so many steps; None: of the usual number."""
        name = f"run {self.watched}"
        if name not in self.kept:
            self.kept = [*self.kept[-1:], name]
        kept = {name: SnapshotOf(place) for name in self.kept}
        # What breaks is taken back by the watch, if losses are told.
        return Plan(steps=steps, spread=False, measure=measure, snapshots=kept, judged=not self.level)

    def rose(self, losses: Sequence[float], step: int, interval: float) -> tuple[float, float] | None:
        """After a cycle with these losses: those of the window before and of the one that ends, if it is that much higher; else None. ``interval``: steps
        of a cycle, which a window has at least."""
        if losses or self.window or self.level:
            self.window.append(mean(losses) if losses else BROKEN)
        broke = bool(self.level) and not losses
        if not self.window or not (broke or step - self.watched >= max(WATCHED, interval)):
            return None
        before, self.level, self.window, self.watched = self.level, [mean(self.window)], [], step
        return (before[0], self.level[0]) if before and self.level[0] > WORSE * before[0] > 0 else None
