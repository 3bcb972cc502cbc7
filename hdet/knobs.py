"""What can be explored: a knob names a scalar hyperparameter, how far it is spread, and where it lives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from .core.spread import check_spread

__all__ = ["GroupKnob", "LearningRate", "check_disjoint"]


@dataclass(frozen=True)
class LearningRate:
    """The learning rate as a knob (alpha = ``spread`` in [0, 1)).

    ``groups`` None: one knob ``"lr"`` scales all parameter groups together. ``"each"``: one knob per group, named
    ``"lr/<name or index>"``. A list of group names or indices: one knob for each of those, the other groups stay fixed.
    On a stock AdamW the weight decay acts at the replica's rate (lr * rho * decay), as its formula says.
    """

    spread: float = 1 / 9
    groups: str | Sequence[int | str] | None = None

    def __post_init__(self) -> None:
        check_spread(self.spread)
        wrong = isinstance(self.groups, str) and self.groups != "each"
        if wrong or not (self.groups is None or isinstance(self.groups, (str, Sequence))):
            raise ValueError(f"groups must be None, 'each' or a list of group names or indices, got {self.groups!r}")

    def bind(self, optimizer: Optimizer) -> list[GroupKnob]:
        """The knobs of this optimizer's parameter groups.

        Raises:
            ValueError: a group that does not exist.
        """
        labels = [str(group.get("name", i)) for i, group in enumerate(optimizer.param_groups)]
        if self.groups is None:
            return [GroupKnob("lr", self.spread, optimizer, "lr", list(range(len(labels))))]
        if self.groups == "each":
            return [GroupKnob(f"lr/{label}", self.spread, optimizer, "lr", [i]) for i, label in enumerate(labels)]
        chosen = []
        for group in self.groups:
            index = group if isinstance(group, int) else labels.index(group) if group in labels else -1
            if not 0 <= index < len(labels):
                raise ValueError(f"groups names {group!r}, but the optimizer has the groups {labels}")
            chosen.append(GroupKnob(f"lr/{labels[index]}", self.spread, optimizer, "lr", [index]))
        return chosen


class GroupKnob:
    """One key of some parameter groups, bound to an optimizer.

    At rest a group holds the base value: the scheduler's own times the correction. `show_schedule` shows the scheduler its own
    value before it steps, so that recursive schedulers never compound a correction; `fanned_out` multiplies by rho for the
    duration of an optimizer step. Tensor values are changed in place and never replaced.
    """

    def __init__(self, name: str, spread: float, optimizer: Optimizer, key: str, indices: list[int]) -> None:
        self.name, self.spread, self.optimizer, self.key, self.indices = name, spread, optimizer, key, indices
        self.scheduled: list[Any] = [_copy(value) for value in self._values()]
        self._factor = 1.0  # what `_base_value` is made of: the values left in the groups
        self._base: float | None = None
        peaks = [self._peak(i) for i in range(len(indices))]
        self._ratios = [peak / peaks[0] if peaks[0] > 0 else 1.0 for peak in peaks]
        self._marks = [_mark(value) for value in self._values()]

    def _groups(self) -> list[dict[str, Any]]:
        return [self.optimizer.param_groups[i] for i in self.indices]

    def _values(self) -> list[Any]:
        return [group[self.key] for group in self._groups()]

    def scheduled_value(self) -> float:
        """The untouched schedule's value, of the first group; waits for the device if it is a CUDA tensor."""
        return float(self.scheduled[0])

    def bounds(self) -> tuple[float, float]:
        """(peak, floor) of the untouched schedule, as far as torch's schedulers leave them in the group; floor 0 is unknown."""
        return self._peak(0), float(self._groups()[0].get("min_" + self.key, 0.0))

    def _peak(self, i: int) -> float:
        # Without a schedule the group holds the corrected value, so the schedule's own is what counts.
        group = self._groups()[i]
        return float(group.get("max_" + self.key, group.get("initial_" + self.key, self.scheduled[i])))

    def show_schedule(self) -> None:
        """Put the scheduler's own values back into the groups, except where somebody else has set one since."""
        for i, group in enumerate(self._groups()):
            if self._is_ours(i, group[self.key]):
                _set(group, self.key, self.scheduled[i])

    def take_schedule(self) -> None:
        """Remember what the scheduler has written."""
        self.scheduled = [_copy(value) for value in self._values()]

    def write(self, factor: float, base: float | None = None) -> None:
        """Leave the base value in the groups: scheduled * factor, or, off the schedule, ``base`` (further groups keep the ratio of their peaks)."""
        self._factor, self._base = factor, base
        for i, group in enumerate(self._groups()):
            _set(group, self.key, self._base_value(i))
        self._marks = [_mark(value) for value in self._values()]

    def _base_value(self, i: int) -> Any:
        if self._base is not None:
            return self._base * self._ratios[i]
        return self.scheduled[i] if self._factor == 1.0 else self.scheduled[i] * self._factor

    def _is_ours(self, i: int, value: Any) -> bool:
        """Is this what `write` left? Values decide, and for tensors only when the version counter has moved: reading one waits for the device."""
        return _mark(value) == self._marks[i] or (
            isinstance(value, torch.Tensor) and float(value) == float(torch.as_tensor(self._base_value(i), dtype=value.dtype))
        )

    @contextmanager
    def fanned_out(self, multiplier: float) -> Iterator[None]:
        """Inside, the groups hold base * rho; afterwards exactly what they held before, also when the step raises."""
        if multiplier == 1.0:
            yield
            return
        before = [_copy(value) for value in self._values()]
        try:
            for group, value in zip(self._groups(), before, strict=True):
                _set(group, self.key, value * multiplier)
            yield
        finally:
            for group, value in zip(self._groups(), before, strict=True):
                _set(group, self.key, value)
            self._marks = [_mark(value) for value in self._values()]


def check_disjoint(knobs: Sequence[GroupKnob], *, tensors: bool) -> None:
    """Two knobs cannot move one value. ``tensors``: also look for groups that hold the same tensor, as torch makes of a tensor rate
    that is given for all groups (harmless as long as nothing moves).

    Raises:
        ValueError: names the knobs and the way out.
    """
    owners: dict[tuple[str, int], str] = {}
    for knob in knobs:
        for index, value in zip(knob.indices, knob._values(), strict=True):
            shared = [("parameter group", index), *([("tensor", id(value))] if tensors and isinstance(value, torch.Tensor) else [])]
            for what, key in shared:
                owner = owners.setdefault((what, key), knob.name)
                if owner != knob.name:
                    raise ValueError(
                        f"the knobs {owner!r} and {knob.name!r} share one {what} {knob.key!r}: name each group once, give each group a "
                        "tensor of its own, or explore them together with LearningRate(groups=None)"
                    )


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _mark(value: Any) -> Any:
    """Tells later whether somebody has written here: a tensor's version counter needs no device, a number is its own mark."""
    return (id(value), value._version) if isinstance(value, torch.Tensor) else value


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(value, torch.Tensor) and isinstance(group[key], torch.Tensor):
        group[key].copy_(value)
    elif isinstance(group[key], torch.Tensor):
        group[key].fill_(value)
    else:
        group[key] = value
