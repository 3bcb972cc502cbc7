"""Replicas of Megatron-Core's process groups: of any object with the names of its
ProcessGroupCollection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from .layout import Table, paired
from .process_groups import Request, together

_SHARING = ("tp", "cp", "pp", "ep", "expt_tp", "embd")
_COPIES = ("expt_dp", "dp")  # they hold the same parameters


def megatron_table(groups: Any) -> tuple[Table, Callable[[], dist.ProcessGroup] | None]:
    """For `Replicas.from_megatron`, on all ranks: [replica][member], and what gives this rank's
    peers, if one of the groups is theirs."""

    def ask() -> Request:
        names = (*_SHARING, *_COPIES)
        own = {name: group for name in names if (group := _group(groups, name))}
        if "dp" not in own:
            raise ValueError(
                "groups must have Megatron-Core's names, at least dp, got "
                f"{type(groups).__name__} without: pass "
                "ProcessGroupCollection.use_mpu_process_groups()"
            )
        instances = _group(groups, "inter_dist_opt")
        if instances is not None and dist.get_world_size(instances) > 1:
            raise ValueError(
                "groups.inter_dist_opt connects instances of a distributed optimizer: set "
                "use_distributed_optimizer=False, or leave that group out"
            )
        return "(groups)", {name: _place(group) for name, group in own.items()}

    rows = together("from_megatron", ask)
    copies = {name: found for name in _COPIES if (found := _table(rows, name))}
    table = paired(range(len(rows)), {name: _table(rows, name) for name in _SHARING}, copies)
    peers = set(zip(*table, strict=True))
    theirs = [name for name, found in copies.items() if set(found) == peers]
    return table, (lambda: getattr(groups, theirs[0])) if theirs else None


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
