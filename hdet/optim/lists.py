"""Looks at many tensors at once: what a step repeats for every tensor, in C++ where the native
module is there; and whether others have written to them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from hdet.kernels import native

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


class Addresses:
    """Where tensors lay when this was made."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._known = addresses(tensors)

    def same(self, tensors: list[Tensor]) -> bool:
        """Do these lie there?"""
        return addresses(tensors) == self._known


def note_addresses(tensors: list[Tensor]) -> Any:
    """Addresses, in C++ where that can be."""
    noted = (
        None
        if _NATIVE is None
        else _NATIVE.Addresses(getattr(Tensor, "__dlpack_c_exchange_api__", None), tensors)
    )
    return noted if noted is not None and noted.usable else Addresses(tensors)


def forms(tensors: Sequence[Tensor]) -> list[Any]:
    """What tensors at their addresses are: types, shapes and strides."""
    return [*map(_type_and_shape, tensors), *map(Tensor.stride, tensors)]


_type_and_shape = operator.attrgetter("dtype", "shape")


class UsualGradients:
    """Tells which lists of gradients need not be looked at: plain tensors of the shapes and types,
    and on the device, of those before."""

    def __init__(self, params: list[Tensor]) -> None:
        """`params`: as their gradients must be; None in a list of gradients is usual, too."""
        exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
        self._native = None if _NATIVE is None else _NATIVE.Gradients(Tensor, exchange, params)

    def are(self, gradients: list[Any]) -> bool:
        """False also for the first list, and without the native module."""
        if self._native is None or any(
            gradient is not None and gradient.is_neg() for gradient in gradients
        ):
            return False
        changes = self._native.read(gradients)
        return bool(changes != self._native.UNUSUAL and not changes & self._native.RETYPED)

    def forget(self) -> None:
        """The list that was asked for last is not one to compare with."""
        if self._native is not None:
            self._native.forget()
