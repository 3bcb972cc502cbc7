"""From rank tables to process groups. All ranks of the world compare what they ask for before any group is made.

`torch.distributed.new_group` waits for ever if ranks ask for different groups, so every constructor here starts with one all_gather of a
few whole numbers a rank, in which a rank whose arguments are refused takes part too: all ranks go on, or all raise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .layout import Layout, Ranks, Table, brief, paired

__all__ = ["ReplicaDisagreement", "Request", "build", "gathered", "layout_request", "lists_request", "megatron_table", "mesh_table", "together"]

_WIDTH = 48  # whole numbers that each rank sends, whatever it asks for: else ranks that ask for different things could not even compare

SHARING = ("tp", "cp", "pp", "ep", "expt_tp", "embd")
INSTANCE = ("intra_dist_opt", "intra_dp_cp", "intra_expt_dp")  # of Megatron's distributed optimizer: what shares one copy of its state
COPIES = ("inter_dist_opt", "expt_dp", "dp")


class ReplicaDisagreement(RuntimeError):
    """Ranks were started with different settings. Every rank raises it, naming the setting and who has which value."""


@dataclass(frozen=True)
class Request:
    """What one rank asks for."""

    call: str
    """As people would write it; must be equal on all ranks. Shown shortened."""
    numbers: Sequence[int] = ()
    """What only this rank knows."""


def gathered(numbers: Sequence[int], group: dist.ProcessGroup | None, device: torch.device | None = None) -> list[list[int]]:
    """Every rank's whole numbers, by its place in ``group`` (None: the world). One all_gather."""
    if device is None:
        # A group of NCCL alone takes no tensor of the CPU.
        on_cpu = "cpu:" in dist.get_backend_config(group)
        device = torch.device("cpu") if on_cpu else torch.accelerator.current_accelerator() or torch.device("cpu")
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    everyone = own.new_empty(dist.get_world_size(group), len(numbers))
    dist.all_gather(list(everyone.unbind(0)), own, group=group)
    return everyone.tolist()


def together(name: str, ask: Callable[[], Request]) -> list[list[int]]:
    """What each rank of the world asks for: its numbers, by rank. All ranks of the world call it.

    Raises:
        ValueError: there is no process group; or whatever ``ask`` raises, if it does so on all ranks.
        ReplicaDisagreement: on all ranks alike, if they do not ask for the same.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(f"{name} needs a process group: call torch.distributed.init_process_group first, or use Replicas.single()")
    refusal: Exception | None = None
    try:
        request = ask()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not be left waiting
        refusal, request = error, Request(f"{type(error).__name__}: {error}")
    digest = int.from_bytes(hashlib.sha256(f"{name} {request.call}".encode()).digest()[:7], "big")
    row = [int(refusal is not None), digest, *request.numbers]
    rows = gathered(row + [0] * (_WIDTH - len(row)), None)
    if refusal is not None and all(refused for refused, *_ in rows):
        raise refusal
    if len({tuple(row[:2]) for row in rows}) > 1:
        texts: list[str] = [""] * len(rows)
        dist.all_gather_object(texts, f"{name}{request.call if refusal is None else ', refused with ' + request.call}"[:400])
        raise ReplicaDisagreement(
            "ranks ask for different replicas: " + who_has(dict(enumerate(texts))) + ": call it on all ranks with the same arguments"
        )
    return [row[2:] for row in rows]


Value = TypeVar("Value")


def who_has(values: Mapping[int, Value], most: int = 4) -> str:
    """'ranks 0-2: a; rank 3: b', the rarest last; ``values`` is by rank."""
    holders: dict[Value, list[int]] = {}
    for rank, value in values.items():
        holders.setdefault(value, []).append(rank)
    by_number = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))
    shown = [f"{'ranks' if len(ranks) > 1 else 'rank'} {brief(ranks)}: {value}" for value, ranks in by_number[:most]]
    return "; ".join(shown + ([f"and {len(by_number) - most} more values"] if len(by_number) > most else []))


Kind = TypeVar("Kind")


def build(kind: Callable[..., Kind], table: Table, own_group: Callable[[Ranks], dist.ProcessGroup | None] = lambda peers: None) -> Kind:
    """``kind(index, count, peer_group, ranks=, member=, world_group=)`` of this rank. All ranks of the world call it with one table.

    ``own_group``: gives, for this rank's peers, a group that exists already; on all ranks or on none.

    Raises:
        ValueError: this rank is in no replica. The groups of the others are made by then.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    place = {rank: (r, m) for r, replica in enumerate(table) for m, rank in enumerate(replica)}
    index, member = place.get(rank, (-1, -1))
    columns = list(zip(*table, strict=True))
    peers = own_group(columns[member]) if index >= 0 else None
    if peers is None:
        groups = [_group(column, world) for column in columns]
        peers = groups[member]
    everyone = _group(sorted(place), world)
    if index < 0:
        raise ValueError(f"rank {rank} belongs to no replica, only ranks {brief(place)} do: leave it out of the training loop")
    return kind(index, len(table), peers, ranks=table, member=member, world_group=everyone)


def _group(ranks: Sequence[int], world: int) -> dist.ProcessGroup:
    """In the order of ``ranks``. Every rank of the world calls it, also those that are not in it, as NCCL's splitting demands."""
    if list(ranks) == list(range(world)):
        return dist.group.WORLD
    ascending = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
    return dist.new_group(list(ranks), **ascending)


def more_than_one(table: Table, name: str, remedy: str) -> Table:
    """Raises ValueError for a table without replicas; in a world of one process there is nothing else to be had."""
    if len(table) == 1 and len(table[0]) > 1:
        raise ValueError(
            f"{name} finds one replica, of ranks {brief(table[0])}: nothing can be explored. {remedy}. "
            "(Replicas.single() is for one process alone)"
        )
    return table


# -- lists of ranks, sizes -----------------------------------------------------------------------------------------------------------


def lists_request(lists: Sequence[Sequence[int]]) -> Request:
    """For groups of replicas' ranks given by hand."""
    return Request(f"({[list(ranks) for ranks in lists]})")


def checked_lists(lists: Sequence[Sequence[int]]) -> Table:
    """Raises ValueError unless the lists share out all ranks of the world, equally many in each."""
    world = dist.get_world_size()
    if not all(isinstance(rank, int) and not isinstance(rank, bool) for ranks in lists for rank in ranks):
        raise ValueError(f"from_group takes a process group, or lists of whole rank numbers such as [[0, 1], [2, 3]], got {lists!r}")
    table = tuple(tuple(ranks) for ranks in lists)
    named = [rank for ranks in table for rank in ranks]
    twice = {rank for rank in named if named.count(rank) > 1} if len(set(named)) < len(named) else set()
    if twice:
        raise ValueError(f"rank {brief(twice)} is in several lists, or in one twice: a rank belongs to one replica")
    if set(named) - set(range(world)):
        raise ValueError(f"there are no ranks {brief(set(named) - set(range(world)))}: the world has ranks 0-{world - 1}")
    if len({len(ranks) for ranks in table}) != 1 or not named:
        raise ValueError(f"the lists have {', '.join(str(len(ranks)) for ranks in table[:8])} ranks: give all replicas equally many")
    if len(named) < world:
        missing = brief(set(range(world)) - set(named))
        raise ValueError(f"ranks {missing} are in none of the lists: name every rank, or use from_mesh with a mesh of those that train")
    return more_than_one(table, "from_group", "Give one list for each replica, e.g. [[0, 1], [2, 3]]")


def layout_request(sizes: Mapping[str, Any]) -> tuple[Request, Layout]:
    """For `Replicas.from_layout`."""
    layout = Layout(dist.get_world_size(), **sizes)
    return Request(f"({', '.join(f'{name}={value!r}' for name, value in sizes.items())})"), layout


# -- meshes ------------------------------------------------------------------------------------------------------------------------------


def mesh_request(mesh: Any, replicate: str | Sequence[str]) -> Request:
    """Numbers: is this rank in the mesh, its replica, and who is first on its line along ``replicate``.

    A line is the ranks that differ in the replicating dimensions only. From these numbers of all ranks the table follows for every kind of
    mesh, also for one dimension of a larger one, whose other dimensions then lie inside a replica.
    """
    names = (replicate,) if isinstance(replicate, str) else tuple(replicate)
    if not (hasattr(mesh, "mesh_dim_names") and hasattr(mesh, "get_coordinate")):
        raise ValueError(f"mesh must be a torch.distributed.device_mesh.DeviceMesh, got {type(mesh).__name__}")
    known = tuple(mesh.mesh_dim_names or ())
    unknown = [name for name in names if name not in known]
    if unknown or not names or len(set(names)) < len(names):
        have = f"has dimensions {', '.join(known)}" if known else "has no names: give init_device_mesh mesh_dim_names"
        raise ValueError(f"replicate is {replicate!r}, but the mesh {have}: name those along which parameters are replicated")
    root = _root(mesh)
    shape = ", ".join(f"{name}={size}" for name, size in zip(root.mesh_dim_names or (), root.mesh.shape, strict=False))
    ranks = root.mesh.flatten().tolist()
    digest = hashlib.sha256(repr((root.mesh.tolist(), known, tuple(mesh.mesh.shape))).encode()).hexdigest()[:8]
    call = f"(mesh ({shape}) of ranks {brief(ranks)} [{digest}], replicate={replicate!r})"
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Request(call, (0, 0, 0))
    index, first = 0, list(coordinate)
    for k, name in enumerate(known):
        if name in names:
            index = index * mesh.mesh.shape[k] + coordinate[k]
            first[k] = 0
    return Request(call, (1, index, int(mesh.mesh[tuple(first)])))


def mesh_table(rows: Sequence[Sequence[int]]) -> Table:
    """[replica][member], members in the order of their lines' first ranks."""
    lines: dict[int, dict[int, int]] = {}
    for rank, (taking_part, index, first, *_) in enumerate(rows):
        if taking_part:
            lines.setdefault(first, {})[index] = rank
    count = max((len(line) for line in lines.values()), default=0)
    if any(sorted(line) != list(range(count)) for line in lines.values()):
        raise ValueError("the mesh is not the same on all ranks: build it on every rank with the same arguments")
    table = tuple(tuple(lines[first][r] for first in sorted(lines)) for r in range(count))
    remedy = "Build a mesh with a replicating dimension larger than 1, such as init_device_mesh(type, (2, 4), mesh_dim_names=(...))"
    return more_than_one(table, "from_mesh", remedy + ", and shard along the other one only")


def mesh_group(mesh: Any, replicate: str | Sequence[str]) -> Callable[[Ranks], dist.ProcessGroup | None]:
    """The mesh has a group for each of its dimensions; its ranks are ascending."""
    names = (replicate,) if isinstance(replicate, str) else tuple(replicate)

    def own(peers: Ranks) -> dist.ProcessGroup | None:
        return mesh.get_group(names[0]) if len(names) == 1 else None

    return own


def _root(mesh: Any) -> Any:
    ask = getattr(mesh, "_get_root_mesh", None)  # not public; without it a submesh cannot be told from a mesh of its own
    return ask() if callable(ask) else mesh


# -- Megatron-Core's groups ---------------------------------------------------------------------------------------------------------


def megatron_names(distributed_optimizer: bool) -> tuple[str, ...]:
    return (*SHARING, *COPIES, *(INSTANCE if distributed_optimizer else ()))


def megatron_request(groups: Any, distributed_optimizer: bool) -> Request:
    """Numbers of each kind of group: who is first in this rank's, this rank's place in it, its size (0: it has none)."""
    if _group_of(groups, "dp") is None:
        raise ValueError(
            f"groups must have Megatron-Core's names, at least dp (tp, cp, pp, ep, expt_tp, expt_dp where used), got {type(groups).__name__} "
            "without dp: pass ProcessGroupCollection.use_mpu_process_groups()"
        )
    instances = _group_of(groups, "inter_dist_opt")
    several = instances is not None and dist.get_world_size(instances) > 1
    if distributed_optimizer and not several:
        raise ValueError(
            "groups.inter_dist_opt is not there or has one rank: a distributed optimizer of one instance keeps one copy of its state in the "
            "whole world, so there are no replicas: start Megatron with --num-distributed-optimizer-instances N, N >= 2"
        )
    if several and not distributed_optimizer:
        raise ValueError(
            "groups.inter_dist_opt connects instances of a distributed optimizer: pass distributed_optimizer=True, or leave that group out"
        )
    numbers: list[int] = []
    for name in megatron_names(distributed_optimizer):
        group = _group_of(groups, name)
        ranks = [] if group is None else dist.get_process_group_ranks(group)
        numbers += [ranks[0], ranks.index(dist.get_rank()), len(ranks)] if ranks else [0, 0, 0]
    return Request(f"(groups, distributed_optimizer={distributed_optimizer})", numbers)


def megatron_table(rows: Sequence[Sequence[int]], distributed_optimizer: bool) -> tuple[Table, dict[str, Table]]:
    """The replicas, and all groups by name, from every rank's numbers."""
    found = {name: _groups(rows, 3 * k, name) for k, name in enumerate(megatron_names(distributed_optimizer))}
    sharing = {name: groups for name, groups in found.items() if name in SHARING + INSTANCE}
    table = paired(range(len(rows)), sharing, {name: groups for name, groups in found.items() if name in COPIES and groups})
    remedy = (
        "Give the distributed optimizer several instances (--num-distributed-optimizer-instances N) that do not cut through groups of cp or ep"
        if distributed_optimizer
        else "Start more ranks, or fewer in tp, cp, pp and ep"
    )
    return more_than_one(table, "from_megatron", remedy), found


def megatron_group(groups: Any, table: Table, found: Mapping[str, Table]) -> Callable[[Ranks], dist.ProcessGroup | None]:
    """Megatron may have made the groups of peers already, under one of these names."""
    peers = set(zip(*table, strict=True))
    name = next((name for name in COPIES if set(found.get(name, ())) == peers), None)
    return lambda own: None if name is None else _group_of(groups, name)


def _group_of(groups: Any, name: str) -> dist.ProcessGroup | None:
    """None means: not parallel along it. Never the world, which None would mean to torch."""
    group = getattr(groups, name, None)
    if group is None or group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    if isinstance(group, (list, tuple)):
        raise ValueError(f"groups.{name} is a list of {len(group)} groups: encoders with a layout of their own are not supported")
    return group


def _groups(rows: Sequence[Sequence[int]], start: int, name: str) -> Table:
    found: dict[int, dict[int, int]] = {}
    for rank, row in enumerate(rows):
        first, place, size = row[start : start + 3]
        if size:
            found.setdefault(first, {})[place] = rank
            if found[first][place] != rank or first > rank:
                raise ValueError(f"groups.{name} of rank {rank} does not fit the other ranks': make it on all ranks with the same arguments")
    sizes = {first: row[start + 2] for row in rows for first in (row[start],) if row[start + 2]}
    for first, members in found.items():
        if sorted(members) != list(range(sizes[first])):
            raise ValueError(
                f"groups.{name} with ranks {brief(members.values())} is known to some of its ranks only: set it on all of them, None elsewhere"
            )
    return tuple(tuple(found[first][place] for place in sorted(found[first])) for first in sorted(found))
