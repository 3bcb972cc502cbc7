"""The converge across processes: a weighted average in place, bucket by bucket (Eq. 3).

Cost: one all_reduce of the parameters' bytes. Extra memory: at most one bucket, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from .. import kernels
from ..kernels.checks import FLOATS
from ..replicas import Replicas
from .protocol import Masters

__all__ = ["DEFAULT_BUCKET_BYTES", "BucketedAverage", "check_averageable"]

DEFAULT_BUCKET_BYTES = 32 << 20
DIRECT_BYTES = 1 << 20
"""A tensor this large is reduced where it lies: a copy into a bucket would cost more than its own collective."""


class _Part(NamedTuple):
    """A tensor, or a piece of one, and its master: float32, or int16, the lower half of a bfloat16 tensor's exact value."""

    tensor: torch.Tensor
    master: torch.Tensor | None = None

    @property
    def value(self) -> torch.Tensor:
        return self.tensor if self.master is None or self.master.dtype == torch.int16 else self.master

    @property
    def lower(self) -> torch.Tensor | None:
        return self.master if self.master is not None and self.master.dtype == torch.int16 else None


@dataclass
class _Filling:
    """What travels together: ``flat`` is the used part of the bucket, ``views`` its pieces, ``parts`` those of the tensors."""

    flat: torch.Tensor
    views: list[torch.Tensor] = field(default_factory=list)
    parts: list[_Part] = field(default_factory=list)

    def seal(self, used: int) -> _Filling:
        """Full: prepare the way in, from the masters where there are any, and the way out, to both. Gathering is left to torch."""
        self.flat = self.flat[:used]
        tensors, values, lowers, masters = zip(*((p.tensor, p.value, p.lower, p.master) for p in self.parts), strict=True)
        native = all(t.dtype in FLOATS and t.is_contiguous() for t in tensors) and self.flat.dtype == torch.float32
        backend = "auto" if native and self.flat.device.type in ("cpu", "cuda") else "torch"
        self.pack = kernels.pair_plan(values, self.views, source_lowers=_unless_empty(lowers), backend=backend)
        self.unpack = kernels.pair_plan(self.views, tensors, masters=_unless_empty(masters), backend=backend)
        self.versioned = [t for t in tensors if not t.is_inference()]
        return self

    def average(self, weight: float, group: dist.ProcessGroup) -> None:
        self.pack.copy(weight)
        work = dist.all_reduce(self.flat, group=group, async_op=True)
        # While it travels: native copies write behind autograd's back, and what a backward pass has saved of these is no longer valid.
        torch.autograd.graph.increment_version(self.versioned)
        work.wait()
        self.unpack.copy(1.0)


def _unless_empty(column: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None] | None:
    return column if any(tensor is not None for tensor in column) else None


class BucketedAverage:
    """Weighted in-place average of the same tensors on every replica.

    Args:
        tensors: floating-point tensors, in the same order on every replica. Contiguous ones of at least 1 MiB in fp32 or fp64
            are reduced where they lie; the others travel in a bucket, filled as often as needed, 16-bit ones as fp32.
        replicas: who takes part.
        bucket_bytes: upper bound of the extra memory, in bytes; it is kept between calls.
        masters: gives the master of each tensor or None, asked at every call: an optimizer makes them in its first step. float32,
            or int16, the lower half of a bfloat16 tensor's exact value. The average is that of the masters; both are written.

    Guarantees: afterwards the tensors are bitwise equal on all replicas; the order and the number of collectives depend on
    shapes and dtypes alone; the host never waits for a CUDA device. Not for overlapping calls.

    Raises:
        ValueError: a tensor that is sparse, not floating point, or a DTensor; ``bucket_bytes`` below 1024.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        replicas: Replicas,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        masters: Masters | None = None,
    ) -> None:
        if not isinstance(bucket_bytes, int) or bucket_bytes < 1024:
            raise ValueError(f"bucket_bytes must be a whole number of bytes >= 1024, got {bucket_bytes!r}")
        for i, tensor in enumerate(tensors):
            check_averageable(tensor, f"tensor {i}")
        self.tensors, self.replicas, self.bucket_bytes = list(tensors), replicas, bucket_bytes
        self._masters = masters or (lambda: [None] * len(self.tensors))
        self._addresses: list[int] = []
        self._direct: list[torch.Tensor] = []
        self._fillings: list[_Filling] = []
        self._memories: list[torch.Tensor] = []

    @torch.no_grad()
    def __call__(self, weights: Sequence[float] | None = None) -> None:
        """Replace every tensor by sum_r w_r theta_r. ``weights``: w_r of all N replicas (default 1/N each); they must sum to 1.

        A replica of weight 0 contributes exactly zero, even where it holds NaN or inf, and takes the average like the others.
        """
        group = self.replicas.peer_group
        if group is None:
            return
        weight = 1 / self.replicas.count if weights is None else float(weights[self.replicas.index])
        self._plan()
        pending = []
        for tensor in self._direct:
            _scale_(tensor, weight)
            pending.append(dist.all_reduce(tensor, group=group, async_op=True))
        for filling in self._fillings:
            filling.average(weight, group)
        for work in pending:
            work.wait()  # on CUDA this orders streams; the host goes on

    @property
    def extra_bytes(self) -> int:
        """Bytes of bucket memory held since the first call."""
        return sum(memory.nbytes for memory in self._memories)

    def _plan(self) -> None:
        """Who goes directly and what fills the bucket; rebuilt only if a tensor has moved."""
        masters = self._masters()
        addresses = [tensor.data_ptr() for pair in zip(self.tensors, masters, strict=True) for tensor in pair if tensor is not None]
        if addresses == self._addresses:
            return
        self._addresses, self._direct, self._fillings, self._memories = addresses, [], [], []
        kinds: dict[tuple[torch.device, torch.dtype], list[_Part]] = {}
        for part in (_Part(t.detach(), master) for t, master in zip(self.tensors, masters, strict=True) if t.numel()):
            tensor, wire = part.tensor, _wire_dtype(part.tensor.dtype)
            if tensor.is_contiguous() and tensor.dtype == wire and tensor.nbytes >= DIRECT_BYTES:
                self._direct.append(tensor)
            else:
                kinds.setdefault((tensor.device, wire), []).append(part)
        for (device, dtype), members in kinds.items():
            wanted = sum(part.tensor.numel() for part in members)
            memory = torch.empty(min(wanted, self.bucket_bytes // len(kinds) // dtype.itemsize), dtype=dtype, device=device)
            self._memories.append(memory)
            self._fillings += _fill(members, memory)


def _wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """16-bit values are averaged in fp32: a sum in bf16 would lose what the replicas differ by."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _fill(parts: list[_Part], memory: torch.Tensor) -> Iterator[_Filling]:
    """Lay the tensors out over the bucket, as often as needed; a tensor may be cut between two fillings."""
    used = 0
    filling = _Filling(memory)
    for part in parts:
        for piece in _pieces(part, memory.numel()):
            size = piece.tensor.numel()
            if used + size > memory.numel():
                yield filling.seal(used)
                filling, used = _Filling(memory), 0
            filling.views.append(memory[used : used + size].view(piece.tensor.shape))
            filling.parts.append(piece)
            used += size
    yield filling.seal(used)


def _pieces(part: _Part, capacity: int) -> Iterator[_Part]:
    """The tensor itself, or, larger than the bucket, pieces of it that fit."""
    tensor, master = part
    if tensor.numel() <= capacity:
        yield part
    elif tensor.is_contiguous():  # and so is a master
        cuts = tensor.view(-1).split(capacity)
        yield from map(_Part, cuts, [None] * len(cuts) if master is None else master.view(-1).split(capacity))
    else:
        for row in tensor.unbind(0):
            yield from _pieces(_Part(row), capacity)


def _scale_(tensor: torch.Tensor, weight: float) -> None:
    """Multiply in place; weight 0 means "nothing of this replica", which NaN * 0 would not be."""
    if weight == 0:
        tensor.zero_()
    else:
        tensor.mul_(weight)


def check_averageable(tensor: torch.Tensor, name: str) -> None:
    """Raises ValueError for what cannot be averaged in place, by name and with the way out."""
    if hasattr(tensor, "to_local") and hasattr(tensor, "placements"):
        raise ValueError(
            f"{name} is a DTensor: which ranks hold the same shard is not known here, so sharded layouts are refused; train with DDP"
        )
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} has layout {tensor.layout}: only dense tensors can be averaged in place")
    if not tensor.is_floating_point():
        raise ValueError(f"{name} has dtype {tensor.dtype}: only floating-point tensors have an average")
