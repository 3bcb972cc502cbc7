"""Compressed: a cycle's displacements in 16 or 8 bits; what rounding takes away is sent later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .base import Averager, Averaging, Task
from .buckets import Buckets
from .collectives import all_gather


@dataclass(frozen=True)
class Compressed(Averaging):
    """Average theta - reference instead of theta, rounded, with error feedback.

    The reference a is the last average. With e_r the worker's and o_j the chunk owner's kept-back
    errors and Q the rounding, for chunk j of N::

        c_r = Q(theta_r - a + e_r),  e_r <- theta_r - a + e_r - c_r       all_to_all of chunks
        d_j = Q(sum_r w_r c_r + o_j),  o_j <- sum_r w_r c_r + o_j - d_j   all_gather of all d
        a <- a + d,  theta_r <- a                                         bitwise equal everywhere

    The first average after the start, after `Ensemble.converge` and after a state is loaded is
    plain and exact: it sets the reference. A replica of weight 0 forgets its error.

    Sends 2 (N - 1) / N * n * b bytes for n elements, b = 2 for bf16 and 1 + 4 / block for int8;
    `Plain` has b = 4. Extra memory beside a bucket: 8 + 4 / N bytes an element.

    Args:
        dtype: "bf16" (8 bits of precision) or "int8" (127 levels on each side of 0 for every
            ``block`` elements, with their largest magnitude as the scale, in fp32).
        block: a multiple of 4 from 16 to 65536.
    """

    dtype: str = "bf16"
    block: int = 256

    def __post_init__(self) -> None:
        if self.dtype not in ("bf16", "int8"):
            raise ValueError(
                f'dtype must be "bf16" or "int8", got {self.dtype!r}: uncompressed is Plain()'
            )
        b = self.block
        if not isinstance(b, int) or isinstance(b, bool) or not 16 <= b <= 65536 or b % 4:
            raise ValueError(f"block must be a multiple of 4 from 16 to 65536, got {b!r}")

    def make_averager(self, task: Task) -> Averager:
        return _Compressed(task, BFloat16() if self.dtype == "bf16" else Int8(self.block))


@dataclass
class _Memory:
    """What is kept of one filling between averages, in its dtype."""

    reference: torch.Tensor
    error: torch.Tensor
    """Of this replica, on the whole filling."""
    chunk_error: torch.Tensor
    """Of this rank as the owner of a chunk."""


class _Compressed(Averager):
    def __init__(self, task: Task, codec: BFloat16 | Int8) -> None:
        super().__init__(task)
        self._forget_on_load()
        self._codec = codec
        multiple = task.replicas.count * codec.granule
        self._buckets = Buckets(task.parts, task.bucket_bytes, multiple=multiple)
        self._memories: list[_Memory] = []

    def _forget(self) -> None:
        self.idle, self._memories = True, []

    @torch.no_grad()
    def end_cycle(self, weights: Sequence[float]) -> list[str]:
        fillings = self._buckets.plan()
        if not self._memories:
            self._average_plainly(weights)
            for filling in fillings:
                reference = filling.pack().clone()
                chunk = reference[: len(reference) // len(weights)]
                errors = torch.zeros_like(reference), torch.zeros_like(chunk)
                self._memories.append(_Memory(reference, *errors))
            return []
        for filling, memory in zip(fillings, self._memories, strict=True):
            flat = filling.pack()
            self._move_reference(flat, memory, weights)
            flat.copy_(memory.reference)
            filling.mark_written()
            filling.unpack()
        self.idle = False
        return []

    def _move_reference(
        self, flat: torch.Tensor, memory: _Memory, weights: Sequence[float]
    ) -> None:
        """By the mean displacement. ``flat``: this replica's values; used up."""
        codec, group, count = self._codec, self.task.replicas.peer_group, len(weights)
        assert group is not None
        # Of a replica that is left out: nothing, so that nothing is kept back either.
        left_out = weights[self.task.replicas.index] == 0
        delta = flat.zero_() if left_out else flat.sub_(memory.reference).add_(memory.error)
        sent = codec.encode(delta.view(count, -1))
        codec.decode(sent, memory.error.view(count, -1))
        torch.sub(delta, memory.error, out=memory.error)

        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        chunks = codec.decode(received, delta.view(count, -1))
        total = memory.chunk_error
        for chunk, weight in zip(chunks, weights, strict=True):
            total.add_(chunk, alpha=weight)
        result = codec.encode(total.view(1, -1))
        total.sub_(codec.decode(result, torch.empty_like(total).view(1, -1)).view(-1))

        all_gather(sent.view(-1), result.view(-1), group)
        memory.reference.add_(codec.decode(sent, delta.view(count, -1)).view(-1))


@dataclass(frozen=True)
class BFloat16:
    """Rounds to nearest. Each row is rounded on its own, so that rows can go to different ranks; it
    has a multiple of ``granule`` elements."""

    granule: int = 8

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """(k, n) float32 or float64 -> (k, bytes) uint8; ``rows`` stay."""
        return rows.to(torch.bfloat16).view(torch.uint8)

    def decode(self, coded: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write into ``out``, (k, n), and return it. The same bits on every rank."""
        return out.copy_(coded.view(torch.bfloat16))


@dataclass(frozen=True)
class Int8:
    """As `BFloat16`, but x = scale * q with whole q in -127 .. 127, and scale = max |x| / 127 of
    each block, in fp32 behind the row's q."""

    granule: int

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        count, size = rows.shape
        n_bytes = size + 4 * (size // self.granule)
        coded = torch.empty(count, n_bytes, dtype=torch.uint8, device=rows.device)
        levels, scales = self._split(coded)
        blocks = rows.view(count, -1, self.granule)
        scales.copy_(blocks.abs().amax(-1) / 127.0)
        # A block so small that its scale is 0 is sent as zeros; what it had is kept back.
        steps = scales.to(rows.dtype).masked_fill(scales == 0, torch.inf).unsqueeze(-1)
        levels.copy_((blocks / steps).round_().clamp_(-127, 127).view(count, size))
        return coded

    def decode(self, coded: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        levels, scales = self._split(coded)
        blocks = out.view(len(out), -1, self.granule)
        blocks.copy_(levels.unflatten(1, (-1, self.granule))).mul_(scales.unsqueeze(-1))
        return out

    def _split(self, coded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = coded.shape[1] // (self.granule + 4) * self.granule
        return coded[:, :size].view(torch.int8), coded[:, size:].view(torch.float32)
