"""Bound knobs: the cells of one run in which a knob's value stands, and who writes there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Real
from operator import is_
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from ..core.scale import Scale
from ..core.spread import Grid
from ..core.value import Value
from .cells import Cell, close, content

__all__ = ["BoundKnob", "Bounds", "Explored", "Knob", "Meaning", "scale_of"]

Bounds = tuple[float, float] | None
"""(low, high), hard for the base value and for every replica's; None: none."""

_NUMBERS = frozenset((float, int))


class Knob(Protocol):
    """What an Ensemble is given: a frozen dataclass that names a scalar hyperparameter and how far
    it is spread."""

    def bind(self, optimizer: Optimizer) -> list[BoundKnob]:
        """Its knobs in this run.

        Reads, and writes nothing. Raises ValueError for what is not there or cannot be explored.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Explored:
    """What all knobs take in the place of ``spread``; one of them at most. A subclass has a field
    ``spread``, with a default.

    Args:
        values: the base values that are tried while the schedule is at its peak, such as
            ``[1e-3, 5e-4]``: each by an equal part of the replicas, drawn again for each cycle.
            Elsewhere, and once the base value has moved, their ratios to it stay.
        multipliers: the same as multiples of the base value.
        ratio: above 1: multipliers are even in the logarithm, from 1 / ratio to ratio.

    Example::

        knobs = [hdet.LearningRate(ratio=5)]
        ensemble = hdet.Ensemble(optimizer, scheduler, knobs=knobs)
    """

    values: Sequence[float] | None = None
    multipliers: Sequence[float] | None = None
    ratio: float | None = None

    def __post_init__(self) -> None:
        _ = self.grid

    @property
    def grid(self) -> Grid:
        """Raises ValueError if there are several, or one that cannot be used."""
        own: Any = self
        grid = Grid(0.0, self.ratio, self.multipliers, self.values)
        is_default = own.spread == type(own).spread and grid.explores
        return grid if is_default else replace(grid, spread=own.spread)


@dataclass(frozen=True)
class Meaning:
    """What it means for a run that replicas differ in a knob."""

    acts: str = "step"
    """"step": inside ``optimizer.step()``; "forward": inside ``with ensemble.explore():``."""
    valid_on_train_loss: bool = False
    """May training losses decide? If not, which is the safe answer, only a held-out, unregularised
    probe may."""
    affects_eval_loss: bool = False
    """The loss at given weights depends on it also in eval mode, so a probe scores each replica at
    its own value."""
    on_gradients: bool = False
    """It acts on gradients that are all-reduced already, so that replicas differ although these are
    shared. Their moments differ then."""
    moments_diverge: bool = False
    """Replicas with different values have different moments."""

    @property
    def parts_moments(self) -> bool:
        """Do replicas' moments differ even with shared gradients?"""
        return self.moments_diverge or self.on_gradients


def scale_of(bounds: Bounds, kind: str = "log", unit: float = 1.0) -> Scale:
    """Raises ValueError for bounds that are none."""
    if bounds is None:
        return Scale(kind, unit)
    if not isinstance(bounds, Sequence) or len(bounds) != 2:
        raise ValueError(f"bounds must be (low, high) or None, got {bounds!r}")
    return Scale(kind, unit, *bounds)


class BoundKnob(Value):
    """The value of a knob in one run, and the cells that have it.

    Between steps a cell holds the base value. A scheduler sees the schedule's own alone, so that
    recursive ones never compound a correction. Inside `fanned_out` the cell holds the replica's
    value.

    Args:
        name, grid, scale: as for `Value`.
        cells: at least one.
        meaning: of differences between replicas; default: `Meaning()`.
        key: of a parameter group, "" otherwise.

    Raises:
        ValueError: a value that is no number, outside of the bounds, or (acting "forward") one that
            no factor can move.
    """

    indices: Sequence[int] = ()
    """[cell]: its parameter group, if it is in one."""
    is_lent = False
    """Do the cells hold a replica's value now?"""
    is_neutral = True
    """Are the base values the schedule's own? Then there is nothing to show and to write."""
    is_plain = True
    """Are the schedule's values Python's numbers, which `read` may be compared with?"""

    def __init__(
        self,
        name: str,
        grid: Grid | float,
        cells: Sequence[Cell],
        scale: Scale | None = None,
        meaning: Meaning | None = None,
        *,
        key: str = "",
    ) -> None:
        self.key, self.cells, self.meaning = key, list(cells), meaning or Meaning()
        scheduled, scale, is_valid = self.read(), scale or Scale(), self.meaning.valid_on_train_loss
        for value in scheduled:
            _check_first(value, name, scale, self.meaning)
        super().__init__(
            name, grid, scale, rate=key == "lr", valid_on_train_loss=is_valid, scheduled=scheduled
        )
        self.take_schedule()
        self.is_neutral = not scale.bounded

    def read(self) -> list[Any]:
        """[cell]: what they hold now."""
        return [cell.get() for cell in self.cells]

    def value(self) -> float:
        """What the first cell holds now: the base value, or the replica's while it explores."""
        return float(self.read()[0])

    # -- between steps -----------------------------------------------------------------------------

    def show_schedule(self) -> None:
        """Put the schedule's own values into the cells."""
        self._put(self.scheduled)

    def take_schedule(self) -> None:
        """What stands in the cells are the schedule's next values.

        `write` follows, unless `is_neutral`.
        """
        self.scheduled = values = self.read()
        self.is_plain = _NUMBERS.issuperset(map(type, values))
        if not self.is_plain:
            self.scheduled = [content(value) for value in values]
        if self.is_neutral:
            self.left = self.scheduled
            self._marks = values if self.is_plain else _marks_of(values)

    def write(self) -> None:
        """Leave the base values in the cells."""
        self.correct()
        self.is_neutral = not self.scale.bounded and all(map(is_, self.left, self.scheduled))
        self._put(self.left)

    def _put(self, values: Sequence[Any]) -> None:
        for cell, value in zip(self.cells, values, strict=True):
            cell.set(value)
        self._marks = _marks_of(self.read())

    # -- who else writes ---------------------------------------------------------------------------

    def find_foreign_write(self) -> int | None:
        """The first cell that holds another value than `write` has left; None while a replica's
        values are in the cells."""
        return None if self.is_lent else self._find_write(self.left)

    def _find_write(self, expected: Sequence[Any]) -> int | None:
        """Of tensors the values are compared only if the version counter has moved: reading one
        waits for the device. A buffer of the model may have been averaged over the replicas, and
        the mean of equal values can differ by some ulps."""
        values = self.read()
        marks = _marks_of(values)
        for i, value in enumerate(values):
            is_tensor = isinstance(value, torch.Tensor)
            if marks[i] != self._marks[i] and not (is_tensor and close(value, expected[i])):
                return i
        self._marks = marks
        return None

    def name_of(self, i: int) -> str:
        """Of a cell, for messages."""
        return f"{self.name} of parameter group {self.indices[i]}" if self.indices else self.name

    # -- in use ------------------------------------------------------------------------------------

    @contextmanager
    def fanned_out(self, multiplier: float) -> Iterator[None]:
        """Inside, the cells hold a replica's value; afterwards exactly what they held before,
        also when something raises. Raises ValueError if somebody has written a value inside,
        which would be one of this replica alone."""
        multipliers = [self._multiplier_of(i, multiplier) for i in range(len(self.cells))]
        if all(rho == 1.0 for rho in multipliers):
            yield
            return
        before = [content(value) for value in self.read()]
        used = list(map(self.scale.fanned, before, multipliers))
        self.is_lent = True
        try:
            self._put(used)
            yield
            cell = self._find_write(used)
            if cell is not None:
                raise ValueError(self._written_inside(cell, float(used[cell])))
        finally:
            self._put(before)
            self.is_lent = False

    def _multiplier_of(self, i: int, multiplier: float) -> float:
        return multiplier

    def _written_inside(self, i: int, own: float) -> str:
        in_step = self.meaning.acts == "step"
        where = "optimizer.step()" if in_step else "`with ensemble.explore():`"
        return (
            f"{self.name} was changed to {float(self.read()[i]):g} inside {where}, where it holds "
            f"this replica's own value, {own:g}: change it outside, where it is every replica's "
            "(step a scheduler after optimizer.step(), not in a hook of it; a buffer that "
            "DistributedDataParallel sends from rank 0 needs broadcast_buffers=False)"
        )


def _check_first(value: Any, name: str, scale: Scale, meaning: Meaning) -> None:
    """Raises ValueError for one with which a knob cannot begin."""
    is_one = value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, Real)
    number = float(value) if is_one else math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} is {value!r}: begin with a finite number")
    # In a step it may: a schedule may begin at 0.
    if meaning.acts != "step" and scale.kind == "log" and number <= 0:
        raise ValueError(
            f"{name} is {number:g}, and scale='log' multiplies: begin above 0, or use "
            "scale='linear' with a unit"
        )
    if scale.bounded and not scale.low <= number <= scale.high:
        raise ValueError(
            f"{name} is {number:g}, outside of its bounds ({scale.low:g}, {scale.high:g}): change "
            "one of them"
        )


def _marks_of(values: Sequence[Any]) -> list[Any]:
    """Equal as long as nobody writes: a number itself, or a tensor's identity and version counter,
    which need no device."""
    return [(id(x), x._version) if isinstance(x, torch.Tensor) else x for x in values]
