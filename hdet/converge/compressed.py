"""Compressed: a cycle's displacements in 16 or 8 bits; what rounding takes away is sent later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    plain and exact: it sets the reference. A replica of share 0 forgets its error.

    Sends 2 (N - 1) / N * n * b bytes for n elements, b = 2 for bf16 and 1 + 4 / block for int8;
    `Plain` has b = 4. Extra memory beside a bucket: 8 + 4 / N bytes an element.

    Args:
        dtype: "bf16" (8 bits of precision) or "int8" (127 levels on each side of 0 for every
            ``block`` elements, with their largest magnitude as the scale, in fp32).
        block: a multiple of 4 from 16 to 65536.

    Example::

        sync = hdet.Sync(100, converge=hdet.converge.Compressed("int8"))
    """

    dtype: str = "bf16"
    block: int = 256

    def __post_init__(self) -> None:
        if self.dtype not in ("bf16", "int8"):
            raise ValueError(
                f'dtype must be "bf16" or "int8", got {self.dtype!r}: uncompressed is Plain()'
            )
        if self.block not in range(16, 65537, 4):
            raise ValueError(f"block must be a multiple of 4 from 16 to 65536, got {self.block!r}")

    def make_averager(self, task: Task) -> Averager:
        return _Compressed(task, BFloat16() if self.dtype == "bf16" else Int8(self.block))


class _Compressed(Averager):
    def __init__(self, task: Task, codec: BFloat16 | Int8) -> None:
        super().__init__(task)
        self._forget_on_load()
        self._codec = codec
        multiple = task.replicas.count * codec.granule
        self._buckets = Buckets(task.parts, task.bucket_bytes, multiple=multiple)
        self._references: list[torch.Tensor] = []
        """Of each filling, in its dtype, like what follows; empty before the first average."""
        self._errors: list[torch.Tensor] = []
        """Of this replica."""
        self._chunk_errors: list[torch.Tensor] = []
        """Of this rank as the owner of a chunk of each filling."""

    def _forget(self, *_: Any) -> None:
        self.idle, self._references = True, []

    @torch.no_grad()
    def end_cycle(self, shares: Sequence[float]) -> list[str]:
        if not self._references:
            self._average_plainly(shares)
            self._references = [filling.pack().clone() for filling in self._buckets.plan()]
            self._errors = [torch.zeros_like(a) for a in self._references]
            self._chunk_errors = [torch.zeros_like(e.chunk(len(shares))[0]) for e in self._errors]
            return []
        for i, filling in enumerate(self._buckets.plan()):
            self._move_reference(i, filling.pack(), shares)
            filling.flat.copy_(self._references[i])
            filling.unpack()
        self.idle = False
        return []

    def _move_reference(self, i: int, flat: torch.Tensor, shares: Sequence[float]) -> None:
        """By the mean displacement. ``flat``: this replica's values of filling i; used up."""
        reference, error, total = self._references[i], self._errors[i], self._chunk_errors[i]
        codec, group, count = self._codec, self.task.replicas.peer_group, len(shares)
        assert group is not None
        # Of a replica that is left out: nothing, so that nothing is kept back either.
        left_out = shares[self.task.replicas.index] == 0
        delta = flat.zero_() if left_out else flat.sub_(reference).add_(error)
        sent = codec.encode(delta.view(count, -1))
        codec.decode(sent, error.view(count, -1))
        torch.sub(delta, error, out=error)

        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        chunks = codec.decode(received, delta.view(count, -1))
        for chunk, share in zip(chunks, shares, strict=True):
            total.add_(chunk, alpha=share)
        result = codec.encode(total.view(1, -1))
        total.sub_(codec.decode(result, torch.empty_like(total).view(1, -1)).view(-1))

        all_gather(sent.view(-1), result.view(-1), group)
        reference.add_(codec.decode(sent, delta.view(count, -1)).view(-1))


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
        blocks = rows.view(len(rows), -1, self.granule)
        scales = (blocks.abs().amax(-1) / 127.0).float()
        # A block so small that its scale is 0 is sent as zeros; what it had is kept back.
        steps = scales.to(rows.dtype).masked_fill(scales == 0, torch.inf).unsqueeze(-1)
        levels = (blocks / steps).round_().clamp_(-127, 127).to(torch.int8).flatten(1)
        return torch.cat([levels.view(torch.uint8), scales.view(torch.uint8)], 1)

    def decode(self, coded: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        blocks = out.view(len(out), -1, self.granule)
        levels, scales = coded[:, : out.shape[1]], coded[:, out.shape[1] :]
        blocks.copy_(levels.view(torch.int8).view_as(blocks))
        blocks.mul_(scales.view(torch.float32).unsqueeze(-1))
        return out
