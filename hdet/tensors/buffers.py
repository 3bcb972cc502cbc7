"""Buffers by module and name, tensors in nested values, and copies of such values.

A forward pass may put a new tensor in a buffer's place (`self.count = self.count + 1`), and
`model.double()` does. So buffers are looked up whenever they are needed.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .dtensor import is_sharded, like, local

_ATOMS = (
    int, float, str, type(None), type, ModuleType, FunctionType, MethodType, functools.partial,
    Optimizer,
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


class ObjectCopy:
    """What any other object holds at a moment: its items, its attributes, or what a pickle of it
    would. `put` writes it into the very same object; of one that cannot be written to it gives a
    copy."""

    def __init__(self, value: Any, on_host: bool, memo: dict[int, Any]) -> None:
        memo[id(value)], self._value, self._is_entered = self, value, False
        state = _state_of(value)
        self._whole = copy.deepcopy(value) if state is None else None
        self.parts = keep(state, on_host, None, memo)

    @contextmanager
    def entered(self) -> Iterator[Any]:
        """Its parts; nothing inside of itself, because objects may hold each other."""
        parts, self._is_entered = None if self._is_entered else self.parts, True
        yield parts
        self._is_entered = parts is None

    def put(self) -> Any:
        value = self._value
        if self.parts is None:
            if not getattr(getattr(value, "flags", None), "writeable", False):
                return copy.deepcopy(self._whole)
            value[...] = self._whole  # an array of numpy
        with self.entered() as parts:
            if parts is not None:
                now = _state_of(value)
                state = put(now, parts)
                if now is not getattr(value, "__dict__", None):
                    _write(getattr(value, "bit_generator", value), state)
        return value


def _state_of(value: Any) -> Any:
    """What can be written into an object; None: nothing. numpy's Generator keeps it elsewhere."""
    value = getattr(value, "bit_generator", value)
    plain: dict[Any, Any] = {dict: dict, set: frozenset, (list, deque, bytearray): list}
    for kind, make in plain.items():
        if isinstance(value, kind):
            return make(value)
    reduced = value.__reduce_ex__(4)
    if hasattr(value, "setflags") or not isinstance(reduced, tuple) or len(reduced) < 3:
        return None
    is_dict = reduced[2] is None or isinstance(reduced[2], dict)
    return vars(value) if is_dict and hasattr(value, "__dict__") else reduced[2] or ()


def _write(value: Any, state: Any) -> None:
    if hasattr(value, "clear"):
        value.clear()
        (value.extend if hasattr(value, "extend") else value.update)(state)
    elif hasattr(value, "__setstate__"):
        value.__setstate__(state)
    elif state:  # attributes and slots
        for name, held in ((state[0] or {}) | state[1]).items():
            setattr(value, name, held)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """However nested in mappings, lists and tuples, and those that copies hold."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Copy):
        yield from tensors_in(value.parts or value.values)
    elif isinstance(value, ObjectCopy):
        with value.entered() as parts:
            yield from tensors_in(parts)
    elif isinstance(value, (Mapping, list, tuple)):
        for held in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(held)


def keep(
    value: Any, on_host: bool = False, before: Any = None, memo: dict[int, Any] | None = None
) -> Any:
    """A copy of a value, whatever it is made of: `Copy` of tensors, `ObjectCopy` of objects. What
    is a handle (a lock, a process group), a module that trains, or of `_ATOMS` is as it is.

    Args:
        on_host, before: as of `Copy`.
        memo: copies of what is known already, by id.

    Raises:
        ValueError: an iterator that cannot be copied.
    """
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, torch.Tensor):
        return Copy(value, on_host, before)
    if isinstance(value, _ATOMS):
        return value
    if type(value) is dict:
        old = before if isinstance(before, dict) else {}
        return {key: keep(held, on_host, old.get(key), memo) for key, held in value.items()}
    if type(value) is list or isinstance(value, tuple):
        olds = before if _matches(before, value) else [None] * len(value)
        pairs = zip(value, olds, strict=True)
        return _made(type(value), [keep(held, on_host, old, memo) for held, old in pairs])
    if isinstance(value, nn.Module) and any(id(p) in memo for p in value.parameters()):
        return value
    try:
        return ObjectCopy(value, on_host, memo)
    except (TypeError, NotImplementedError, pickle.PicklingError) as error:
        if isinstance(value, Iterator):
            raise ValueError(
                f"a {type(value).__name__} (an iterator), which cannot be copied"
            ) from error
        memo[id(value)] = value
        return value


def _made(kind: Any, held: list[Any]) -> Any:
    """A list or tuple; a named tuple takes its fields one by one."""
    return kind(*held) if hasattr(kind, "_fields") else kind(held)


def _matches(one: Any, other: Sequence[Any]) -> bool:
    return type(one) is type(other) and len(one) == len(other)


def put(current: Any, kept: Any) -> Any:
    """What is to stand where ``current`` does, so that it is what was kept: in place, as far as
    there are tensors, dicts, lists and objects for it."""
    if isinstance(kept, Copy):
        return kept.put(current)
    if isinstance(kept, ObjectCopy):
        return kept.put()
    if type(kept) is dict:
        values = current if isinstance(current, dict) else {}
        for key in values.keys() - kept.keys():
            del values[key]
        values.update({key: put(values.get(key), held) for key, held in kept.items()})
        return values
    if type(kept) is list or isinstance(kept, tuple):
        olds = current if _matches(current, kept) else [None] * len(kept)
        made = [put(old, held) for old, held in zip(olds, kept, strict=True)]
        if type(current) is list and type(kept) is list:
            current[:] = made
            return current
        return _made(type(kept), made)
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
        before = self._kept or {}
        self._kept = {
            (module, name): keep(buffer, self._on_host, before.get((module, name)))
            for module, name, buffer in places(self._model)
        }

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
