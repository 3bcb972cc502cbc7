"""Compressed: the cycle's displacements in 16 or 8 bits, and what rounding takes away is added to the next ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .base import Average, Task, when_loaded
from .buckets import Buckets, parts_of
from .codecs import BFloat16, Codec, Int8
from .collectives import all_gather
from .plain import Plain, PlainAverage

__all__ = ["Compressed"]


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
            return Plain().build(task)
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
    def __init__(self, task: Task, codec: Codec) -> None:
        super().__init__(task)
        self._replicas, self._codec, self.idle = task.replicas, codec, True
        multiple = task.replicas.count * codec.granule
        self._buckets = Buckets(lambda: parts_of(task.tensors, task.masters), task.bucket_bytes, multiple=multiple)
        self._kept: list[_Kept] = []
        self._hooks = when_loaded(task.optimizer, self._forget)

    def _forget(self) -> None:
        self._kept, self.idle = [], True

    @torch.no_grad()
    def end_cycle(self, weights: Sequence[float]) -> list[str]:
        fillings = self._buckets.plan()
        if not self._kept:
            self._plain(weights)
            for filling in fillings:
                reference = filling.gather().clone()
                self._kept.append(
                    _Kept(reference, torch.zeros_like(reference), torch.zeros_like(reference[: len(reference) // len(weights)]))
                )
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

    def complete(self, weights: Sequence[float]) -> None:
        super().complete(weights)
        self._forget()

    def close(self) -> None:
        super().close()
        self._forget()
