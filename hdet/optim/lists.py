"""What a step repeats for every tensor, in C++ (csrc/tensors.h) where the native module is there
and knows this torch."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hdet.kernels import native
from hdet.kernels.checks import check_gradients
from hdet.kernels.step import gradient_reader

Gradients = Sequence[Tensor | None]


def same(one: Sequence[object], other: Sequence[object]) -> bool:
    """Are these the same objects?"""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def gradients(params: list[Tensor]) -> Gradients:
    """`.grad` of each, None where there is none: a list, or what holds them without an object for
    each in Python."""
    if native.torch_interface is not None:
        held: Any = native._C.hold_gradients(native.torch_interface, params)
        if held is not None:
            return held
    return [param.grad for param in params]


def absent(gradients: Gradients) -> list[int]:
    """The places of None."""
    if isinstance(gradients, list):
        return [i for i, item in enumerate(gradients) if item is None]
    held: Any = gradients
    return held.absent()


def chosen(gradients: Gradients, places: list[int]) -> Gradients:
    if len(places) == len(gradients):
        return gradients
    if isinstance(gradients, list):
        return [gradients[i] for i in places]
    held: Any = gradients
    return held.choose(places)


def bump_versions(tensors: list[Tensor]) -> None:
    """What a backward pass has saved of them is no longer valid."""
    if native.torch_interface is None:
        torch.autograd.graph.increment_version(tensors)
    else:
        native._C.bump_versions(native.torch_interface, tensors)


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def objects_in(nested: Any) -> Iterator[Any]:
    if isinstance(nested, list):
        for item in nested:
            yield from objects_in(item)
        return
    yield nested
    if isinstance(nested, dict):
        for key, value in nested.items():
            yield key
            yield from objects_in(value)


class NotedObjects:
    """What nested lists and dictionaries had in them when this was made, and where those that are
    tensors lay, with their types, shapes and strides."""

    def __init__(self, nested: list[Any]) -> None:
        self._objects = list(objects_in(nested))
        tensors = {id(x): x for x in self._objects if _has_memory(x)}
        self._tensors = list(tensors.values())
        # a key is a parameter as well: once is enough
        counts = [tensors.pop(id(x), None) is not None for x in self._objects]
        self._native = None
        if native.torch_interface is not None:
            self._native = native._C.NotedObjects(native.torch_interface, self._objects, counts)
        else:
            self._memory = _described(self._tensors)

    def same(self, nested: list[Any]) -> bool:
        """Are they as they were?"""
        if self._native is not None:
            return self._native.same(nested)
        objects = list(objects_in(nested))
        return same(objects, self._objects) and _described(self._tensors) == self._memory


def _has_memory(x: object) -> bool:
    if not isinstance(x, Tensor) or is_traceable_wrapper_subclass(x):
        return False
    return x.layout == torch.strided


def _described(tensors: Sequence[Tensor]) -> list[Any]:
    return [*addresses(tensors), *map(_type_and_shape, tensors), *map(Tensor.stride, tensors)]


_type_and_shape = operator.attrgetter("dtype", "shape")


class GradientCheck:
    """Refuses gradients that no step can use. Those of the shapes and types, and on the device, of
    the ones before are not looked at: the native module tells."""

    def __init__(self, params: list[Tensor], numbers: Sequence[int]) -> None:
        """`params`: as their gradients must be, which may be None. `numbers`: in messages."""
        self._params, self._numbers = params, numbers
        self._reader = gradient_reader(params)

    def __call__(self, gradients: Gradients) -> None:
        """Raises ValueError or TypeError."""
        changes = self._reader.read(gradients)
        if changes != self._reader.UNUSUAL and not changes & self._reader.RETYPED:
            return
        try:
            check_gradients(gradients, self._params, self._numbers)
        except (TypeError, ValueError):
            self._reader.forget()  # these are none to compare with
            raise
