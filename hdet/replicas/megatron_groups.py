"""Replicas of Megatron-Core's process groups: of any object with the names of its
ProcessGroupCollection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from .layout import Table, brief, paired
from .process_groups import Request, together

_SHARING = ("tp", "cp", "pp", "ep", "expt_tp", "embd")
_INSTANCE = (
    "intra_dist_opt",
    "intra_dp_cp",
    "intra_expt_dp",
)  # of the distributed optimizer: they share one copy of its state
_COPIES = ("inter_dist_opt", "expt_dp", "dp")  # they hold the same parameters


def megatron_table(
    groups: Any, distributed_optimizer: bool
) -> tuple[Table, Callable[[], dist.ProcessGroup] | None]:
    """For `Replicas.from_megatron`, on all ranks: [replica][member], and what gives this rank's
    peers, if one of the groups is theirs."""
    names = (*_SHARING, *_COPIES, *(_INSTANCE if distributed_optimizer else ()))
    rows = together("from_megatron", lambda: _request(groups, names, distributed_optimizer))
    found = {name: _groups([row.get(name) for row in rows], name) for name in names}
    sharing = {name: table for name, table in found.items() if name not in _COPIES}
    table = paired(
        range(len(rows)), sharing, {name: found[name] for name in _COPIES if found[name]}
    )
    peers = set(zip(*table, strict=True))
    name = next((name for name in _COPIES if set(found[name]) == peers), None)
    return table, None if name is None else lambda: getattr(
        groups, name
    )  # all ranks have said that it is there


def _request(groups: Any, names: Sequence[str], distributed_optimizer: bool) -> Request:
    """By name: who is first in this rank's group, this rank's place in it, its size; nothing where
    it has none."""
    if _group(groups, "dp") is None:
        raise ValueError(
            f"groups must have Megatron-Core's names, at least dp, got {type(groups).__name__} "
            "without: pass ProcessGroupCollection.use_mpu_process_groups()"
        )
    between = _group(groups, "inter_dist_opt")
    several = between is not None and dist.get_world_size(between) > 1
    if distributed_optimizer and not several:
        raise ValueError(
            "groups.inter_dist_opt is not there, or has one rank: a distributed optimizer of one "
            "instance keeps one copy of its state in the whole world, so there are no replicas. "
            "Start Megatron with --num-distributed-optimizer-instances N, N >= 2"
        )
    if several and not distributed_optimizer:
        raise ValueError(
            "groups.inter_dist_opt connects instances of a distributed optimizer: pass "
            "distributed_optimizer=True, or leave that group out"
        )
    own = {
        name: dist.get_process_group_ranks(group)
        for name in names
        if (group := _group(groups, name)) is not None
    }
    places = {
        name: (ranks[0], ranks.index(dist.get_rank()), len(ranks)) for name, ranks in own.items()
    }
    return f"(groups, distributed_optimizer={distributed_optimizer})", places


def _group(groups: Any, name: str) -> dist.ProcessGroup | None:
    """None: not parallel along it. It must not get as far as torch, to which None is the world."""
    group = getattr(groups, name, None)
    if group is None or group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    if isinstance(group, (list, tuple)):
        raise ValueError(
            f"groups.{name} is a list of {len(group)} groups: parts of a model with a layout of "
            "their own are not supported"
        )
    return group


def _groups(places: Sequence[tuple[int, int, int] | None], name: str) -> Table:
    """All ranks' groups of one name.

    Raises ValueError if ranks of one group know of different ones.
    """
    found: dict[tuple[int, int], dict[int, int]] = {}
    for rank, own in enumerate(places):
        if own is not None:
            first, place, size = own
            found.setdefault((first, size), {})[place] = rank
    for (_, size), members in found.items():
        if sorted(members) != list(range(size)):
            raise ValueError(
                f"groups.{name} of {size} ranks is known to ranks {brief(members.values())} only: "
                "set it on all of its ranks, None elsewhere"
            )
    return tuple(
        tuple(rank for _, rank in sorted(members.items())) for _, members in sorted(found.items())
    )
