"""The converge across processes: a weighted average in place, bucket by bucket (Eq. 3).

Cost: one all_reduce of the parameters' bytes. Extra memory: at most one bucket, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..core.validate import whole
from ..replicas import Replicas
from ..tensors.dtensor import local_parts
from .base import Masters
from .buckets import Buckets, parts_of

DEFAULT_BUCKET_BYTES = 32 << 20


class BucketedAverage:
    """Weighted in-place average of the same tensors on every replica.

    Args:
        tensors: floating-point tensors, in the same order on every replica; DTensors stand for their shards on this rank. Contiguous
            ones of at least 4 MiB in fp32 or fp64 are reduced where they lie; the others travel in a bucket, filled as often as needed,
            16-bit ones as fp32.
        replicas: who takes part.
        bucket_bytes: upper bound of the extra memory, in bytes; it is kept between calls.
        masters: gives the master of each tensor or None, asked at every call: an optimizer makes them in its first step. float32,
            or int16, the lower half of a bfloat16 tensor's exact value. The average is that of the masters; both are written.

    Guarantees: afterwards the tensors are bitwise equal on all replicas; the order and the number of collectives depend on
    shapes and dtypes alone; the host never waits for a CUDA device. Not for overlapping calls.

    Raises:
        ValueError: a tensor that is sparse or not floating point; ``bucket_bytes`` below 1024.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        replicas: Replicas,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        masters: Masters | None = None,
    ) -> None:
        whole(bucket_bytes, "bucket_bytes", 1024, of="bytes")
        for i, tensor in enumerate(local_parts(tensors)):
            check_averageable(tensor, f"tensor {i}")
        self._replicas = replicas
        ask = masters or (lambda: [None] * len(tensors))
        self._buckets = Buckets(lambda: parts_of(tensors, ask), bucket_bytes, direct=True)

    def __call__(self, weights: Sequence[float] | None = None) -> None:
        """Replace every tensor by sum_r w_r theta_r. ``weights``: w_r of all N replicas (default 1/N each); they must sum to 1.

        A replica of weight 0 contributes exactly zero, even where it holds NaN or inf, and takes the average like the others.
        """
        average(self._buckets, self._replicas, weights)

    @property
    def extra_bytes(self) -> int:
        """Bytes of bucket memory held since the first call."""
        return self._buckets.extra_bytes


@torch.no_grad()
def average(buckets: Buckets, replicas: Replicas, weights: Sequence[float] | None = None) -> None:
    """See `BucketedAverage`; of ``buckets`` that leave out what goes directly."""
    group = replicas.peer_group
    if group is None:
        return
    weight = 1 / replicas.count if weights is None else float(weights[replicas.index])
    fillings = buckets.plan()
    pending = [start_weighted_sum(tensor, weight, group) for tensor in buckets.direct]
    for filling in fillings:
        work = dist.all_reduce(filling.gather(weight), group=group, async_op=True)
        filling.expect()
        work.wait()
        filling.scatter()
    for work in pending:
        work.wait()  # on CUDA this orders streams; the host goes on


def start_weighted_sum(tensor: torch.Tensor, weight: float, group: dist.ProcessGroup) -> dist.Work:
    """Begin tensor <- sum_r w_r tensor_r, in place. NCCL multiplies on the way (PREMUL_SUM); elsewhere it takes a pass of its own.

    Weight 0 means "nothing of this replica", which NaN * 0 would not be.
    """
    operation: Any = dist.ReduceOp.SUM
    if weight == 0:
        tensor.zero_()
    elif _multiplies(tensor, group):
        operation = dist._make_nccl_premul_sum(weight)
    else:
        tensor.mul_(weight)
    work: dist.Work = dist.all_reduce(tensor, op=operation, group=group, async_op=True)
    return work


def _multiplies(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Has the group's backend for this tensor's device a sum with a factor for each rank?"""
    return tensor.is_cuda and hasattr(dist, "_make_nccl_premul_sum") and "cuda:nccl" in dist.get_backend_config(group).lower().split(",")


def check_averageable(tensor: torch.Tensor, name: str) -> None:
    """Raises ValueError for what cannot be averaged in place, by name and with the way out. Of a DTensor: pass its shard."""
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} has layout {tensor.layout}: only dense tensors can be averaged in place")
    if not tensor.is_floating_point():
        raise ValueError(f"{name} has dtype {tensor.dtype}: only floating-point tensors have an average")
    if tensor.element_size() < 2:
        raise ValueError(
            f"{name} has dtype {tensor.dtype}, which has no arithmetic: leave it out of the optimizer, whose steps would not move it, or keep it "
            "in 16 bits"
        )
