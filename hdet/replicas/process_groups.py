"""From rank tables to process groups.

`torch.distributed.new_group` waits for ever if ranks ask for different groups. So every constructor
first compares what ranks ask for, in one all_gather_object of a line of text a rank. A rank whose
arguments are refused takes part in it too: all ranks go on, or all raise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .agreement import ReplicaDisagreement, gathered, reachable, shortened, who_has
from .layout import Table, brief

Request = tuple[str, Any]
"""What one rank asks for: the arguments as people would write them, which must be equal on all
ranks; and plain data that only this rank knows."""


def check_initialised(name: str) -> None:
    """Raises ValueError where there are no processes for the constructor ``name``."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"{name} needs a process group: call torch.distributed.init_process_group first, or "
            "use Replicas.single()"
        )


def together(name: str, ask: Callable[[], Request]) -> list[Any]:
    """What each rank of the world asks of the constructor ``name``: its own data, by rank.

    All ranks of the world call it.

    Raises:
        ValueError: there is no process group; or whatever ``ask`` raises, if it does so on all
            ranks.
        ReplicaDisagreement: on all ranks alike, if they do not ask for the same.
    """
    check_initialised(name)
    refusal: Exception | None = None
    try:
        call, own_data = ask()
        text = f"{name}{call}"
    except Exception as error:  # noqa: BLE001 - the other ranks must not be left waiting
        refusal, own_data = error, None
        text = f"{name} refused with {type(error).__name__}: {error}"
    world: Any = dist.group.WORLD
    answers = gathered((refusal is not None, shortened(text, 400), own_data), world)
    refused, texts, data = zip(*answers.values(), strict=True)
    if refusal is not None and all(refused):
        raise refusal
    if len(set(texts)) > 1:
        raise ReplicaDisagreement(
            f"ranks ask for different replicas. {who_has(dict(enumerate(texts)))}. Call it on all "
            "ranks with the same arguments"
        ) from refusal
    return list(data)


Kind = TypeVar("Kind")


def build(
    kind: Callable[..., Kind], table: Table, existing: Callable[[], dist.ProcessGroup] | None = None
) -> Kind:
    """``kind(index, count, peer_group, ranks=, member=, world_group=)`` of this rank.

    All ranks of the world call it with one table, and make every group, also those that they are
    not in: NCCL may split them off the world's communicator, which all must do.

    ``existing`` gives the group of this rank's peers where there is one already: on all ranks, or
    on none. Raises ValueError if this rank is in no replica; the groups of the others are made by
    then.
    """
    own = dist.get_rank()
    place = {rank: (r, m) for r, replica in enumerate(table) for m, rank in enumerate(replica)}
    groups = [] if existing else [_group_of(peers) for peers in zip(*table, strict=True)]
    world = _group_of(sorted(place))
    if world is not dist.group.WORLD:
        _OWN_GROUPS.setdefault(dist.group.WORLD, {})[tuple(sorted(place))] = world
    if own not in place:
        raise ValueError(
            f"rank {own} belongs to no replica, only ranks {brief(place)} do: leave it out of the "
            "training loop"
        )
    if len(place) == 1:
        return kind(0, 1, ranks=table)
    index, member = place[own]
    peers = existing() if existing else groups[member]
    peers = peers if len(table) > 1 else None
    return kind(index, len(table), peers, ranks=table, member=member, world_group=world)


_OWN_GROUPS: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()


def own_group(ranks: Sequence[int]) -> Any:
    """The group of these ranks in which nobody but hdet communicates: what a loop sends, such as
    DDP, never meets it. Made in the first call, to which all of them come; it has the timeout that
    the default group has then."""
    world: Any = dist.group.WORLD
    key = tuple(sorted(ranks))
    known = _OWN_GROUPS.setdefault(world, {})
    if key not in known:
        device = torch.device("cpu") if "cpu:" in dist.get_backend_config() else reachable(world)
        timeout = None
        with suppress(AttributeError, RuntimeError):  # not every backend says
            timeout = world._get_backend(device).options._timeout
        apart = len(key) < dist.get_world_size()  # then others do not come here
        known[key] = dist.new_group(list(key), timeout, use_local_synchronization=apart)
    return known[key]


def _group_of(ranks: Sequence[int]) -> Any:
    if [*ranks] == [*range(dist.get_world_size())]:
        return dist.group.WORLD
    order: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
    if order and "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise ValueError(
            f"this torch ({torch.__version__}) sorts a group's ranks, and {brief(ranks)} are in "
            "another order: name them in theirs"
        )
    return dist.new_group(list(ranks), **order)


def listed_table(lists: Sequence[Sequence[int]]) -> Table:
    """For `Replicas.from_group` of lists, on all ranks."""

    def ask() -> Request:
        _check_lists(lists, dist.get_world_size())
        return f"({[list(ranks) for ranks in lists]})", None

    together("from_group", ask)
    return tuple(tuple(ranks) for ranks in lists)


def _check_lists(lists: Sequence[Sequence[int]], world: int) -> None:
    """Raises ValueError unless the lists share out all ranks of the world, equally many to each."""
    if not all(isinstance(ranks, Sequence) for ranks in lists):
        raise ValueError(
            "group must be a process group, or lists of rank numbers such as [[0, 1], [2, 3]], "
            f"got {lists!r}"
        )
    named = list(chain.from_iterable(lists))
    wrong = {rank for rank in {*named, *range(world)} if named.count(rank) != 1 or rank >= world}
    if wrong:
        raise ValueError(
            f"group must name each of the ranks 0-{world - 1} once, which is not so of ranks "
            f"{brief(wrong)}: name all, or give from_mesh a mesh of those that train"
        )
    sizes = [len(ranks) for ranks in lists]
    if len(set(sizes)) > 1:
        shown = ", ".join(map(str, sizes[:8]))
        raise ValueError(f"group has lists of {shown} ranks: all replicas must be of one size")
