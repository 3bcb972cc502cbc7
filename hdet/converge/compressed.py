"""Compressed: the cycle's displacements in 16 or 8 bits, and what rounding takes away is added to the next ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .base import Average, Task, all_gather
from .plain import PlainAverage


@dataclass(frozen=True)
class Compressed:
    """Averages theta - reference instead of theta, rounded to bf16 or int8, with error feedback. The reference is the last average.

    ``dtype``: "bf16" (8 bits of precision) or "int8" (127 levels on each side of 0 for every ``block`` elements, with their largest
    magnitude as the scale, in fp32). ``block``: a multiple of 4, 16 .. 65536.

    With a the reference, e_r the worker's and o_j the chunk owner's kept-back errors, Q the rounding, for chunk j of N:

        c_r = Q(theta_r - a + e_r),  e_r <- theta_r - a + e_r - c_r        all_to_all: owner j gets chunk j of every c_r
        d_j = Q(sum_r w_r c_r + o_j),  o_j <- sum_r w_r c_r + o_j - d_j    all_gather: everyone gets all d
        a <- a + d,  theta_r <- a                                          bitwise equal on all replicas

    Sends 2 (N - 1) / N * n * b bytes for n elements, b = 2 for bf16 and 1 + 4 / block for int8; `Plain` has b = 4. Extra memory beside a
    bucket: reference and errors, 8 + 4 / N bytes an element.

    The first average after the start, after `Ensemble.converge` and after a state is loaded is plain and exact: it sets the reference. A
    replica of weight 0 contributes nothing and forgets its error.
    """

    dtype: str = "bf16"
    block: int = 256

    def __post_init__(self) -> None:
        if self.dtype not in ("bf16", "int8"):
            raise ValueError(f'dtype must be "bf16" or "int8", got {self.dtype!r}: uncompressed is Plain()')
        b = self.block
        if not isinstance(b, int) or isinstance(b, bool) or not 16 <= b <= 65536 or b % 4:
            raise ValueError(f"block must be a multiple of 4 from 16 to 65536, got {b!r}")

    def build(self, task: Task) -> Average:
        if task.replicas.count == 1:
            return PlainAverage(task)
        return _Compressed(task, BFloat16() if self.dtype == "bf16" else Int8(self.block))


@dataclass
class _Kept:
    """What is kept of one filling between averages, in its dtype."""

    reference: torch.Tensor
    error: torch.Tensor
    """of this replica, on the whole filling"""
    chunk_error: torch.Tensor
    """of this rank as the owner of a chunk"""


class _Compressed(PlainAverage):
    keeps_state = True

    def __init__(self, task: Task, codec: BFloat16 | Int8) -> None:
        super().__init__(task)
        self._replicas, self._codec = task.replicas, codec
        self._buckets = self._make_buckets(multiple=task.replicas.count * codec.granule)
        self._kept: list[_Kept] = []

    def _forget(self) -> None:
        self._kept, self.idle = [], True

    @torch.no_grad()
    def end_cycle(self, weights: Sequence[float]) -> list[str]:
        fillings = self._buckets.plan()
        if not self._kept:
            self._plain(weights)
            for filling in fillings:
                reference = filling.gather().clone()
                chunk = reference[: len(reference) // len(weights)]
                self._kept.append(_Kept(reference, torch.zeros_like(reference), torch.zeros_like(chunk)))
            return []
        for filling, kept in zip(fillings, self._kept, strict=True):
            flat = filling.gather()
            self._average(flat, kept, weights)
            flat.copy_(kept.reference)
            filling.expect()
            filling.scatter()
        self.idle = False
        return []

    def _average(self, flat: torch.Tensor, kept: _Kept, weights: Sequence[float]) -> None:
        """Moves the reference by the average displacement. ``flat``: this replica's values; used up."""
        codec, group, count = self._codec, self._replicas.peer_group, len(weights)
        assert group is not None
        # Of a replica that is left out: nothing, so that nothing is kept back either.
        left_out = weights[self._replicas.index] == 0
        delta = flat.zero_() if left_out else flat.sub_(kept.reference).add_(kept.error)
        mine = codec.encode(delta.view(count, -1))
        codec.decode(mine, kept.error.view(count, -1))
        torch.sub(delta, kept.error, out=kept.error)

        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=group)
        chunks = codec.decode(theirs, delta.view(count, -1))
        total = kept.chunk_error
        for chunk, weight in zip(chunks, weights, strict=True):
            total.add_(chunk, alpha=weight)
        result = codec.encode(total.view(1, -1))
        total.sub_(codec.decode(result, torch.empty_like(total).view(1, -1)).view(-1))

        all_gather(mine.view(-1), result.view(-1), group)
        kept.reference.add_(codec.decode(mine, delta.view(count, -1)).view(-1))


# -- numbers on the wire in fewer bits ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class BFloat16:
    """Rounded to nearest. Each row is rounded on its own, so that rows can be sent to different ranks; it has a multiple of ``granule`` elements."""

    granule: int = 8

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """(k, n) float32 or float64 -> (k, bytes) uint8. ``rows`` stay."""
        return rows.to(torch.bfloat16).view(torch.uint8)

    def decode(self, coded: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The inverse, but for what rounding took; writes and returns ``out``, (k, n). Elementwise, so the same bits on every rank."""
        return out.copy_(coded.view(torch.bfloat16))


@dataclass(frozen=True)
class Int8:
    """As `BFloat16`, but x = scale * q with whole q in -127 .. 127, and scale = max |x| / 127 of each block, in fp32 behind the row's q."""

    granule: int

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        count, size = rows.shape
        coded = torch.empty(count, size + 4 * (size // self.granule), dtype=torch.uint8, device=rows.device)
        levels, scales = self._split(coded)
        blocks = rows.view(count, -1, self.granule)
        scales.copy_(blocks.abs().amax(-1) / 127.0)
        # A block of zeros, or one so small that its scale is 0, is sent as zeros; what it had is kept back.
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
