"""What a controller is told: the run, before it begins, and each cycle, when it has ended.

Every rank is told the same, to the bit. Losses that are missing or not finite arrive as None and are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .clock import Clock

__all__ = ["Evidence", "Run"]


@dataclass(frozen=True)
class Run:
    """What is known before the first step."""

    clock: Clock
    """Cycles and the length of the run."""
    knobs: Sequence[Any]
    """A `KnobSpec` each: name, spread, scale, and whether it is a learning rate."""
    replicas: int
    floor: Sequence[float]
    """[knob]: the lowest value of the untouched schedule (0 where unknown)."""
    local: bool = False
    """Does each replica step with gradients of its own?"""

    @property
    def total_steps(self) -> int | None:
        """Length S of the run in steps, if known."""
        return self.clock.total_steps

    @property
    def sync_interval(self) -> int:
        """T, in optimizer steps."""
        return self.clock.sync_interval


@dataclass(frozen=True)
class Evidence:
    """One cycle, as seen by every rank alike. Losses in nats (or the user's unit), values in the knob's own unit."""

    cycle: int
    """Cycles closed before this one."""
    step: int
    """Steps of the schedule done when the cycle ended."""
    total_steps: int | None
    """Length S of the run in steps, if known."""
    warmup_steps: int
    """S_warm, of the optimizer's steps."""
    sync_interval: int
    """Of the optimizer's steps, where those are not the schedule's."""
    knobs: Sequence[str]
    """Their names."""
    multipliers: Sequence[Sequence[float]]
    """[knob][replica]: rho of the cycle that ended."""
    losses: Sequence[float | None]
    """[replica]: mean training loss over the cycle; None is left out."""
    scheduled: Sequence[float]
    """[knob]: the untouched schedule's value now."""
    peak: Sequence[float]
    """[knob]: the highest value of the untouched schedule."""
    floor: Sequence[float]
    """[knob]: the lowest value of the untouched schedule (0 where unknown)."""
    values: Sequence[float]
    """[knob]: the base value in force in the step to come, as far as a ramp has come."""
    corrections: Sequence[float]
    """[knob]: the correction decided last, > 0, which a decision's factor multiplies. During a ramp `values` are behind it."""
    decisions_left: int | None = None
    """K of Eq. 7: decisions left in the run, this one included."""
    local: bool = False
    """Has each replica stepped with gradients of its own? Then its weights have noise that the others' have not."""
    measured: Mapping[str, Sequence[Sequence[float] | None]] = field(default_factory=dict)
    """By the names of `Plan.measure`, [replica]: what was measured, None where a replica is left out. A measurement that only answers questions
    is not in it, nor one that has nothing to tell yet."""
    highest: Sequence[float] = ()
    """[knob]: the highest value of the untouched schedule since the controller was told last: a peak may rise and fall within one cycle.
    Empty in records of older versions."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, from which ``Evidence(**data)`` makes it again, to the bit."""
        return asdict(self)
