"""Who averages with whom, and torch's flat collectives under the names that this torch has."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..replicas import Replicas

__all__ = ["all_gather", "peers", "reduce_scatter"]


def peers(replicas: Replicas, member: int) -> list[int]:
    """Ranks of the default group that hold this part of the model, by replica."""
    return [replica[member] for replica in replicas.ranks]


def all_gather(output: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
    """output = the ``own`` of all ranks, one after the other."""
    _existing("all_gather_single", "all_gather_into_tensor")(output, own, group=group)


def reduce_scatter(own: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """own = this rank's part of the sum of all ``whole``."""
    _existing("reduce_scatter_single", "reduce_scatter_tensor")(own, whole, group=group)


def _existing(name: str, former: str) -> Any:
    """torch 2.13 renames these, and the former names warn."""
    return getattr(dist, name, None) or getattr(dist, former)
