"""Replicas of Megatron-Core's process groups: of any object with the names of its
ProcessGroupCollection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from .layout import Table, paired
from .process_groups import Request, together

_SHARING = ("tp", "cp", "pp", "ep", "expt_tp", "embd")
# Of the distributed optimizer: they share one copy of its state.
_INSTANCE = ("intra_dist_opt", "intra_dp_cp", "intra_expt_dp")
_COPIES = ("inter_dist_opt", "expt_dp", "dp")  # they hold the same parameters


def megatron_table(
    groups: Any, distributed_optimizer: bool
) -> tuple[Table, Callable[[], dist.ProcessGroup] | None]:
    """For `Replicas.from_megatron`, on all ranks: [replica][member], and what gives this rank's
    peers, if one of the groups is theirs."""
    sharing = (*_SHARING, *_INSTANCE) if distributed_optimizer else _SHARING

    def ask() -> Request:
        own = {name: group for name in (*sharing, *_COPIES) if (group := _group(groups, name))}
        _check(groups, own, distributed_optimizer)
        places = {name: _place(group) for name, group in own.items()}
        return f"(groups, distributed_optimizer={distributed_optimizer})", places

    rows = together("from_megatron", ask)
    copies = {name: found for name in _COPIES if (found := _table(rows, name))}
    table = paired(range(len(rows)), {name: _table(rows, name) for name in sharing}, copies)
    peers = set(zip(*table, strict=True))
    theirs = [name for name, found in copies.items() if set(found) == peers]
    return table, (lambda: getattr(groups, theirs[0])) if theirs else None


def _check(groups: Any, own: dict[str, Any], distributed_optimizer: bool) -> None:
    if "dp" not in own:
        raise ValueError(
            f"groups must have Megatron-Core's names, at least dp, got {type(groups).__name__} "
            "without: pass ProcessGroupCollection.use_mpu_process_groups()"
        )
    instances = dist.get_world_size(own["inter_dist_opt"]) if "inter_dist_opt" in own else 1
    if distributed_optimizer and instances == 1:
        raise ValueError(
            "groups.inter_dist_opt is not there, or has one rank: a distributed optimizer of one "
            "instance keeps one copy of its state in the whole world, so there are no replicas. "
            "Start Megatron with --num-distributed-optimizer-instances N, N >= 2"
        )
    if instances > 1 and not distributed_optimizer:
        raise ValueError(
            "groups.inter_dist_opt connects instances of a distributed optimizer: pass "
            "distributed_optimizer=True, or leave that group out"
        )


def _group(groups: Any, name: str) -> dist.ProcessGroup | None:
    """None: not parallel along it. It must not get as far as torch, to which None is the world."""
    group = getattr(groups, name, None)
    return None if group is dist.GroupMember.NON_GROUP_MEMBER else group


def _place(group: dist.ProcessGroup) -> tuple[int, int]:
    """Who is first in this rank's group, and this rank's place in it."""
    return dist.get_process_group_ranks(group)[0], dist.get_rank(group)


def _table(rows: Sequence[dict[str, tuple[int, int]]], name: str) -> Table:
    """All ranks' groups of one name."""
    groups: dict[int, dict[int, int]] = {}
    for rank, row in enumerate(rows):
        if name in row:
            first, place = row[name]
            groups.setdefault(first, {})[place] = rank
    return tuple(
        tuple(rank for _, rank in sorted(members.items())) for _, members in sorted(groups.items())
    )
