"""Cells: the places where a value lives. A knob moves one or several of them alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

__all__ = ["AttributeCell", "BetaCell", "CallCell", "Cell", "GroupCell", "ItemCell", "content", "put"]


class Cell(Protocol):
    """A value that can be read and written. Tensors (0-d) are written in place and never replaced."""

    @property
    def place(self) -> tuple[str, Hashable]:
        """What it is, for messages, and which: equal for two cells that are one."""
        ...

    def get(self) -> Any: ...

    def set(self, value: Any) -> None: ...


def content(value: Any) -> Any:
    """What it is now, whatever is written to it later."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def put(old: Any, value: Any) -> Any:
    """What is to stand in the place of ``old``: itself with other content if it is a tensor."""
    if not isinstance(old, torch.Tensor):
        return float(value) if isinstance(value, torch.Tensor) else value
    return old.copy_(value) if isinstance(value, torch.Tensor) else old.fill_(value)


@dataclass(frozen=True)
class GroupCell:
    """One key of a parameter group, by its number, because loading a state replaces the dict."""

    optimizer: Optimizer
    index: int
    key: str

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[self.index]

    @property
    def place(self) -> tuple[str, Hashable]:
        return "parameter group", (self.index, self.key)

    def get(self) -> Any:
        return self.group[self.key]

    def set(self, value: Any) -> None:
        self.group[self.key] = put(self.group[self.key], value)


@dataclass(frozen=True)
class BetaCell(GroupCell):
    """One entry of a group's tuple ``betas``."""

    which: int

    @property
    def place(self) -> tuple[str, Hashable]:
        return "parameter group", (self.index, self.key, self.which)

    def get(self) -> Any:
        return self.group[self.key][self.which]

    def set(self, value: Any) -> None:
        betas = list(self.group[self.key])
        betas[self.which] = put(betas[self.which], value)
        self.group[self.key] = type(self.group[self.key])(betas)


@dataclass(frozen=True)
class AttributeCell:
    """An attribute of an object, such as a module's ``p``."""

    owner: Any
    name: str

    @property
    def place(self) -> tuple[str, Hashable]:
        return f"{type(self.owner).__name__}.{self.name}", id(self.owner)

    def get(self) -> Any:
        return getattr(self.owner, self.name)

    def set(self, value: Any) -> None:
        old = self.get()
        if isinstance(old, torch.Tensor):
            put(old, value)
        elif old != value:
            setattr(self.owner, self.name, value)


@dataclass(frozen=True)
class ItemCell:
    """An item of a dict, such as one task's weight."""

    owner: MutableMapping[Any, Any]
    key: Any

    @property
    def place(self) -> tuple[str, Hashable]:
        return f"item {self.key!r} of a dict", (id(self.owner), self.key)

    def get(self) -> Any:
        return self.owner[self.key]

    def set(self, value: Any) -> None:
        self.owner[self.key] = put(self.owner[self.key], value)


class CallCell:
    """A user's getter and setter; the setter is called for a new value only."""

    def __init__(self, get: Callable[[], Any], set: Callable[[Any], object]) -> None:
        self._get, self._set = get, set

    @property
    def place(self) -> tuple[str, Hashable]:
        return "getter", id(self._get)

    def get(self) -> Any:
        return float(self._get())

    def set(self, value: Any) -> None:
        if self.get() != value:
            self._set(value)
