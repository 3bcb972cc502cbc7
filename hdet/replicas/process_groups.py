"""From rank tables to process groups.

All ranks of the world compare what they ask for before any group is made.

`torch.distributed.new_group` waits for ever if ranks ask for different groups. So every constructor
here starts with one all_gather_object of a line of text a rank. A rank whose arguments are refused
takes part in it too: all ranks go on, or all raise.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .agreement import ReplicaDisagreement, digest, who_has
from .layout import Layout, Table, brief

Request = tuple[str, Any]
"""What one rank asks for: the arguments as people would write them, which must be equal on all
ranks; and plain data that only this rank knows."""


def together(name: str, ask: Callable[[], Request]) -> list[Any]:
    """What each rank of the world asks of the constructor ``name``: its own data, by rank.

    All ranks of the world call it.

    Raises:
        ValueError: there is no process group; or whatever ``ask`` raises, if it does so on all
            ranks.
        ReplicaDisagreement: on all ranks alike, if they do not ask for the same.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"{name} needs a process group: call torch.distributed.init_process_group first, or "
            "use Replicas.single()"
        )
    refusal: Exception | None = None
    try:
        call, own_data = ask()
        text = f"{name}{call}"
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not be left waiting
        refusal, own_data = error, None
        text = f"{name} refused with {type(error).__name__}: {error}"
    text = text if len(text) <= 400 else text[:400] + f"... [{digest(text):x}]"
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, (refusal is not None, text, own_data))
    refused, texts, own = zip(*said, strict=True)
    if refusal is not None and all(refused):
        raise refusal
    if len(set(texts)) > 1:
        raise ReplicaDisagreement(
            f"ranks ask for different replicas. {who_has(dict(enumerate(texts)))}. Call it on all "
            "ranks with the same arguments"
        ) from refusal
    return list(own)


Kind = TypeVar("Kind")


def build(
    kind: Callable[..., Kind], table: Table, existing: Callable[[], dist.ProcessGroup] | None = None
) -> Kind:
    """``kind(index, count, peer_group, ranks=, member=, world_group=)`` of this rank.

    All ranks of the world call it with one table.

    ``existing`` gives the group of this rank's peers where there is one already: on all ranks, or
    on none. Raises ValueError if this rank is in no replica; the groups of the others are made by
    then.
    """
    rank = dist.get_rank()
    place = {rank: (r, m) for r, replica in enumerate(table) for m, rank in enumerate(replica)}
    index, member = place.get(rank, (-1, -1))
    groups = make_groups(list(zip(*table, strict=True)) if existing is None else [])
    (world,) = make_groups([sorted(place)])
    if index < 0:
        raise ValueError(
            f"rank {rank} belongs to no replica, only ranks {brief(place)} do: leave it out of the "
            "training loop"
        )
    peers = existing() if existing is not None else groups[member]
    if len(place) == 1:
        return kind(0, 1, ranks=table)
    return kind(
        index,
        len(table),
        peers if len(table) > 1 else None,
        ranks=table,
        member=member,
        world_group=world,
    )


def make_groups(table: Sequence[Sequence[int]]) -> list[Any]:
    """A group for each list of ranks, in the order given there; torch's non-member for those that
    this rank is not in.

    Every rank of the world makes every group, also those that it is not in: NCCL may split them off
    the world's communicator, which all must do.
    """
    world = list(range(dist.get_world_size()))
    return [dist.group.WORLD if list(ranks) == world else _new_group(ranks) for ranks in table]


def own_group(
    table: Sequence[Sequence[int]], replicas: Sequence[Sequence[int]]
) -> dist.ProcessGroup:
    """The group in ``table`` that this rank is in: a new one, also where the whole world has one
    already. All ranks of all ``replicas`` call it with the same table."""
    apart = (
        sum(map(len, replicas)) < dist.get_world_size()
    )  # some ranks do not come here: members make their group among themselves
    rank = dist.get_rank()
    made = [(ranks, _new_group(ranks, apart)) for ranks in table if rank in ranks or not apart]
    return next(group for ranks, group in made if rank in ranks)


def _new_group(ranks: Sequence[int], apart: bool = False) -> dist.ProcessGroup:
    if list(ranks) == sorted(ranks):
        return dist.new_group(list(ranks), use_local_synchronization=apart)
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise ValueError(
            f"this torch ({torch.__version__}) sorts a group's ranks, and {brief(ranks)} are in "
            "another order: name them in theirs"
        )
    return dist.new_group(list(ranks), use_local_synchronization=apart, sort_ranks=False)


def layout_table(**sizes: Any) -> Table:
    """For `Replicas.from_layout`, on all ranks."""

    def ask() -> Request:
        Layout(dist.get_world_size(), **sizes)
        return f"({', '.join(f'{name}={value!r}' for name, value in sizes.items())})", None

    together("from_layout", ask)
    return Layout(dist.get_world_size(), **sizes).replicas


def listed_table(lists: Sequence[Sequence[int]]) -> Table:
    """For `Replicas.from_group` of lists, on all ranks."""

    def ask() -> Request:
        _check_lists(lists, dist.get_world_size())
        return f"({[list(ranks) for ranks in lists]})", None

    together("from_group", ask)
    return tuple(tuple(ranks) for ranks in lists)


def _check_lists(lists: Sequence[Sequence[int]], world: int) -> None:
    """Raises ValueError unless the lists share out all ranks of the world, equally many to each."""
    if not lists or not all(
        isinstance(ranks, (list, tuple, range)) and all(type(rank) is int for rank in ranks)
        for ranks in lists
    ):
        raise ValueError(
            "group must be a process group, or lists of rank numbers such as [[0, 1], [2, 3]], "
            f"got {lists!r}"
        )
    count = Counter(chain.from_iterable(lists))
    twice, strange = (
        [rank for rank in count if count[rank] > 1],
        [rank for rank in count if not 0 <= rank < world],
    )
    if twice:
        raise ValueError(
            f"group has ranks {brief(twice)} more than once: a rank belongs to one replica"
        )
    if strange:
        raise ValueError(
            f"group has ranks {brief(strange)}, but the world has ranks 0-{world - 1} only"
        )
    if len({len(ranks) for ranks in lists}) > 1:
        sizes = ", ".join(str(len(ranks)) for ranks in lists[:8])
        raise ValueError(f"group has lists of {sizes} ranks: all replicas must be of one size")
    if len(count) < world:
        missing = brief(set(range(world)) - set(count))
        raise ValueError(
            f"ranks {missing} are in none of the lists: name all, or give from_mesh a mesh of "
            "those that train"
        )
