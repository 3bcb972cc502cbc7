"""Cells: the places where a value lives. A knob moves one or several of them alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = [
    "Cell", "attribute_cell", "call_cell", "close", "content", "group_cell", "item_cell", "put",
]  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A value that can be read and written.

    Tensors (0-d) are written in place and never replaced.
    """

    place: tuple[str, Hashable]
    """What it is, for messages, and which one: equal for two cells that are one."""
    get: Callable[[], Any]
    set: Callable[[Any], object]


def content(value: Any) -> Any:
    """A copy of the value, which later writes do not change."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def put(old: Any, value: Any) -> Any:
    """What is to stand in the place of ``old``: itself with other content if it is a tensor."""
    if not isinstance(old, torch.Tensor):
        return float(value) if isinstance(value, torch.Tensor) else value
    return old.copy_(value) if isinstance(value, torch.Tensor) else old.fill_(value)


def close(value: Any, expected: Any) -> bool:
    """Equal but for some ulps of the coarser format: the same arithmetic may run on another
    device's numbers. Waits for the device."""
    kinds = [
        x.dtype if isinstance(x, torch.Tensor) and x.is_floating_point() else torch.float64
        for x in (value, expected)
    ]
    rounding = max(torch.finfo(kind).eps for kind in kinds)
    return abs(float(value) - float(expected)) <= 8 * rounding * abs(float(expected))


def group_cell(optimizer: Optimizer, index: int, key: str, entry: int | None = None) -> Cell:
    """One key of a parameter group; ``entry``: of a tuple there, such as ``betas``.

    Groups are found by number: loading a state replaces the dicts.
    """

    def get() -> Any:
        value = optimizer.param_groups[index][key]
        return value if entry is None else value[entry]

    def set_(value: Any) -> None:
        group = optimizer.param_groups[index]
        if entry is None:
            group[key] = put(group[key], value)
        else:
            values = list(group[key])
            values[entry] = put(values[entry], value)
            group[key] = type(group[key])(values)

    return Cell(("parameter group", (index, key, entry)), get, set_)


def attribute_cell(owner: Any, name: str) -> Cell:
    """An attribute of an object, such as a module's ``p``; set for a new value only."""

    def set_(value: Any) -> None:
        old = getattr(owner, name)
        if isinstance(old, torch.Tensor):
            put(old, value)
        elif old != value:
            setattr(owner, name, value)

    return Cell((f"{type(owner).__name__}.{name}", id(owner)), lambda: getattr(owner, name), set_)


def item_cell(owner: MutableMapping[Any, Any], key: Any) -> Cell:
    """An item of a dict, such as one task's weight."""

    def set_(value: Any) -> None:
        owner[key] = put(owner[key], value)

    return Cell((f"item {key!r} of a dict", (id(owner), key)), lambda: owner[key], set_)


def call_cell(get: Callable[[], Any], set_: Callable[[Any], object]) -> Cell:
    """A user's getter and setter; the setter is called for a new value only."""

    def set_new(value: Any) -> None:
        if float(get()) != value:
            set_(value)

    return Cell(("getter", id(get)), lambda: float(get()), set_new)
