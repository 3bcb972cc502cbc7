"""Buckets: tensors and their masters are copied into flat memory, averaged there, and copied back.

Every way of averaging sends them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from .. import kernels
from ..core.validate import whole
from ..kernels.checks import FLOATS
from ..kernels.numbers import is_lower
from ..optim.snapshot import Masters
from ..replicas import Replicas
from ..tensors.dtensor import local_parts
from .collectives import start_weighted_sum

DEFAULT_BUCKET_BYTES = 64 << 20
"""Two buckets of 32 MiB: the next filling is packed into one while the other is reduced."""
IN_PLACE_BYTES = 4 << 20
"""A tensor this large is reduced where it lies: a copy would cost more than its own collective.

So is a large float32 master, from which its parameter is rounded afterwards.
"""


class Part(NamedTuple):
    """A tensor, or a piece of one, and its master.

    A master is float32, or the lower half of a bfloat16 tensor's value (`numbers.LOWER`).
    """

    tensor: torch.Tensor
    master: torch.Tensor | None = None

    @property
    def value(self) -> torch.Tensor:
        """What is averaged; with `lower`, where the master is the lower half."""
        if self.master is None or is_lower(self.master):
            return self.tensor
        return self.master

    @property
    def lower(self) -> torch.Tensor | None:
        return self.master if self.value is self.tensor else None

    @property
    def wire(self) -> torch.dtype:
        """16-bit values are averaged in fp32: a sum in bf16 would lose what replicas differ by."""
        return torch.float64 if self.tensor.dtype == torch.float64 else torch.float32

    @property
    def goes_in_place(self) -> bool:
        value = self.value
        is_large = value.nbytes >= IN_PLACE_BYTES and value.is_contiguous()
        return is_large and value.dtype == self.wire


def parts_of(tensors: Sequence[torch.Tensor], masters: Masters) -> list[Part]:
    """What lies on this rank. To be asked again each time, because a shard may move."""
    local_masters = [None if m is None else local_parts([m])[0] for m in masters()]
    return [Part(t, m) for t, m in zip(local_parts(tensors), local_masters, strict=True)]


def average_tensors(
    tensors: Sequence[torch.Tensor],
    replicas: Replicas,
    shares: Sequence[float] | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> None:
    """Replace every tensor by its weighted mean over the replicas, in place (Eq. 3).

    Afterwards the tensors are bitwise equal on all replicas. Costs one all_reduce of their bytes,
    16-bit ones as fp32; the host never waits for a CUDA device.

    Args:
        tensors: the same ones in the same order on every replica; a DTensor stands for its shard.
        replicas: who takes part.
        shares: w_r of all N replicas, summing to 1; default 1/N each. A replica of share 0
            contributes nothing, not even a NaN, and takes the mean like the others.
        bucket_bytes: upper bound of the extra memory.

    Raises:
        ValueError: a tensor that has no mean in place (`check_averageable`); ``bucket_bytes``
            below 1024.
    """
    parts = [Part(tensor) for tensor in local_parts(tensors)]
    for i, part in enumerate(parts):
        check_averageable(part.tensor, f"tensor {i}")
    Buckets(lambda: parts, bucket_bytes, in_place=True).average(replicas, shares)


def check_averageable(tensor: torch.Tensor, name: str) -> None:
    """Raises ValueError, by ``name``, for what has no mean in place. Of a DTensor: its shard."""
    if tensor.layout is not torch.strided:
        fault = f"layout {tensor.layout}: only dense tensors can be averaged in place"
    elif not tensor.is_floating_point():
        fault = f"dtype {tensor.dtype}: only floating-point tensors have an average"
        if tensor.is_complex():
            fault += ", so hold it as torch.view_as_real(...), and compute with view_as_complex"
    elif tensor.element_size() < 2:
        fault = (
            f"dtype {tensor.dtype}, which has no arithmetic: leave it out of the optimizer, whose "
            "steps would not move it, or keep it in 16 bits"
        )
    else:
        return
    raise ValueError(f"{name} has {fault}")


class Filling:
    """Parts that are sent together in ``flat`` memory, whose end is zeros, up to a multiple."""

    def __init__(self, memory: torch.Tensor, parts: Sequence[Part], multiple: int) -> None:
        sizes = [part.tensor.numel() for part in parts]
        used = sum(sizes)
        self.flat = memory[: _rounded_up(used, multiple)]
        self._end = self.flat[used:]
        tensors, masters = zip(*parts, strict=True)
        flats = self.flat[:used].split(sizes)
        views = [flat.view(t.shape) for flat, t in zip(flats, tensors, strict=True)]
        native = self.flat.dtype == torch.float32 and self.flat.device.type in ("cpu", "cuda")
        native = native and all(t.dtype in FLOATS and t.is_contiguous() for t in tensors)
        backend = "auto" if native else "torch"
        values, lowers = [part.value for part in parts], [part.lower for part in parts]
        self._way_in = kernels.copy_plan(values, views, source_lowers=lowers, backend=backend)
        self._way_out = kernels.copy_plan(views, tensors, masters=masters, backend=backend)
        self._versioned = [t for t in tensors if not t.is_inference()]

    def pack(self, share: float = 1.0) -> torch.Tensor:
        """Write share * values into ``flat``, and return it; share 0 writes zeros."""
        self._way_in.copy(share)
        self._end.zero_()
        return self.flat

    def unpack(self) -> None:
        """Write ``flat`` into tensors and masters; and tell autograd, behind whose back native
        copies write, that what a backward pass has saved of the tensors is no longer valid."""
        self._way_out.copy(1.0)
        torch.autograd.graph.increment_version(self._versioned)


class Buckets:
    """The parts of a model in fillings, which take turns in two buckets of each kind of tensor.

    Order and sizes follow from shapes and dtypes alone, so they are the same on all peers.

    Args:
        ask_parts: gives what is to be sent; asked whenever something is sent.
        bucket_bytes: upper bound of the memory, all kinds of tensors together.
        in_place: large tensors that have the wire's dtype in memory are reduced where they lie, and
            so are their masters.
        multiple: fillings have a multiple of so many elements.

    Raises:
        ValueError: ``bucket_bytes`` below 1024.
    """

    def __init__(
        self,
        ask_parts: Callable[[], Sequence[Part]],
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        *,
        in_place: bool = False,
        multiple: int = 1,
    ) -> None:
        whole(bucket_bytes, "bucket_bytes", 1024, of="bytes")
        self._ask_parts, self._bytes = ask_parts, bucket_bytes
        self._in_place, self._multiple = in_place, multiple
        self._layout: list[tuple[int, torch.Size, torch.dtype]] = []
        self._large: list[Part] = []
        self._fillings: list[Filling] = []
        self.extra_bytes = 0
        """Memory held since the first plan."""

    @torch.no_grad()
    def average(self, replicas: Replicas, shares: Sequence[float] | None = None) -> None:
        """Replace all parts by their mean over the replicas, as `average_tensors` does."""
        group = replicas.peer_group
        if group is None:
            return
        share = 1 / replicas.count if shares is None else float(shares[replicas.index])
        fillings = self.plan()
        pending = [(part, start_weighted_sum(part.value, share, group)) for part in self._large]
        under_way: list[tuple[Filling, dist.Work]] = []
        for filling in fillings:
            work = dist.all_reduce(filling.pack(share), group=group, async_op=True)
            _unpack(under_way)  # the one before, whose bucket the next one takes
            under_way.append((filling, work))
        _unpack(under_way)
        for part, work in pending:
            work.wait()
            if part.master is not None:  # while the others are on their way
                part.tensor.copy_(part.value)

    def plan(self) -> list[Filling]:
        """The fillings; made again only if a tensor has moved or is another."""
        parts = [part for part in self._ask_parts() if part.tensor.numel()]
        layout = [(t.data_ptr(), t.shape, t.dtype) for part in parts for t in part if t is not None]
        if layout == self._layout:
            return self._fillings
        self._layout, self._large, self._fillings, self.extra_bytes = layout, [], [], 0
        kinds: dict[tuple[torch.device, torch.dtype], list[Part]] = {}
        for part in parts:
            if self._in_place and part.goes_in_place:
                self._large.append(part)
            else:
                kinds.setdefault((part.tensor.device, part.wire), []).append(part)
        for (device, dtype), members in kinds.items():
            wanted = _rounded_up(sum(part.tensor.numel() for part in members), self._multiple)
            allowed = self._bytes // len(kinds) // 2 // dtype.itemsize // self._multiple
            size = min(wanted, max(allowed, 1) * self._multiple)
            fillings = _split(members, size)
            buckets = torch.empty(min(len(fillings), 2), size, dtype=dtype, device=device)
            self.extra_bytes += buckets.nbytes
            for together, bucket in zip(fillings, itertools.cycle(buckets)):
                self._fillings.append(Filling(bucket, together, self._multiple))
        return self._fillings


def _unpack(under_way: list[tuple[Filling, dist.Work]]) -> None:
    """What has been reduced. On CUDA the wait orders streams, and the host goes on."""
    for filling, work in under_way:
        work.wait()
        filling.unpack()
    under_way.clear()


def _split(parts: Sequence[Part], capacity: int) -> list[list[Part]]:
    """Lay the parts out over buckets; one that is larger than a bucket is cut in pieces."""
    buckets: list[list[Part]] = [[]]
    room = capacity
    for piece in (piece for part in parts for piece in _pieces(part, capacity)):
        size = piece.tensor.numel()
        if size > room:
            buckets.append([])
            room = capacity
        buckets[-1].append(piece)
        room -= size
    return buckets


def _pieces(part: Part, capacity: int) -> Iterator[Part]:
    """The part itself, or, if it is larger than the bucket, pieces of it that fit."""
    tensor, master = part
    if tensor.numel() <= capacity:
        yield part
    elif tensor.is_contiguous():  # and so is a master
        cuts = tensor.view(-1).split(capacity)
        below = [None] * len(cuts) if master is None else master.view(-1).split(capacity)
        yield from map(Part, cuts, below)
    else:
        rows = [None] * len(tensor) if master is None else master.unbind(0)
        for row, below_row in zip(tensor.unbind(0), rows, strict=True):
            yield from _pieces(Part(row, below_row), capacity)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
