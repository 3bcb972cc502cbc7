"""Looks at many tensors at once: what a step repeats for every tensor, in C++ where the native module is there; and whether others have
written to them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hdet.kernels import native

_NATIVE: Any = native._C if native.missing is None else None

version: Callable[[Tensor], int] = operator.attrgetter("_version")


def _same(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _gradients(params: Sequence[Tensor]) -> list[Tensor | None]:
    return [param.grad for param in params]


def _same_items(dicts: Sequence[dict[str, Any]], key: str, items: Sequence[object]) -> bool:
    return len(dicts) == len(items) and all(entry.get(key) is item for entry, item in zip(dicts, items, strict=True))


same: Callable[[list[Any], list[Any]], bool] = getattr(_NATIVE, "same", _same)
"""Are these two lists of the same objects?"""

gradients: Callable[[list[Tensor]], list[Tensor | None]] = getattr(_NATIVE, "gradients", _gradients)
"""`.grad` of each, None where there is none"""

same_items: Callable[[list[dict[str, Any]], str, list[Any]], bool] = getattr(_NATIVE, "same_items", _same_items)
"""Does each dictionary hold this very object under the key?"""


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


class VersionWatch:
    """Notices in-place changes by others to some tensors.

    Every write under autograd's eyes counts up the version of its tensor, also load_state_dict of a model. Versions only grow, so
    their sum tells. A write through `.data` or by a foreign kernel is not seen.
    """

    def __init__(self, params: Sequence[Tensor], per_step: int) -> None:
        """`per_step`: by how much a step of our own counts their versions up."""
        self.params, self.per_step = params, per_step
        self.sum = -1  # nothing is known yet

    def refresh(self) -> None:
        """What has been written up to now is known."""
        self.sum = sum(map(version, self.params))

    def written(self) -> bool:
        """Has anything been written that is not known?"""
        return sum(map(version, self.params)) != self.sum

    def wrote(self) -> None:
        """Our own step has counted up the versions of what it writes to by one."""
        self.sum += self.per_step

    def check(self) -> None:
        """Takes over what others have written, or refuses it. Before each step."""
        raise NotImplementedError
