"""Looks at many tensors at once: what a step repeats for every tensor, in C++ where the native
module is there; and whether others have written to them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from hdet.kernels import native
from hdet.kernels.checks import check_gradients

_NATIVE: Any = native._C if native.missing is None else None


def _same(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _gradients(params: Sequence[Tensor]) -> list[Tensor | None]:
    return [param.grad for param in params]


def _absent(items: Sequence[object]) -> list[int]:
    return [i for i, item in enumerate(items) if item is None]


def _contents(outer: Mapping[Any, Any]) -> list[Any]:
    found: list[Any] = []
    for key, value in outer.items():
        found += (key, value)
        if isinstance(value, dict):
            found += chain.from_iterable(value.items())
    return found


def _same_contents(outer: Mapping[Any, Any], known: list[Any]) -> bool:
    return _same(_contents(outer), known)


same: Callable[[list[Any], list[Any]], bool] = getattr(_NATIVE, "same", _same)
"""Are these two lists of the same objects?"""

gradients: Callable[[list[Tensor]], list[Tensor | None]] = getattr(_NATIVE, "gradients", _gradients)
"""`.grad` of each, None where there is none"""

absent: Callable[[list[Any]], list[int]] = getattr(_NATIVE, "absent", _absent)
"""the places of None"""

contents: Callable[[dict[Any, Any]], list[Any]] = getattr(_NATIVE, "contents", _contents)
"""all keys and values of a dictionary, and of the dictionaries in it"""

same_contents: Callable[[dict[Any, Any], list[Any]], bool] = getattr(
    _NATIVE, "same_contents", _same_contents
)
"""Would `contents` be a list of these objects?"""


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


class NotedMemory:
    """Where tensors lay when this was made, and their types, shapes and strides."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._known = _described(tensors)

    def same(self, tensors: list[Tensor]) -> bool:
        """Is it as it was?"""
        return _described(tensors) == self._known


def _described(tensors: Sequence[Tensor]) -> list[Any]:
    return [*addresses(tensors), *map(_type_and_shape, tensors), *map(Tensor.stride, tensors)]


_type_and_shape = operator.attrgetter("dtype", "shape")


def note_memory(tensors: list[Tensor]) -> Any:
    """NotedMemory, in C++ where that can be."""
    torch = native.torch_interface
    is_ours = torch is None or _NATIVE is None
    return NotedMemory(tensors) if is_ours else _NATIVE.NotedMemory(torch, tensors)


class GradientCheck:
    """Refuses gradients that no step can use. A list of plain tensors of the shapes and types, and
    on the device, of the list before is not looked at: the native module tells."""

    def __init__(self, params: list[Tensor]) -> None:
        """`params`: as their gradients must be, which may be None."""
        self._params = params
        torch = native.torch_interface
        is_ours = torch is None or _NATIVE is None
        self._native = None if is_ours else _NATIVE.Gradients(Tensor, torch, params)

    def __call__(self, gradients: list[Any]) -> None:
        """Raises ValueError or TypeError."""
        native = self._native
        if native is not None and not any(g is not None and g.is_neg() for g in gradients):
            changes = native.read(gradients)
            if changes != native.UNUSUAL and not changes & native.RETYPED:
                return
        try:
            check_gradients(gradients, self._params)
        except (TypeError, ValueError):
            if native is not None:
                native.forget()  # this list is none to compare with
            raise
