"""Replicas on one line: what is stored is a base and one displacement, and replica k is at scale *
base - rho_k * displacement.

Between steps every replica's parameter is that point, rounded once to the parameter's dtype. So
whether somebody else has written to one of them can be told from the values alone, also in a state
that was loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .lists import VersionWatch
from .state import state_sets

Lines = Iterable[tuple[Tensor, dict[str, Any]]]
"""parameters, and their states with the keys of state.LINE_KEYS"""


def at(state: Mapping[str, Any], rho: float) -> Tensor:
    """The float32 value at that multiplier, with the roundings of the kernels (csrc/core/rules.h:
    take_step)."""
    base, displacement = state["base"], state["displacement"]
    point: Tensor = base * state["scale"].to(base.device, torch.float32) - displacement * rho
    return point


def meet(param: Tensor, state: dict[str, Any], value: Tensor) -> None:
    """All replicas are at `value`, float32, which becomes the base."""
    state["base"].copy_(value)
    state["displacement"].zero_()
    state["scale"].fill_(1.0)
    for tensor in state_sets(state, param):
        tensor.copy_(state["base"])


def _alike(one: Tensor, other: Tensor) -> Tensor:
    return ((one == other) | (one.isnan() & other.isnan())).all()


class LineWatch(VersionWatch):
    """Notices what others write to replicas on a line.

    What all replicas have been given alike is taken over into the base. Anything else would take
    them off their line, and is refused.
    """

    def __init__(self, lines: Lines, rho_of: Callable[[Tensor], Sequence[float]]) -> None:
        """`rho_of`: the multipliers of a parameter, one for each replica."""
        self.lines, self._rho_of = list(lines), rho_of
        super().__init__(
            list(chain.from_iterable(state_sets(state, param) for param, state in self.lines))
        )

    def check(self) -> None:
        """Raises ValueError, before anything is changed, if replicas have left their line."""
        if self.written():
            take_over(self.lines, self._rho_of)
            self.refresh()


def take_over(
    lines: Lines, rho_of: Callable[[Tensor], Sequence[float]], exactly: bool = False
) -> None:
    """Replicas that were given the same values are together there.

    An element that is the base, rounded, stays it, unless `exactly`. Replicas that are apart on
    their line stay where they are.

    Waits for the device. Raises ValueError, before anything is changed, for replicas that differ
    and are not on their line.
    """
    lines = list(lines)
    flags = []
    for param, state in lines:
        sets = state_sets(state, param)
        on_line = [
            _alike(at(state, rho).to(own.dtype), own)
            for own, rho in zip(sets, rho_of(param), strict=True)
        ]
        flags.append(
            torch.stack(
                (
                    torch.stack(on_line).all(),
                    torch.stack([_alike(own, param) for own in sets]).all(),
                )
            )
        )
    read = torch.stack([pair.to(flags[0].device) for pair in flags]).tolist() if flags else []
    moved = []
    for (param, state), (fits, together) in zip(lines, read, strict=True):
        if fits and not (exactly and together):
            continue
        if not together:
            raise ValueError(
                f"the replicas of a parameter of shape {tuple(param.shape)} are not where steps "
                "and multipliers have put them: with "
                'storage="displacement" they are points of one line. Write the same values to all '
                "of them (ensemble.converge(), then load), "
                'give the optimizer the multipliers of its state, or use storage="parameters"'
            )
        moved.append((param, state))
    for param, state in moved:
        value, base = param.detach().to(torch.float32), state["base"]
        meet(
            param,
            state,
            value if exactly else torch.where(base.to(param.dtype) == param, base, value),
        )
