"""What a controller is given: the run, before its first step, and each cycle, when it has ended.

Every rank is given the same, bitwise. Losses that are missing or not finite arrive as None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .clock import Clock
from .scale import Scale
from .spread import Grid

__all__ = ["Evidence", "KnobSpec", "Run"]


@dataclass(frozen=True)
class KnobSpec:
    """Name, grid of multipliers and scale of one explored hyperparameter."""

    name: str
    grid: Grid
    scale: Scale = field(default_factory=Scale)
    rate: bool = True
    """Is it a learning rate? Those are lowered where a cycle is rolled back."""
    valid_on_train_loss: bool = True
    """May training losses decide about it?"""


@dataclass(frozen=True)
class Run:
    """What is known before the first step."""

    clock: Clock
    """Cycles and the length of the run."""
    knobs: Sequence[KnobSpec]
    replicas: int
    floor: Sequence[float]
    """[knob]: the lowest value of the untouched schedule (0 where unknown)."""
    local: bool = False
    """Does each replica step with gradients of its own?"""
    searches: bool = False
    """Does a search move the rate in the first steps, before a controller does?"""
    seed: int = 0
    """Of what is drawn."""

    @property
    def total_steps(self) -> int | None:
        """Length S of the run in steps, if known."""
        return self.clock.total_steps

    @property
    def sync_interval(self) -> int:
        """T, in optimizer steps; of a QuadraticPeriod the least."""
        return self.clock.sync_interval


@dataclass(frozen=True)
class Evidence:
    """One cycle. Losses in nats (or the user's unit), values in the knob's own unit."""

    cycle: int
    """Cycles closed before this one."""
    step: int
    """Steps of the schedule done when the cycle ended."""
    total_steps: int | None
    """Length S of the run in steps, if known."""
    warmup_steps: int
    """S_warm, in optimizer steps."""
    sync_interval: int
    """T, in optimizer steps."""
    knobs: Sequence[str]
    """Their names."""
    multipliers: Sequence[Sequence[float]]
    """[knob][replica]: rho of the cycle that ended, as it acted: a bound may have held it back."""
    planned: Sequence[Sequence[float]]
    """[knob][replica]: rho as it was planned, the same in each cycle of a knob's grid."""
    losses: Sequence[float | None]
    """[replica]: mean training loss over the cycle; None is left out."""
    scheduled: Sequence[float]
    """[knob]: the untouched schedule's value now."""
    peak: Sequence[float]
    """[knob]: the highest value of the untouched schedule."""
    floor: Sequence[float]
    """[knob]: the lowest value of the untouched schedule (0 where unknown)."""
    values: Sequence[float]
    """[knob]: the base value now, as it is in the parameter group."""
    corrections: Sequence[float]
    """[knob]: the correction in use, > 0, which a decision's factor multiplies."""
    decisions_left: int | None = None
    """K of Eq. 7: decisions left in the run, this one included."""
    local: bool = False
    """Has each replica stepped with gradients of its own? Then its weights have noise of its
    own."""
    measured: Mapping[str, Sequence[Sequence[float] | None]] = field(default_factory=dict)
    """By measurement, [replica]: what was measured, None where a replica is left out. Without those
    that have nothing to report yet."""
    highest: Sequence[float] = ()
    """[knob]: the highest value of the untouched schedule since the evidence before: a peak may
    rise and fall within one cycle. Empty: not known."""
