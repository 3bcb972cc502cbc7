"""Buffers by module and name, tensors in nested values, and copies of such values.

A forward pass may put a new tensor in a buffer's place (`self.count = self.count + 1`), and
`model.double()` does. So buffers are looked up whenever they are needed.
"""

from __future__ import annotations

import copy
import copyreg
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from logging import Logger
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .dtensor import is_sharded, like, local

_ATOMS = (
    int, float, str, type(None), type, ModuleType, FunctionType, MethodType, partial, Logger,
)  # fmt: skip
"""They cannot change, or are no data: a copy holds them as they are."""


def places(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor | None]]:
    """(module, name, tensor) of every buffer there is now; of one that has none yet, None."""
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            yield module, name, buffer


class ReplicaTensors(Sequence[torch.Tensor]):
    """The tensors that are averaged: parameters, then buffers.

    Looked up whenever they are asked for, so it is not to be copied into a list.

    Args:
        parameters: the optimizer's.
        listed: buffers that are given as tensors. They stay the same ones.
        model: all buffers that it has at the time and that have an average.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        listed: Sequence[torch.Tensor] = (),
        model: nn.Module | None = None,
    ) -> None:
        self.parameters, self.model = list(parameters), model
        self.fixed = [*parameters, *listed]
        """All but the model's buffers."""

    @property
    def buffers(self) -> list[torch.Tensor]:
        listed, own = self.fixed[len(self.parameters) :], self._of_model()
        # Wide enough for arithmetic: weights in 8 bits are quantised, and stand still.
        return [*listed, *(b for b in own if b.is_floating_point() and b.element_size() > 1)]

    def _of_model(self) -> list[torch.Tensor]:
        return [] if self.model is None else list(self.model.buffers())

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self.parameters
        yield from self.buffers

    def __len__(self) -> int:
        return len(self.parameters) + len(self.buffers)

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def marks(self) -> list[tuple[torch.Tensor, int]]:
        """The buffers and their versions: for `unwritten`. All of a model's: BatchNorm counts its
        batches in place, and writes its running statistics without raising their version."""
        buffers = [*self.buffers, *self._of_model()]
        return [(b, 0 if b.is_inference() else b._version) for b in buffers]

    def unwritten(self, marks: Sequence[tuple[torch.Tensor, int]]) -> bool:
        """Are the buffers those of then, and has nobody written to them? (Without looking at
        them.)"""
        now = self.marks()
        return len(now) == len(marks) and all(
            a is b and x == y for (a, x), (b, y) in zip(now, marks, strict=True)
        )


def averages_in(model: nn.Module, trained: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Parameters of a model that have no gradient and may be averages of those that are trained,
    such as a teacher's: of each shape at most twice as many. More are a frozen backbone, which does
    not move, and is large."""
    known = set(map(id, trained))
    others = [p for p in model.parameters() if id(p) not in known and p.grad is None]
    of_trained, of_others = (Counter(t.shape for t in group) for group in (trained, others))
    return [p for p in others if of_others[p.shape] <= 2 * of_trained[p.shape]]


class Copy:
    """A tensor's values at a moment; of a DTensor those of this rank's shard.

    Args:
        on_host: in the host's memory, pinned for CUDA; else on the tensor's device.
        before: an earlier one, whose memory may be used.
    """

    def __init__(self, tensor: torch.Tensor, on_host: bool = False, before: Any = None) -> None:
        own, before = local(tensor), before if isinstance(before, Copy) else None
        self.device, self._layout = own.device, tensor if is_sharded(tensor) else None
        self.parts: dict[str, Copy] = {}
        """Of a tensor that is made of others (codes and scales), which need not know how to copy
        itself: copies of those."""
        if is_traceable_wrapper_subclass(own):
            olds = before.parts if before else {}
            names, context = own.__tensor_flatten__()
            self.parts = {n: Copy(getattr(own, n), on_host, olds.get(n)) for n in names}
            self._made_of: Any = type(own), context, own.size(), own.stride()
            return
        own = own.detach()
        room = before.values if before and not before.parts else None
        target = torch.device("cpu") if on_host else own.device
        now = (own.shape, own.dtype, target)
        if room is None or (room.shape, room.dtype, room.device) != now:
            # As it lies: a new tensor made of codes of 8 bits has to, whose blocks are neighbours.
            room = torch.empty_like(own, device=target, pin_memory=on_host and own.is_cuda)
        self.values: torch.Tensor = room
        self.values.copy_(own, non_blocking=True)

    def put(self, current: Any) -> Any:
        """Into ``current``, in place, if it has this shape; else, and in place of None, into a new
        tensor. Returns which it was."""
        own: Any = local(current) if isinstance(current, torch.Tensor) else None
        if self.parts:
            kind, context, *form = self._made_of
            olds = {n: getattr(own, n) if type(own) is kind else None for n in self.parts}
            news = {name: part.put(olds[name]) for name, part in self.parts.items()}
            if all(new is olds[name] for name, new in news.items()):
                return current
            made = kind.__tensor_unflatten__(news, context, *form)
        elif own is not None and own.shape == self.values.shape:
            own.detach().copy_(self.values, non_blocking=True)
            return current
        else:
            made = self.values.to(self.device, copy=True)
        return made if self._layout is None else like(made, self._layout)


class Contents:
    """What objects hold at a moment, however they hold each other: items, attributes, tensors,
    random states. `put_back` writes it into the very same objects.

    Args:
        on_host: as of `Copy`.
        seen: by id what is left as it is; what is visited is added.
        has_data: (object) -> bool: are its attributes data? Default: not an optimizer's, nor a
            module's with a parameter in ``seen``.
        copies: copy the tensors, too.

    Raises:
        ValueError: an iterator, whose place nobody can read.
    """

    def __init__(
        self,
        value: Any,
        on_host: bool = False,
        seen: dict[int, Any] | None = None,
        has_data: Callable[[Any], object] | None = None,
        copies: bool = True,
    ) -> None:
        self.value = value
        self._seen: dict[int, Any] = {} if seen is None else seen
        self._has_data = has_data
        self.writes: list[Callable[[], object]] = []
        """One for each object."""
        self.tensors: list[torch.Tensor] = []
        self._visit(value)
        self.copies = [Copy(tensor, on_host) for tensor in self.tensors if copies]

    def put_back(self) -> Any:
        for write in self.writes:
            write()
        for kept, tensor in zip(self.copies, self.tensors, strict=False):
            kept.put(tensor)
        return self.value

    def _is_own(self, value: Any) -> bool:
        tensors = value.parameters() if isinstance(value, nn.Module) else ()
        return not isinstance(value, Optimizer) and not any(id(t) in self._seen for t in tensors)

    def _visit(self, value: Any) -> None:
        if id(value) in self._seen or isinstance(value, _ATOMS):
            return
        self._seen[id(value)] = value
        inside: Iterable[Any] = ()
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, (dict, list, set, deque, bytearray)):
            inside = copy.copy(value)
            self.writes.append(partial(refill, value, inside))
        elif write := _writer(value):
            self.writes.append(write)
        elif isinstance(value, tuple):
            inside = value
        elif (self._has_data or self._is_own)(value):
            names = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
            slots = {name: getattr(value, name) for name in names if hasattr(value, name)}
            self.writes += [partial(object.__setattr__, value, *slot) for slot in slots.items()]
            inside = [getattr(value, "__dict__", None), *slots.values()]
            if isinstance(value, Iterator) and inside == [None]:
                raise ValueError(f"a {type(value).__name__} (an iterator), which cannot be copied")
        for held in inside.values() if isinstance(inside, dict) else inside:
            self._visit(held)


def refill(container: Any, held: Any) -> None:
    """What a dict, list, set or deque holds becomes what ``held`` does."""
    container.clear()
    (container.update if hasattr(container, "update") else container.extend)(held)


def _writer(value: Any) -> Callable[[], object] | None:
    """Writes back what a generator of random numbers or an array of numpy holds now."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return partial(value.setstate, value.getstate())
    source = getattr(value, "bit_generator", getattr(value, "_bit_generator", value))
    if type(source).__module__.startswith("numpy.random._"):
        return partial(setattr, source, "state", source.state)
    if hasattr(value, "setflags") and value.flags.writeable:
        return partial(value.__setitem__, ..., value.copy())
    return None


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """However nested in mappings, lists and tuples, and those that copies hold."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Copy):
        yield from tensors_in(value.parts or value.values)
    elif isinstance(value, Contents):
        yield from tensors_in(value.copies)
    elif isinstance(value, (Mapping, list, tuple)):
        for held in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(held)


def keep(
    value: Any, on_host: bool = False, before: Any = None, seen: dict[int, Any] | None = None
) -> Any:
    """A copy of a value, whatever it is made of: `Copy` of tensors, `Contents` of objects.

    Args:
        on_host, before: as of `Copy`.
        seen: by id what is left as it is.

    Raises:
        ValueError: as `Contents`.
    """
    seen = {} if seen is None else seen
    if id(value) in seen or isinstance(value, _ATOMS):
        return value
    if isinstance(value, torch.Tensor):
        return Copy(value, on_host, before)
    if type(value) is dict:
        old = before if isinstance(before, dict) else {}
        return {key: keep(held, on_host, old.get(key), seen) for key, held in value.items()}
    if type(value) is list:
        olds = before if _matches(before, value) else [None] * len(value)
        return [keep(held, on_host, old, seen) for held, old in zip(value, olds, strict=True)]
    return Contents(value, on_host, seen)


def _matches(one: Any, other: Sequence[Any]) -> bool:
    return type(one) is type(other) and len(one) == len(other)


def put(current: Any, kept: Any) -> Any:
    """What is to stand where ``current`` does, so that it is what was kept: in place, as far as
    there are tensors, dicts, lists and objects for it."""
    if isinstance(kept, Copy):
        return kept.put(current)
    if isinstance(kept, Contents):
        return kept.put_back()
    if type(kept) is dict:
        values = current if isinstance(current, dict) else {}
        for key in values.keys() - kept.keys():
            del values[key]
        values.update({key: put(values.get(key), held) for key, held in kept.items()})
        return values
    if type(kept) is list:
        olds = current if _matches(current, kept) else [None] * len(kept)
        made = [put(old, held) for old, held in zip(olds, kept, strict=True)]
        if type(current) is not list:
            return made
        current[:] = made
        return current
    return kept


class BufferCopies:
    """All buffers of a model at a moment, counters included, by module and name.

    Memory: as much as they have.
    """

    def __init__(self, model: nn.Module, on_host: bool = False) -> None:
        self._model, self._on_host = model, on_host
        self._kept: dict[tuple[nn.Module, str], Any] | None = None

    @property
    def copies(self) -> list[Any]:
        """What has been taken, a `Copy` or None each."""
        return list((self._kept or {}).values())

    @torch.no_grad()
    def take(self) -> None:
        now = {(module, name): buffer for module, name, buffer in places(self._model)}
        self._kept = keep(now, self._on_host, self._kept)

    @torch.no_grad()
    def put_back(self, keep_new: bool = False) -> None:
        """In place, whatever tensor is in a buffer's place by now.

        Buffers that were not there are gone, or with ``keep_new`` left alone.
        """
        assert self._kept is not None, "take comes first"
        for module, name, buffer in places(self._model):
            if (module, name) in self._kept:
                module._buffers[name] = put(buffer, self._kept[module, name])
            elif not keep_new:
                del module._buffers[name]
