"""Buckets: tensors and their masters copied into flat memory and back, which is what every way of averaging sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from .. import kernels
from ..kernels.spec.arguments import FLOATS
from ..tensors.dtensor import local_parts
from .base import Masters

DIRECT_BYTES = 4 << 20
"""A tensor this large is reduced where it lies: a copy into a bucket would cost more than its own collective."""


class Part(NamedTuple):
    """A tensor, or a piece of one, and its master: float32, or int16, the lower half of a bfloat16 tensor's exact value."""

    tensor: torch.Tensor
    master: torch.Tensor | None = None

    @property
    def value(self) -> torch.Tensor:
        return self.tensor if self.master is None or self.master.dtype == torch.int16 else self.master

    @property
    def lower(self) -> torch.Tensor | None:
        return self.master if self.master is not None and self.master.dtype == torch.int16 else None

    @property
    def wire(self) -> torch.dtype:
        """16-bit values are averaged in fp32: a sum in bf16 would lose what the replicas differ by."""
        return torch.float64 if self.tensor.dtype == torch.float64 else torch.float32


def parts_of(tensors: Sequence[torch.Tensor], masters: Masters) -> list[Part]:
    """What lies on this rank; asked anew each time, because a shard may move and masters come with an optimizer's first step."""
    held = [None if m is None else local_parts([m])[0] for m in masters()]
    return [Part(tensor, master) for tensor, master in zip(local_parts(tensors), held, strict=True)]


class Filling:
    """What travels together: ``flat`` is the used part of a bucket, in the wire's dtype, with zeros at the end up to a multiple."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.flat, self._memory, self._used = memory[:0], memory, 0
        self._views: list[torch.Tensor] = []
        self._parts: list[Part] = []

    def add(self, piece: Part) -> bool:
        """False if there is no room for it any more."""
        size = piece.tensor.numel()
        if self._used + size > self._memory.numel():
            return False
        self._views.append(self._memory[self._used : self._used + size].view(piece.tensor.shape))
        self._parts.append(piece)
        self._used += size
        return True

    def seal(self, multiple: int) -> Filling:
        """Full: prepare the way in, from the masters where there are any, and the way out, to both. Gathering is left to torch."""
        self.flat = self._memory[: _rounded_up(self._used, multiple)]
        tensors, values, lowers, masters = zip(*((p.tensor, p.value, p.lower, p.master) for p in self._parts), strict=True)
        native = all(t.dtype in FLOATS and t.is_contiguous() for t in tensors) and self.flat.dtype == torch.float32
        backend = "auto" if native and self.flat.device.type in ("cpu", "cuda") else "torch"
        self._pack = kernels.pair_plan(values, self._views, source_lowers=lowers, backend=backend)
        self._unpack = kernels.pair_plan(self._views, tensors, masters=masters, backend=backend)
        self._versioned = [t for t in tensors if not t.is_inference()]
        return self

    def gather(self, weight: float = 1.0) -> torch.Tensor:
        """flat = weight * values; weight 0 writes zeros, whatever the values are."""
        self._pack.copy(weight)
        self.flat[self._used :].zero_()
        return self.flat

    def expect(self) -> None:
        """Native copies write behind autograd's back, and what a backward pass has saved of these tensors is no longer valid.

        Takes the host some time, so it is apart from `scatter`: to be called while something travels.
        """
        torch.autograd.graph.increment_version(self._versioned)

    def scatter(self) -> None:
        """values = flat, in tensors and masters."""
        self._unpack.copy(1.0)


class Buckets:
    """The parts of a model in fillings. Their order and sizes follow from shapes and dtypes alone, so they are the same on all peers.

    Args:
        parts: gives what is to be sent; asked at every `plan`.
        bytes_: upper bound of the memory of one filling, all kinds of tensors together.
        direct: large tensors that are on the wire as they are in memory are left out and listed in ``direct``.
        multiple: fillings have a multiple of so many elements.
        keep: each filling has memory of its own, instead of one bucket for all.
    """

    def __init__(
        self, parts: Callable[[], Sequence[Part]], bytes_: int, *, direct: bool = False, multiple: int = 1, keep: bool = False
    ) -> None:
        self._parts, self._bytes, self._allow_direct, self._multiple, self._keep = parts, bytes_, direct, multiple, keep
        self._planned: list[tuple[int, torch.Size, torch.dtype]] = []
        self._memories: dict[tuple[torch.device, torch.dtype, int], torch.Tensor] = {}
        self.direct: list[torch.Tensor] = []
        self.fillings: list[Filling] = []

    @property
    def extra_bytes(self) -> int:
        """Bytes of memory held since the first plan."""
        return sum(memory.nbytes for memory in self._memories.values())

    def plan(self) -> list[Filling]:
        """The fillings; made anew only if a tensor has moved or is another, over the same memory."""
        parts = [part for part in self._parts() if part.tensor.numel()]
        planned = [(tensor.data_ptr(), tensor.shape, tensor.dtype) for part in parts for tensor in part if tensor is not None]
        if planned == self._planned:
            return self.fillings
        self._planned, self.direct, self.fillings = planned, [], []
        kinds: dict[tuple[torch.device, torch.dtype], list[Part]] = {}
        for part in parts:
            tensor = part.tensor
            if self._allow_direct and tensor.is_contiguous() and tensor.dtype == part.wire and tensor.nbytes >= DIRECT_BYTES:
                self.direct.append(tensor)
            else:
                kinds.setdefault((tensor.device, part.wire), []).append(part)
        for (device, dtype), members in kinds.items():
            wanted = sum(part.tensor.numel() for part in members)
            allowed = self._bytes // len(kinds) // dtype.itemsize // self._multiple * self._multiple
            size = min(_rounded_up(wanted, self._multiple), max(allowed, self._multiple))
            self.fillings += self._fill(members, device, dtype, size)
        return self.fillings

    def _fill(self, parts: Sequence[Part], device: torch.device, dtype: torch.dtype, size: int) -> Iterator[Filling]:
        """Lay the tensors out over buckets of ``size`` elements; a tensor may be cut between two fillings."""

        def start(number: int) -> Filling:
            key = (device, dtype, number if self._keep else 0)
            if key not in self._memories or self._memories[key].numel() != size:
                self._memories[key] = torch.empty(size, dtype=dtype, device=device)
            return Filling(self._memories[key])

        number = 0
        filling = start(number)
        for part in parts:
            for piece in _pieces(part, size):
                if not filling.add(piece):
                    yield filling.seal(self._multiple)
                    number += 1
                    filling = start(number)
                    filling.add(piece)
        yield filling.seal(self._multiple)


def _pieces(part: Part, capacity: int) -> Iterator[Part]:
    """The tensor itself, or, larger than the bucket, pieces of it that fit."""
    tensor, master = part
    if tensor.numel() <= capacity:
        yield part
    elif tensor.is_contiguous():  # and so is a master
        cuts = tensor.view(-1).split(capacity)
        yield from map(Part, cuts, [None] * len(cuts) if master is None else master.view(-1).split(capacity))
    else:
        for row, below in zip(tensor.unbind(0), [None] * len(tensor) if master is None else master.unbind(0), strict=True):
            yield from _pieces(Part(row, below), capacity)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
