"""Process groups of a way of averaging, and torch's flat collectives under the names that this torch has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..replicas import Replicas

__all__ = ["all_gather", "make_group", "peers", "reduce_scatter"]


def peers(replicas: Replicas, member: int) -> list[int]:
    """Ranks of the default group that hold this part of the model, by replica."""
    return [replica[member] for replica in replicas.ranks]


def make_group(table: Sequence[Sequence[int]], replicas: Replicas) -> dist.ProcessGroup:
    """The group in ``table`` that this rank is in, in the order given there. All ranks of all replicas call it with the same table.

    Every rank makes every group, also those that it is not in: NCCL may split them off the world's communicator, which all must do.
    Where ranks of the world are in no replica, and so do not come here, the members of each group are among themselves.
    """
    apart = sum(map(len, replicas.ranks)) < dist.get_world_size()
    own = None
    for ranks in map(list, table):
        mine = dist.get_rank() in ranks
        if mine or not apart:
            group = dist.new_group(ranks, use_local_synchronization=apart, sort_ranks=ranks == sorted(ranks))
            own = group if mine else own
    assert own is not None, "this rank is in no group of the table"
    return own


def all_gather(output: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
    """output = the ``own`` of all ranks, one after the other."""
    _existing("all_gather_single", "all_gather_into_tensor")(output, own, group=group)


def reduce_scatter(own: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """own = this rank's part of the sum of all ``whole``."""
    _existing("reduce_scatter_single", "reduce_scatter_tensor")(own, whole, group=group)


def _existing(name: str, former: str) -> Any:
    """torch 2.13 renames these, and the former names warn."""
    return getattr(dist, name, None) or getattr(dist, former)
