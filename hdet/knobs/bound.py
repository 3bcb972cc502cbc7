"""Bound knobs: a spread, a scale, and the cells of one run that they move; and several of them in
one run."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from ..core.scale import Scale
from ..core.spread import check_spread
from .cells import Cell, close, content, group_cell

__all__ = [
    "Bound",
    "Bounds",
    "GroupKnob",
    "Knob",
    "ProductKnob",
    "bind_all",
    "check_disjoint",
    "scale_of",
]

Bounds = tuple[float, float] | None
"""(low, high), hard for the base value and for every replica's; None: none."""


class Knob(Protocol):
    """What an Ensemble is given: a frozen dataclass that names a scalar hyperparameter and how far
    it is spread."""

    def bind(self, optimizer: Optimizer) -> list[Bound]:
        """Its knobs in this run.

        Reads, and writes nothing. Raises ValueError for what is not there or cannot be explored.
        """
        ...


def scale_of(bounds: Bounds, kind: str = "log", unit: float = 1.0) -> Scale:
    """Raises ValueError for bounds that are none."""
    if bounds is None:
        return Scale(kind, unit)
    if not isinstance(bounds, Sequence) or len(bounds) != 2:
        raise ValueError(f"bounds must be (low, high) or None, got {bounds!r}")
    return Scale(kind, unit, *bounds)


class Bound:
    """One knob of a run: all its cells move by the same factor (on a linear scale: by the same
    amount).

    Between steps a cell holds the base value: the schedule's own, corrected. `show_schedule`
    restores the schedule's value before the scheduler steps, so that recursive schedulers never
    compound a correction. Inside `fanned_out` the cell holds the replica's value.

    Args:
        name: unique in a run.
        spread: alpha in [0, 1).
        cells: at least one.
        key: of a parameter group, "" otherwise.
        valid_on_train_loss: may training losses judge it? If not, which is the safe answer, only a
            held-out, unregularised probe may.
        acts: "step": inside ``optimizer.step()``; "forward": inside ``with ensemble.explore():``.
        affects_eval_loss: the loss at given weights depends on it also in eval mode, so a probe
            scores each replica at its own value.
        on_gradients: it acts on gradients that are all-reduced already, so that replicas differ
            although these are shared.
        moments_diverge: replicas with different values have different moments, as they have if it
            is ``on_gradients``.

    Raises:
        ValueError: a value that is no number, outside of the bounds, or (acting "forward") one that
            no factor can move.
    """

    def __init__(
        self,
        name: str,
        spread: float,
        cells: Sequence[Cell],
        scale: Scale | None = None,
        *,
        key: str = "",
        valid_on_train_loss: bool = False,
        acts: str = "step",
        affects_eval_loss: bool = False,
        on_gradients: bool = False,
        moments_diverge: bool = False,
    ) -> None:
        if acts not in ("step", "forward"):
            raise ValueError(
                f"acts of the knob {name!r} must be 'step' or 'forward' (inside explore()), got "
                f"{acts!r}"
            )
        if (
            isinstance(cells, Cell)
            or not list(cells)
            or not all(isinstance(cell, Cell) for cell in cells)
        ):
            raise ValueError(
                f"cells of the knob {name!r} must be a list with at least one cell, got {cells!r}"
            )
        if scale is not None and not isinstance(scale, Scale):
            raise ValueError(
                f"scale of the knob {name!r} must be made by scale_of(bounds, kind, unit), got "
                f"{scale!r}"
            )
        self.name, self.spread, self.cells, self.scale, self.key = (
            name,
            check_spread(spread),
            list(cells),
            scale or Scale(),
            key,
        )
        self.valid_on_train_loss, self.acts, self.affects_eval_loss = (
            valid_on_train_loss,
            acts,
            affects_eval_loss,
        )
        self.on_gradients, self.moments_diverge = on_gradients, moments_diverge or on_gradients
        self.scheduled: list[Any] = [content(cell.get()) for cell in self.cells]
        """[cell]: the untouched schedule's values."""
        self.highest: Any = -math.inf
        """Of the first cell of `scheduled`, in the steps since the controller was told; -inf before
        the first."""
        self._check_first()
        self.has_tensors = any(isinstance(value, torch.Tensor) for value in self.scheduled)
        self.rho = 1.0
        """This replica's multiplier in the running cycle."""
        self.is_lent = False
        """Do the cells hold a replica's value now?"""
        self.base: float | None = None
        """Off the schedule, the value that it was left with, as `write` was told."""
        self.left: list[Any] = list(self.scheduled)
        """[cell]: what `write` has left there."""
        self._correction = 1.0  # what it was told
        self.is_neutral = False
        """Are the base values the schedule's own? Then there is nothing to show and to write."""
        peaks = [self.peak(i) for i in range(len(self.cells))]
        self._ratios = [peak / peaks[0] if peaks[0] > 0 else 1.0 for peak in peaks]
        self._remember_marks()
        low, high = self.scale.low, self.scale.high
        for value in map(float, self.scheduled):
            if self.scale.bounded and not low <= value <= high:
                raise ValueError(
                    f"{name} is {value:g}, outside of its bounds ({low:g}, {high:g}): change one "
                    "of them"
                )

    def _check_first(self) -> None:
        for value in self.scheduled:
            try:
                number = math.nan if isinstance(value, str) else float(value)
            except (TypeError, ValueError, RuntimeError, OverflowError):
                number = math.nan
            if not math.isfinite(number):
                raise ValueError(f"{self.name} is {value!r}: begin with a finite number")
            if (
                self.acts != "step" and self.scale.kind == "log" and number <= 0
            ):  # a schedule may begin at 0
                raise ValueError(
                    f"{self.name} is {number:g}, and scale='log' multiplies: begin above 0, or use "
                    "scale='linear' with a unit"
                )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.name!r}, spread={self.spread:g}, {len(self.cells)} "
            f"cells, scale={self.scale.kind!r})"
        )

    # -- values ------------------------------------------------------------------------------------

    def read(self) -> list[Any]:
        """What the cells hold now."""
        return [cell.get() for cell in self.cells]

    def value(self) -> float:
        """What the first cell holds now: the base value, or the replica's while it explores."""
        return float(self.cells[0].get())

    def scheduled_value(self) -> float:
        """The untouched schedule's value, of the first cell; waits for the device if it is a CUDA
        tensor."""
        return float(self.scheduled[0])

    def uncorrected_value(self) -> float:
        """What a correction of 1 would leave in the first cell."""
        return self.scheduled_value()

    def base_value(self) -> float:
        """The base value in force, of the first cell, as `write` was told."""
        return float(self._base_of(0, self.scheduled_value()))

    def peak(self, i: int) -> float:
        """Of the untouched schedule, of cell ``i``, as far as the cell knows."""
        return float(self.scheduled[i])

    def floor(self) -> float:
        """Of the first cell; 0 is unknown."""
        return 0.0

    # -- between steps -----------------------------------------------------------------------------

    def show_schedule(self) -> None:
        """Put the schedule's own values into the cells."""
        for cell, value in zip(self.cells, self.scheduled, strict=True):
            cell.set(value)

    def take_schedule(self) -> None:
        """What stands in the cells are the schedule's next values.

        `write` follows, unless `is_neutral`.
        """
        self.scheduled = values = self.read()
        self.has_tensors = False
        for i, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                values[i], self.has_tensors = content(value), True
        if self.is_neutral:
            self.left = values
            if self.has_tensors:
                self._remember_marks()
            else:
                self._marks = values

    def load(self, scheduled: Sequence[float], highest: float) -> None:
        """Continue at these values of the schedule. `write` follows."""
        self.scheduled, self.highest = [float(x) for x in scheduled], float(highest)
        self.is_neutral = False

    def write(self, correction: float, base: float | None = None) -> None:
        """Leave the base value in the cells: the schedule's, corrected; or, off the schedule,
        ``base`` (further cells keep the ratio of their peaks)."""
        was_neutral, self._correction, self.base = self.is_neutral, correction, base
        self.left = [self._base_of(i, value) for i, value in enumerate(self.scheduled)]
        self.is_neutral = not self.scale.bounded and all(
            left is own for left, own in zip(self.left, self.scheduled, strict=True)
        )
        if not (was_neutral and self.is_neutral):
            for cell, value in zip(self.cells, self.left, strict=True):
                cell.set(value)
        self._remember_marks()

    def _base_of(self, i: int, scheduled: Any) -> Any:
        if self.base is not None:
            return self.scale.hold(self.base * self._ratios[i])
        return self.scale.corrected(scheduled, self._correction_of(i))

    def _correction_of(self, i: int) -> float:
        return self._correction

    def find_foreign_write(self) -> int | None:
        """The first cell that holds another value than `write` has left; None while a replica's
        values are in the cells.

        Of tensors the values are compared only if the version counter has moved: reading one waits
        for the device. A buffer of the model may have been averaged over the replicas, and the mean
        of equal values can differ by some ulps.
        """
        if self.is_lent:
            return None
        for i, (value, mark) in enumerate(zip(self.read(), self._marks, strict=True)):
            now = _mark(value) if isinstance(value, torch.Tensor) else value
            if now != mark:
                if not isinstance(value, torch.Tensor) or not close(value, self.left[i]):
                    return i
                self._marks[i] = now
        return None

    def name_of(self, i: int) -> str:
        """For messages."""
        return self.name

    def _remember_marks(self) -> None:
        self._marks = marks = self.read()
        for i, value in enumerate(marks):
            if isinstance(value, torch.Tensor):
                marks[i] = _mark(value)

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
        used = [
            self.scale.fanned(content(value), rho)
            for value, rho in zip(self.read(), multipliers, strict=True)
        ]
        with self._lent(used):
            inside = [_mark(value) for value in self.read()]
            yield
            for value, mark, own in zip(self.read(), inside, used, strict=True):
                if _mark(value) != mark and not (
                    isinstance(value, torch.Tensor) and close(value, own)
                ):
                    where = (
                        "optimizer.step()" if self.acts == "step" else "`with ensemble.explore():`"
                    )
                    raise ValueError(
                        f"{self.name} was changed to {float(value):g} inside {where}, where it "
                        f"holds this replica's own value, {float(own):g}: "
                        "change it outside, where it is every replica's (step a scheduler after "
                        "optimizer.step(), not in a hook of it; a buffer that "
                        "DistributedDataParallel sends from rank 0 needs broadcast_buffers=False)"
                    )

    @contextmanager
    def _lent(self, used: Sequence[Any]) -> Iterator[None]:
        values = self.read()
        before = [content(value) for value in values]
        self.is_lent = True
        try:
            for cell, value in zip(self.cells, used, strict=True):
                cell.set(value)
            yield
        finally:
            for cell, value in zip(self.cells, before, strict=True):
                cell.set(value)
            self._remember_marks()
            self.is_lent = False

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
        self._entry, self.key = entry, key
        super().__init__(
            name,
            spread,
            [group_cell(optimizer, i, key, entry) for i in self.indices],
            scale,
            key=key,
            **settings,
        )

    def read(self) -> list[Any]:
        values, groups = [], self.optimizer.param_groups
        for i in self.indices:
            value = groups[i][self.key]
            values.append(value if self._entry is None else value[self._entry])
        return values

    def name_of(self, i: int) -> str:
        return f"{self.name} of parameter group {self.indices[i]}"

    def floor(self) -> float:
        return float(self.optimizer.param_groups[self.indices[0]].get("min_" + self.key) or 0.0)

    def peak(self, i: int) -> float:
        # Without a schedule the group holds the corrected value, so the schedule's own is what
        # counts.
        group = self.optimizer.param_groups[self.indices[i]]
        return float(
            group.get("max_" + self.key, group.get("initial_" + self.key, self.scheduled[i]))
        )

    def effective(self, i: int, multiplier: float) -> float:
        """The multiplier that acts on the base value of cell ``i``; another one where a bound holds
        the replica's back."""
        return (
            self.scale.effective(float(self.left[i]), multiplier)
            if self.scale.bounded
            else multiplier
        )

    def change(self, i: int) -> float:
        """Base value of cell ``i`` by its schedule's."""
        if self.base is None and not self.scale.bounded:
            return self._correction
        scheduled = float(self.scheduled[i])
        return float(self._base_of(i, scheduled)) / scheduled if scheduled > 0 else 1.0


class ProductKnob(GroupKnob):
    """A decay that is explored as rate * decay.

    It is divided by whatever the rate is multiplied by, so that the knob's correction and
    multiplier are those of the product."""

    rates: Mapping[int, tuple[GroupKnob, int]] = {}
    """By parameter group: the knob of its rate, and the number of its cell.

    Set by `bind_all`; groups without one have a fixed rate.
    """

    def uncorrected_value(self) -> float:
        rate = self.rates.get(self.indices[0])
        return self.scheduled_value() / (1.0 if rate is None else rate[0].change(rate[1]))

    def _correction_of(self, i: int) -> float:
        rate = self.rates.get(self.indices[i])
        return self._correction if rate is None else self._correction / rate[0].change(rate[1])

    def _multiplier_of(self, i: int, multiplier: float) -> float:
        rate = self.rates.get(self.indices[i])
        if (
            rate is None or getattr(self.optimizer, "decay_at", "replica") == "base"
        ):  # a decay that no replica's rate enters
            return multiplier
        return multiplier / rate[0].effective(rate[1], rate[0].rho)


def _mark(value: Any) -> Any:
    """Equal as long as nobody writes: a number itself, or a tensor's identity and version counter,
    which need no device."""
    return (id(value), value._version) if isinstance(value, torch.Tensor) else value


# -- several knobs in one run ----------------------------------------------------------------------


def bind_all(knobs: Sequence[Knob], optimizer: Optimizer) -> list[Bound]:
    """All knobs of a run: rates first, because what is explored as a product with them is
    written after them. Raises ValueError for a knob that cannot be bound, or a product without a
    rate."""
    bound: list[Bound] = []
    for knob in knobs:
        found = knob.bind(optimizer)
        if not isinstance(found, (list, tuple)) or not all(isinstance(one, Bound) for one in found):
            raise TypeError(
                f"{type(knob).__name__}.bind gave {found!r}: it must return a list of "
                "hdet.knobs.Bound"
            )
        bound += found
    bound.sort(key=lambda one: one.key != "lr")
    rates = {
        index: (one, i)
        for one in bound
        if isinstance(one, GroupKnob) and one.key == "lr"
        for i, index in enumerate(one.indices)
    }
    for one in bound:
        if isinstance(one, ProductKnob):
            if not any(index in rates for index in one.indices):
                raise ValueError(
                    f"{one.name} is to be explored as rate x decay, but no knob moves the rate of "
                    "its groups: add a LearningRate, or leave product=True out"
                )
            one.rates = rates
    return bound


def check_disjoint(knobs: Sequence[Bound], *, tensors: bool) -> None:
    """Raises ValueError if two knobs would move one value.

    ``tensors``: also look for groups that hold the same tensor, as torch makes of a tensor
    rate that is given for all groups (harmless as long as nothing moves)."""
    owners: dict[tuple[str, Hashable], str] = {}
    for knob in knobs:
        for cell in knob.cells:
            value = cell.get()
            shared: list[tuple[str, Hashable]] = [cell.place]
            if tensors and isinstance(value, torch.Tensor):
                shared.append(("tensor", id(value)))
            for place in shared:
                owner = owners.setdefault(place, knob.name)
                if owner != knob.name:
                    raise ValueError(
                        f"the knobs {owner!r} and {knob.name!r} share one {place[0]} {knob.key!r}: "
                        "name each group once, give each group a "
                        "tensor of its own, or explore them together with groups=None"
                        if knob.key
                        else (
                            f"the knobs {owner!r} and {knob.name!r} share one {place[0]}: leave "
                            "one of them out"
                        )
                    )
