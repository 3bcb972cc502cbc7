"""Bound knobs: a spread, a scale, and the cells of one run that they move."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch.optim import Optimizer

from ..core.scale import Scale
from ..core.spread import check_spread
from .cells import BetaCell, Cell, GroupCell

__all__ = ["Bound", "GroupKnob", "Knob", "ProductKnob", "ScalarKnob"]


class Knob(Protocol):
    """What an Ensemble is given: a frozen dataclass that names a scalar hyperparameter and how far it is spread."""

    def bind(self, optimizer: Optimizer) -> list[Bound]:
        """Its knobs in this run. Reads, and writes nothing. Raises ValueError for what is not there or cannot be explored."""
        ...


class Bound:
    """One knob of a run: all its cells move by the same factor (on a linear scale: by the same amount).

    At rest a cell holds the base value: the schedule's own (or the user's), corrected. `show_schedule` shows a scheduler its own
    value before it steps, so that recursive schedulers never compound a correction; inside `fanned_out` there is the replica's value.

    Args:
        name: unique in a run.
        spread: alpha in [0, 1).
        cells: at least one.
        scale: see `Scale`.
        key: of a parameter group, "" otherwise.
        honest: may training losses judge it? If not, only a held-out, unregularised probe may.
        acts: "step": inside ``optimizer.step()``; "forward": inside ``with ensemble.explore():``.
        direct: the loss depends on it also at given weights in eval mode, so a probe scores each replica at its own value.
        on_gradients: it acts on gradients that are all-reduced already, so that replicas differ although these are shared.
        parts_moments: replicas with different values have different moments.

    Raises:
        ValueError: a value outside of the bounds, or one that no factor can move.
    """

    def __init__(
        self,
        name: str,
        spread: float,
        cells: Sequence[Cell],
        scale: Scale | None = None,
        *,
        key: str = "",
        honest: bool = True,
        acts: str = "step",
        direct: bool = False,
        on_gradients: bool = False,
        parts_moments: bool = False,
    ) -> None:
        self.name, self.spread, self.cells, self.scale, self.key = name, check_spread(spread), list(cells), scale or Scale(), key
        self.honest, self.acts, self.direct = honest, acts, direct
        self.on_gradients, self.parts_moments = on_gradients, parts_moments
        self.scheduled: list[Any] = [_copy(cell.get()) for cell in self.cells]
        """[cell]: the untouched schedule's values."""
        self.rho = 1.0
        """This replica's multiplier in the running cycle."""
        self._correction, self._base = 1.0, cast("float | None", None)  # what `write` was told
        self._left: list[Any] = list(self.scheduled)  # what it has left in the cells
        peaks = [self._peak(i) for i in range(len(self.cells))]
        self._ratios = [peak / peaks[0] if peaks[0] > 0 else 1.0 for peak in peaks]
        self._remember_marks()
        self._check_values()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, spread={self.spread:g}, {len(self.cells)} cells, scale={self.scale.kind!r})"

    def _check_values(self) -> None:
        scale = self.scale
        if not scale.bounded:
            return
        for value in map(float, self.scheduled):
            if not scale.low <= value <= scale.high:
                raise ValueError(f"{self.name} is {value:g}, outside of its bounds ({scale.low:g}, {scale.high:g}): change one of them")

    # -- values ----------------------------------------------------------------------------------------------------------

    def _values(self) -> list[Any]:
        return [cell.get() for cell in self.cells]

    def value(self) -> float:
        """What the first cell holds now: the base value at rest, the replica's while it explores."""
        return float(self.cells[0].get())

    def scheduled_value(self) -> float:
        """The untouched schedule's value, of the first cell; waits for the device if it is a CUDA tensor."""
        return float(self.scheduled[0])

    def base_value(self) -> float:
        """The base value in force, of the first cell, as `write` was told."""
        return float(self._base_of(0, self.scheduled_value()))

    def peak_and_floor(self) -> tuple[float, float]:
        """(peak, floor) of the untouched schedule; floor 0 is unknown."""
        return self._peak(0), 0.0

    def _peak(self, i: int) -> float:
        return float(self.scheduled[i])

    # -- at rest ---------------------------------------------------------------------------------------------------------

    def show_schedule(self) -> None:
        """Put the scheduler's own values back into the cells, except where somebody else has set another since."""
        for i, cell in enumerate(self.cells):
            if self._is_ours(i, cell.get()):
                cell.set(self.scheduled[i])

    def take_schedule(self) -> None:
        """Remember what the scheduler has written."""
        self.scheduled = [_copy(value) for value in self._values()]

    def write(self, correction: float, base: float | None = None) -> None:
        """Leave the base value in the cells: the schedule's, corrected; or, off the schedule, ``base`` (further cells keep the ratio of their peaks)."""
        self._correction, self._base = correction, base
        self._left = [self._base_of(i, value) for i, value in enumerate(self.scheduled)]
        for cell, value in zip(self.cells, self._left, strict=True):
            cell.set(value)
        self._remember_marks()

    def _base_of(self, i: int, scheduled: Any) -> Any:
        if self._base is not None:
            return self.scale.hold(self._base * self._ratios[i])
        return self.scale.corrected(scheduled, self._correction_of(i))

    def _correction_of(self, i: int) -> float:
        return self._correction

    def _is_ours(self, i: int, value: Any) -> bool:
        """Is this what `write` left? Values decide, and for tensors only when the version counter has moved: reading one waits for the device.

        A buffer of the model may have been averaged over the replicas, whose mean of equal values can be some ulps beside them.
        """
        if _mark(value) == self._marks[i]:
            return True
        if not isinstance(value, torch.Tensor):
            return False
        left, rounding = float(self._left[i]), torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
        return abs(float(value) - left) <= 8 * rounding * abs(left)

    def _remember_marks(self) -> None:
        self._marks = [_mark(value) for value in self._values()]

    # -- in use ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def fanned_out(self, multiplier: float) -> Iterator[None]:
        """Inside, the cells hold a replica's value; afterwards exactly what they held before, also when something raises."""
        multipliers = [self._multiplier_of(i, multiplier) for i in range(len(self.cells))]
        if all(rho == 1.0 for rho in multipliers):
            yield
            return
        values = self._values()
        before, marks = [_copy(value) for value in values], [_mark(value) for value in values]
        try:
            for cell, value, rho in zip(self.cells, before, multipliers, strict=True):
                cell.set(self.scale.fanned(value, rho))
            yield
        finally:
            for i, (cell, value) in enumerate(zip(self.cells, before, strict=True)):
                cell.set(value)
                if marks[i] == self._marks[i]:  # else it is the user's since the last `write`, and stays so
                    self._marks[i] = _mark(cell.get())

    def _multiplier_of(self, i: int, multiplier: float) -> float:
        return multiplier


class GroupKnob(Bound):
    """One key of some parameter groups. ``entry``: of a tuple in the group, such as ``betas``."""

    def __init__(
        self,
        name: str,
        spread: float,
        optimizer: Optimizer,
        key: str,
        indices: Sequence[int],
        scale: Scale | None = None,
        *,
        entry: int | None = None,
        **settings: Any,
    ) -> None:
        self.optimizer, self.indices = optimizer, list(indices)
        cells = [GroupCell(optimizer, i, key) if entry is None else BetaCell(optimizer, i, key, entry) for i in self.indices]
        super().__init__(name, spread, cells, scale, key=key, **settings)

    def peak_and_floor(self) -> tuple[float, float]:
        """(peak, floor), as far as torch's schedulers leave them in the group."""
        return self._peak(0), float(self.optimizer.param_groups[self.indices[0]].get("min_" + self.key, 0.0))

    def _peak(self, i: int) -> float:
        # Without a schedule the group holds the corrected value, so the schedule's own is what counts.
        group = self.optimizer.param_groups[self.indices[i]]
        return float(group.get("max_" + self.key, group.get("initial_" + self.key, self.scheduled[i])))

    def effective(self, i: int, multiplier: float) -> float:
        """The multiplier that acts on the base value of cell ``i``; another one where a bound holds the replica's back."""
        return self.scale.effective(float(self._left[i]), multiplier) if self.scale.bounded else multiplier

    def change(self, i: int) -> float:
        """Base value of cell ``i`` by its schedule's."""
        if self._base is None and not self.scale.bounded:
            return self._correction
        scheduled = float(self.scheduled[i])
        return float(self._base_of(i, scheduled)) / scheduled if scheduled > 0 else 1.0


class ProductKnob(GroupKnob):
    """A decay that is explored as rate * decay: whatever the rate is multiplied by, it is divided by, so that the knob's own correction
    and multiplier are those of the product."""

    rates: Mapping[int, tuple[GroupKnob, int]] = {}
    """By parameter group: the knob of its rate, and the number of its cell. Set by `bind_all`; groups without one have a fixed rate."""

    def _correction_of(self, i: int) -> float:
        rate = self.rates.get(self.indices[i])
        return self._correction if rate is None else self._correction / rate[0].change(rate[1])

    def _multiplier_of(self, i: int, multiplier: float) -> float:
        rate = self.rates.get(self.indices[i])
        if rate is None or getattr(self.optimizer, "decay_at", "replica") == "base":  # a decay that no replica's rate enters
            return multiplier
        return multiplier / rate[0].effective(rate[1], rate[0].rho)


class ScalarKnob(Bound):
    """A value that no scheduler moves: what stands there and is not ours is the user's new value."""

    def show_schedule(self) -> None:
        """Nobody looks."""

    def take_schedule(self) -> None:
        self.scheduled = [
            scheduled if self._is_ours(i, value) else _copy(value)
            for i, (scheduled, value) in enumerate(zip(self.scheduled, self._values(), strict=True))
        ]


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _mark(value: Any) -> Any:
    """Tells later whether somebody has written here: a tensor's version counter needs no device, a number is its own mark."""
    return (id(value), value._version) if isinstance(value, torch.Tensor) else value
