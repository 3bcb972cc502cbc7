"""Bound knobs of parameter groups, and all knobs of one run together."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..core.scale import Scale
from ..core.spread import Grid
from .bound import BoundKnob, Knob, Meaning
from .cells import group_cell

__all__ = ["GroupKnob", "ProductKnob", "bind_all", "check_disjoint"]


class GroupKnob(BoundKnob):
    """One key of some parameter groups.

    Args:
        name, grid, scale, meaning: as for `BoundKnob`.
        optimizer: whose groups they are.
        key: of the groups.
        indices: the numbers of the groups.
        entry: of a tuple in the group, such as ``betas``.
    """

    def __init__(
        self,
        name: str,
        grid: Grid | float,
        optimizer: Optimizer,
        key: str,
        indices: Sequence[int],
        scale: Scale | None = None,
        meaning: Meaning | None = None,
        *,
        entry: int | None = None,
    ) -> None:
        self.optimizer, self.indices, self.entry = optimizer, list(indices), entry
        cells = [group_cell(optimizer, i, key, entry) for i in indices]
        super().__init__(name, grid, cells, scale, meaning, key=key)

    def read(self) -> list[Any]:
        values, groups = [], self.optimizer.param_groups
        for i in self.indices:  # without a call for each: this is in every step
            value = groups[i][self.key]
            values.append(value if self.entry is None else value[self.entry])
        return values

    def floor(self) -> float:
        own = self.optimizer.param_groups[self.indices[0]].get("min_" + self.key) or 0.0
        return super().floor() or float(own)

    def peaks(self) -> list[float]:
        if self.simulated:
            return super().peaks()
        # Without a schedule the group holds the corrected value: the schedule's own is what counts.
        groups = [self.optimizer.param_groups[i] for i in self.indices]
        return [
            float(group.get("max_" + self.key, group.get("initial_" + self.key, value)))
            for group, value in zip(groups, self.scheduled, strict=True)
        ]

    @property
    def knows_peaks(self) -> bool:
        """Does anything say what they are, where others write the values?"""
        groups = [self.optimizer.param_groups[i] for i in self.indices]
        keys = {"max_" + self.key}
        if not hasattr(self.optimizer.step, "_wrapped_by_lr_sched"):
            keys.add("initial_" + self.key)  # torch's schedulers write it, whatever their peak is
        return bool(self.simulated) or all(keys & group.keys() for group in groups)


class ProductKnob(GroupKnob):
    """A decay that is explored as rate * decay.

    It is divided by whatever the rate is multiplied by, so that the knob's correction and
    multiplier are those of the product."""

    rates: Mapping[int, tuple[BoundKnob, int]] = {}
    """By parameter group: the knob of its rate, and the number of its cell.

    Set by `bind_all`; groups without one have a fixed rate.
    """

    def uncorrected_value(self) -> float:
        return super().uncorrected_value() / self._change_of_rate(0)

    def _correction_of(self, i: int) -> float:
        return self.correction / self._change_of_rate(i)

    def _change_of_rate(self, i: int) -> float:
        """The base value of the rate beside cell ``i``, by its schedule's."""
        rate, place = self.rates.get(self.indices[i], (None, 0))
        if rate is None or (rate.off_schedule is None and not rate.scale.bounded):
            return 1.0 if rate is None else rate.correction
        scheduled = float(rate.scheduled[place])
        return float(rate.left[place]) / scheduled if scheduled > 0 else 1.0

    def _multiplier_of(self, i: int, multiplier: float) -> float:
        rate, place = self.rates.get(self.indices[i], (None, 0))
        if rate is None or getattr(self.optimizer, "decay_at", "replica") == "base":
            return multiplier  # the replica's rate does not enter the decay
        return multiplier / rate.acting(rate.multiplier, place)


def bind_all(knobs: Sequence[Knob], optimizer: Optimizer) -> list[BoundKnob]:
    """All knobs of a run: rates first, because what is explored as a product with them is
    written after them. Raises ValueError for a knob that cannot be bound, or a product without a
    rate."""
    bound = [one for knob in knobs for one in knob.bind(optimizer)]
    bound.sort(key=lambda one: one.key != "lr")
    rates = {
        index: (one, i) for one in bound if one.key == "lr" for i, index in enumerate(one.indices)
    }
    for one in bound:
        if isinstance(one, ProductKnob):
            if rates.keys().isdisjoint(one.indices):
                raise ValueError(
                    f"{one.name} is to be explored as rate x decay, but no knob moves the rate of "
                    "its groups: add a LearningRate, or leave product=True out"
                )
            one.rates = rates
    return bound


def check_disjoint(knobs: Sequence[BoundKnob], *, tensors: bool) -> None:
    """Raises ValueError if two knobs would move one value.

    ``tensors``: also look for groups that hold the same tensor, as torch makes of a tensor
    rate that is given for all groups (harmless as long as nothing moves)."""
    owners: dict[tuple[str, Hashable], str] = {}
    for knob in knobs:
        for cell in knob.cells:
            places, value = [cell.place], cell.get()
            if tensors and isinstance(value, torch.Tensor):
                places.append(("tensor", id(value)))
            for place in places:
                owner = owners.setdefault(place, knob.name)
                if owner != knob.name:
                    raise ValueError(
                        f"the knobs {owner!r} and {knob.name!r} share one {place[0]}: leave one "
                        "out, give each parameter group a tensor of its own, or explore groups "
                        "together with groups=None"
                    )
