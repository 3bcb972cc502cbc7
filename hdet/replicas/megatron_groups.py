"""Replicas of Megatron-Core's process groups: of any object with the names of its
ProcessGroupCollection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .layout import Table, grouped, paired
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
        firsts = {name: dist.get_process_group_ranks(group)[0] for name, group in own.items()}
        return "(groups)", {name: (firsts[name], dist.get_rank(own[name])) for name in own}

    rows = together("from_megatron", ask)
    found = {name: grouped(row.get(name) for row in rows) for name in (*_SHARING, *_COPIES)}
    copies = {name: found[name] for name in _COPIES if found[name]}
    table = paired(range(len(rows)), {name: found[name] for name in _SHARING}, copies)
    peers = set(zip(*table, strict=True))
    theirs = [name for name, groups_of in copies.items() if set(groups_of) == peers]
    return table, (lambda: getattr(groups, theirs[0])) if theirs else None


def _group(groups: Any, name: str) -> dist.ProcessGroup | None:
    """None: not parallel along it. It must not get as far as torch, to which None is the world."""
    group = getattr(groups, name, None)
    return None if group is dist.GroupMember.NON_GROUP_MEMBER else group
