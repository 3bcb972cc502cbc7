"""Torch's flat collectives under the names that this torch has, and a weighted sum."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def all_gather(output: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Write the ``own`` of all ranks into ``output``, one after the other."""
    # torch 2.13 renames it, and the former name warns.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, own, group=group)


def start_weighted_sum(tensor: torch.Tensor, weight: float, group: dist.ProcessGroup) -> dist.Work:
    """Begin tensor <- sum_r w_r tensor_r, in place.

    NCCL multiplies on the way (PREMUL_SUM); elsewhere it takes a pass of its own. Weight 0 means
    "nothing of this replica", which NaN * 0 would not be.
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
    if not (tensor.is_cuda and hasattr(dist, "_make_nccl_premul_sum")):
        return False
    return "cuda:nccl" in dist.get_backend_config(group).lower().split(",")
