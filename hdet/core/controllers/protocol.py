"""What a controller is given and what it answers.

A controller runs on every rank on bitwise equal inputs, so it must be a function of the evidence and of its own state
alone: no clock, no random numbers, no tensors. Losses that are missing or not finite arrive as None and are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

__all__ = ["Controller", "Decision", "Evidence"]


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
    sync_interval: int
    """Of the optimizer's steps, where those are not the schedule's."""
    knobs: Sequence[str]
    multipliers: Sequence[Sequence[float]]
    """[knob][replica]: rho of the cycle that ended."""
    losses: Sequence[float | None]
    """[replica]: mean training loss over the cycle; None is left out."""
    probes: Sequence[Sequence[float] | None] | None
    """[replica][chunk]: losses on mini-batches common to all replicas, at averaged weights or on a line (hdet/points.py); None where none
    were taken."""
    scheduled: Sequence[float]
    """[knob]: the untouched schedule's value now."""
    peak: Sequence[float]
    """[knob]: the highest value of the untouched schedule."""
    mean: Sequence[float]
    """[knob]: under a `LineController`, the mean of the untouched schedule from where the Ensemble was made to the run's end; else, or where
    nobody can tell, ``peak``."""
    floor: Sequence[float]
    """[knob]: the lowest value of the untouched schedule (0 where unknown)."""
    values: Sequence[float]
    """[knob]: the base value in force in the step to come, as far as a rise that comes by and by has come."""
    corrections: Sequence[float]
    """[knob]: the correction decided last, > 0, which a decision's factor multiplies. While a rise comes by and by, `values` are behind it."""
    decisions_left: int | None = None
    """K of Eq. 7: decisions left in the run, this one included."""
    line: Any | None = None
    """The `Line` of the interval that ends, which scores what it is asked for; None where no interval ends."""
    inner: Sequence[Sequence[float] | None] | None = None
    """[replica][knob * samples + sample]: cosines of gradient and displacement, see `HypergradientRule`; None where none were taken."""
    local: bool = False
    """Has each replica stepped with gradients of its own? Then its way has noise that the others' have not."""

    def only(self, knobs: Sequence[int]) -> Evidence:
        """Of these knobs; ``inner``, which is of all, is left out."""
        of_knobs = ("knobs", "multipliers", "scheduled", "peak", "mean", "floor", "values", "corrections")
        chosen: dict[str, Any] = {name: [getattr(self, name)[k] for k in knobs] for name in of_knobs}
        return replace(self, inner=None, **chosen)


@dataclass(frozen=True)
class Decision:
    """The answer for one knob. ``factor`` multiplies its correction; ``base`` instead replaces schedule and correction."""

    factor: float = 1.0
    base: float | None = None
    slope: float | None = None
    """d loss / d ln(multiplier): negative means that a higher value was better."""
    error: float | None = None
    """One standard error of ``slope``."""
    t: float | None = None
    note: str = ""
    over: int = 0
    """Steps of the schedule over which a higher value comes into force, evenly by the logarithm; 0: at once. A lower one always does at once."""
    restart: bool = False
    """Weights and moments are to be those of the interval's beginning; only where ``evidence.line`` is not None."""
    rise_from: float = 1.0
    """With ``restart``: the part of itself from which the value comes into force, over ``over`` steps."""

    def __post_init__(self) -> None:
        for name, number in (("factor", self.factor), ("base", self.base), ("rise_from", self.rise_from)):
            if number is not None and not (math.isfinite(number) and number > 0):
                raise ValueError(f"a decision's {name} must be finite and positive, got {number!r}: a controller may not produce it")


@runtime_checkable
class Controller(Protocol):
    """Anything with these members steers an Ensemble. ``update`` returns one Decision per knob, in the order of ``evidence.knobs``.

    `BaseController` has them, and more that is optional; what a controller leaves out has that class's default.
    """

    name: str
    needs_probe: bool
    """Does it read ``evidence.probes``? Then it is a sensor too (`ProbeController`), or has one (`LineController`'s ``then``), and compares replicas."""

    def update(self, evidence: Evidence) -> list[Decision]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
