"""When a cycle ends and when the controller may act. Units are optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass

from .validate import warn, whole

__all__ = ["Clock"]


@dataclass(frozen=True)
class Clock:
    """The interval T between averages, the warm-up S_warm of the controller, and the length S of
    the run (None: open-ended)."""

    sync_interval: int
    warmup_steps: int = 0
    total_steps: int | None = None

    def __post_init__(self) -> None:
        whole(self.sync_interval, "sync_interval", of="steps")
        whole(self.warmup_steps, "warmup_steps", 0, of="steps")
        if self.total_steps is not None:
            whole(self.total_steps, "total_steps", of="steps")

    def warn_of_more_steps(self) -> None:
        warn(
            f"this is the step after the last one of a run with total_steps={self.total_steps}: "
            "give the Ensemble and the schedule the length that the loop has, in optimizer steps",
        )

    def controls(self, step: int) -> bool:
        """May the controller use a cycle that ended at ``step``? Only if the cycle lies wholly
        after the warm-up."""
        return step - self.sync_interval >= self.warmup_steps

    def steps_left(self, step: int, position: int) -> int:
        """To the end of the cycle of which ``position`` steps are done, or of the run."""
        left = self.sync_interval - position
        return left if self.total_steps is None else min(left, max(0, self.total_steps - step))

    def decisions_left(self, step: int) -> int | None:
        """K of Eq. 7: decisions from the cycle that ended at ``step`` to the end of the run, this
        one included."""
        if self.total_steps is None:
            return None
        return max(1, (self.total_steps - step) // self.sync_interval + 1)
