"""Which parameter groups a knob moves, and how its own arguments are checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from ..core.scale import Scale

__all__ = ["Bounds", "Groups", "check_groups", "choose", "require_key", "scale_of"]

Groups = str | Sequence[int | str] | None
"""None: all groups as one knob. "each": one knob per group. A list of names or indices: one knob for each of those."""

Bounds = tuple[float, float] | None
"""(low, high), hard for the base value and for every replica's; None: none."""


def check_groups(groups: object) -> None:
    listed = isinstance(groups, Sequence) and not isinstance(groups, str) and len(groups) > 0
    if not (listed or groups is None or groups == "each"):
        raise ValueError(f"groups must be None, 'each' or a list of group names or indices, which is not empty, got {groups!r}")


def scale_of(bounds: Bounds, kind: str = "log", unit: float = 1.0) -> Scale:
    """Raises ValueError for bounds that are none."""
    if bounds is None:
        return Scale(kind, unit)
    if not isinstance(bounds, Sequence) or len(bounds) != 2:
        raise ValueError(f"bounds must be (low, high) or None, got {bounds!r}")
    return Scale(kind, unit, *bounds)


def choose(
    optimizer: Optimizer, groups: Groups, name: str, usable: Callable[[dict[str, Any]], bool] = lambda group: True, remedy: str = ""
) -> list[tuple[str, list[int]]]:
    """(name of the knob, indices of its groups). Of None and "each" only the usable groups.

    Raises:
        ValueError: a group that does not exist or cannot be used, or none at all that can.
    """
    labels = [str(group.get("name", i)) for i, group in enumerate(optimizer.param_groups)]
    able = [i for i, group in enumerate(optimizer.param_groups) if usable(group)]
    if not able:
        raise ValueError(f"no parameter group has a {name} to explore: {remedy}")
    if groups is None:
        return [(name, able)]
    if groups == "each":
        return [(f"{name}/{labels[i]}", [i]) for i in able]
    chosen = []
    for group in groups:
        index = group if isinstance(group, int) else labels.index(group) if group in labels else -1
        if not 0 <= index < len(labels):
            raise ValueError(f"groups names {group!r}, but the optimizer has the groups {labels}")
        if index not in able:
            raise ValueError(f"groups names {group!r}, which has no {name} to explore: {remedy}")
        chosen.append((f"{name}/{labels[index]}", [index]))
    return chosen


def require_key(optimizer: Optimizer, key: str, knob: str) -> None:
    """Raises ValueError for an optimizer whose groups have no such hyperparameter."""
    if any(key not in group for group in optimizer.param_groups):
        raise ValueError(f"{knob}: the parameter groups of {type(optimizer).__name__} have no {key!r}: leave the knob out")
