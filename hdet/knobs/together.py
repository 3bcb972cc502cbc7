"""Several knobs in one run: bound, paired, and not in each other's way."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch.optim import Optimizer

from .bound import Bound, GroupKnob, Knob, ProductKnob

__all__ = ["bind_all", "check_disjoint"]


def bind_all(knobs: Sequence[Knob], optimizer: Optimizer) -> list[Bound]:
    """All knobs of a run: rates first, because what is explored as a product with them is written after them.

    Raises:
        ValueError: a knob that cannot be bound, or a product without a rate.
    """
    bound = sorted((one for knob in knobs for one in knob.bind(optimizer)), key=lambda one: one.key != "lr")
    rates = {
        index: (one, i) for one in bound if isinstance(one, GroupKnob) and one.key == "lr" for i, index in enumerate(one.indices)
    }  # fmt: skip
    for one in bound:
        if isinstance(one, ProductKnob):
            if not any(index in rates for index in one.indices):
                raise ValueError(
                    f"{one.name} is to be explored as rate x decay, but no knob moves the rate of its groups: add a LearningRate, or leave "
                    "product=True out"
                )
            one.rates = rates
    return bound


def check_disjoint(knobs: Sequence[Bound], *, tensors: bool) -> None:
    """Two knobs cannot move one value. ``tensors``: also look for groups that hold the same tensor, as torch makes of a tensor rate
    that is given for all groups (harmless as long as nothing moves).

    Raises:
        ValueError: names the knobs and the way out.
    """
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
                        f"the knobs {owner!r} and {knob.name!r} share one {place[0]} {knob.key!r}: name each group once, give each group a "
                        "tensor of its own, or explore them together with groups=None"
                        if knob.key
                        else f"the knobs {owner!r} and {knob.name!r} share one {place[0]}: leave one of them out"
                    )
