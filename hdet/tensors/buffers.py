"""Buffers by module and name, tensors in nested values, and copies of them.

A forward pass may put a new tensor in a buffer's place (`self.count = self.count + 1`), and
`model.double()` does. So buffers are looked up whenever they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .dtensor import is_sharded, like, local, local_parts


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


class Copy:
    """A tensor's values at a moment; of a DTensor those of this rank's shard.

    Args:
        on_host: in the host's memory, pinned for CUDA; else on the tensor's device.
        before: an earlier one, whose memory may be used.
    """

    def __init__(self, tensor: torch.Tensor, on_host: bool = False, before: Any = None) -> None:
        own = local_parts([tensor])[0]
        self.device, self._layout = own.device, tensor if is_sharded(tensor) else None
        room = before.values if isinstance(before, Copy) else None
        target = torch.device("cpu") if on_host else own.device
        now = (own.shape, own.dtype, target)
        if room is None or (room.shape, room.dtype, room.device) != now:
            # As it lies: a new tensor made of codes of 8 bits has to, whose blocks are neighbours.
            if type(own) is torch.Tensor:
                room = torch.empty_like(own, device=target, pin_memory=on_host and own.is_cuda)
            else:  # a subclass knows how to copy itself, and may have no empty_like
                room = own.clone() if target == own.device else own.to(target, copy=True)
        self.values: torch.Tensor = room
        self.values.copy_(own, non_blocking=True)

    def put(self, current: Any) -> torch.Tensor:
        """Into ``current``, in place, if it has this shape; else, and in place of None, into a new
        tensor. Returns which it was."""
        if isinstance(current, torch.Tensor) and local(current).shape == self.values.shape:
            local_parts([current])[0].copy_(self.values, non_blocking=True)
            return current
        made = self.values.to(self.device, copy=True)
        return made if self._layout is None else like(made, self._layout)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """However nested in mappings, lists and tuples, and those that copies hold."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Copy):
        yield value.values
    elif isinstance(value, (Mapping, list, tuple)):
        for held in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(held)


def keep(value: Any, on_host: bool = False, before: Any = None) -> Any:
    """A copy of the tensors in a value, however nested in dicts, lists and tuples; what else there
    is, as it is. ``before``: as of `Copy`."""
    if isinstance(value, torch.Tensor):
        return Copy(value, on_host, before)
    if isinstance(value, dict):
        old = before if isinstance(before, dict) else {}
        return {key: keep(held, on_host, old.get(key)) for key, held in value.items()}
    if type(value) in (list, tuple):
        olds = before if _matches(before, value) else [None] * len(value)
        return type(value)(keep(held, on_host, old) for held, old in zip(value, olds, strict=True))
    return value


def _matches(one: Any, other: Sequence[Any]) -> bool:
    return type(one) is type(other) and len(one) == len(other)


def put(current: Any, kept: Any) -> Any:
    """What is to stand where ``current`` does, so that it is what was kept: in place, as far as
    there are tensors, dicts and lists for it."""
    if isinstance(kept, Copy):
        return kept.put(current)
    if isinstance(kept, dict):
        values = current if isinstance(current, dict) else {}
        for key in values.keys() - kept.keys():
            del values[key]
        values.update({key: put(values.get(key), held) for key, held in kept.items()})
        return values
    if type(kept) in (list, tuple):
        olds = current if _matches(current, kept) else [None] * len(kept)
        made = [put(old, held) for old, held in zip(olds, kept, strict=True)]
        if type(current) is list and type(kept) is list:
            current[:] = made
            return current
        return type(kept)(made)
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
