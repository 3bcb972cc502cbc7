"""What ranks must have alike, compared once; the error says what differs, and who has what."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from .layout import brief


class ReplicaDisagreement(RuntimeError):
    """Ranks were started with different settings, or have come to different calls.

    Every rank raises it, naming the setting or the call, and who has which.
    """


def digest(value: object) -> int:
    """Of its repr; below 2^40, so that the sum over a replica's ranks stays a whole number in
    float64."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:5], "big")


def reachable(group: dist.ProcessGroup | None, device: torch.device | None = None) -> torch.device:
    """``device``, or where ``group`` can talk: a group of NCCL alone takes no tensor of the CPU,
    where offloaded parameters are."""
    backends = dist.get_backend_config(group)
    if device is not None and f"{device.type}:" in backends:
        return device
    return (
        None if "cpu:" in backends else torch.accelerator.current_accelerator()
    ) or torch.device("cpu")


def who_has(values: Mapping[int, object], most: int = 4) -> str:
    """'ranks 0-2: a; rank 3: b', what most have first; ``values`` is by rank."""
    holders = _holders(values)
    shown = [
        f"{'ranks' if len(ranks) > 1 else 'rank'} {brief(ranks)}: {value}"
        for value, ranks in list(holders.items())[:most]
    ]
    more = len(holders) - most
    return "; ".join([*shown, f"and {more} more values"] if more > 0 else shown)


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}... [{digest(text):x}]"


MOST_ENTRIES = 64
Entries = Mapping[str, tuple[object, object]]
"""name -> (scope, value), both plain data. Ranks with the same scope must have the same value; the
scope of what all ranks share is ``()``."""


def compare(entries: Entries, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise `ReplicaDisagreement`, on all ranks of ``group`` alike, unless their entries agree.

    Digests are sent first, in one collective. Where they differ one rank for each value sends it,
    so that the message leads to the very number in a nested value. ``device``: this rank's.
    """
    differing = _differing(_gathered_digests(entries, group, device))
    if not differing:
        return
    tellers = {rank for marks in differing.values() for rank in _first_holders(marks).values()}
    known = {name: entries[name][1] for name in differing if name in entries}
    told = gathered(known if dist.get_rank() in tellers else {}, group, device)
    problems = []
    for name, marks in differing.items():
        first = _first_holders(marks)
        values = {r: told[first[mark]].get(name) for r, mark in marks.items() if mark in first}
        part, values = _narrowed(name, values)
        if not all(isinstance(value, dict) for value in values.values()):  # or what has settings
            values = {r: value.get("name", value) if isinstance(value, dict) else value
                      for r, value in values.items()}  # fmt: skip
        texts = {rank: shortened(str(value), 60) for rank, value in values.items()}
        problems.append(f"{part} differs between ranks: {who_has(texts)}")
    raise ReplicaDisagreement(
        ". ".join(problems) + ". Start all ranks with the same code, settings and model"
    )


def _gathered_digests(
    entries: Entries, group: dist.ProcessGroup, device: torch.device
) -> dict[int, dict[str, tuple[int, int]]]:
    """By rank and name: the digests of scope and value. Entries of another version of hdet, which
    is an entry itself, are left out."""
    rows = [[digest(name), digest(scope), digest(it)] for name, (scope, it) in entries.items()]
    own = torch.zeros(MOST_ENTRIES, 3, dtype=torch.int64)
    own[: len(rows)] = torch.tensor(rows)
    own = own.to(reachable(group, device))
    everyones = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, own, group=group)
    names = {digest(name): name for name in entries}
    return {
        rank: {names[name]: (scope, value) for name, scope, value in rows.tolist() if name in names}
        for rank, rows in zip(dist.get_process_group_ranks(group), everyones, strict=True)
    }  # fmt: skip


def gathered(
    value: object, group: dist.ProcessGroup, device: torch.device | None = None
) -> dict[int, Any]:
    """Every rank's, by its number in the world. Two collectives. ``device``: from which NCCL talks;
    None: the current one."""
    everyones: list[Any] = [None] * dist.get_world_size(group)
    # A loop need not have set the current device to its own.
    with torch.cuda.device(device.index if device and device.type == "cuda" else -1):
        dist.all_gather_object(everyones, value, group=group)
    return dict(zip(dist.get_process_group_ranks(group), everyones, strict=True))


def _differing(
    rows: Mapping[int, Mapping[str, tuple[int, int]]], most: int = 3
) -> dict[str, dict[int, int]]:
    """The first few entries that differ: digests of their values by rank, in the first scope in
    which they do."""
    marks: dict[tuple[str, int], dict[int, int]] = {}
    for rank, row in rows.items():
        for name, (scope, value) in row.items():
            marks.setdefault((name, scope), {})[rank] = value
    differing: dict[str, dict[int, int]] = {}
    for (name, _), values in marks.items():
        if len(set(values.values())) > 1:
            differing.setdefault(name, values)
    return dict(list(differing.items())[:most])


def _holders(values: Mapping[int, Any]) -> dict[Any, list[int]]:
    """Ranks by value, what most have first."""
    holders: dict[Any, list[int]] = {}
    for rank, value in values.items():
        holders.setdefault(value, []).append(rank)
    return dict(sorted(holders.items(), key=lambda item: (-len(item[1]), item[1])))


def _first_holders(marks: Mapping[int, int], most: int = 4) -> dict[int, int]:
    """The first rank that has each value, of the few that most have."""
    return {mark: ranks[0] for mark, ranks in list(_holders(marks).items())[:most]}


def _narrowed(name: str, values: dict[int, Any]) -> tuple[str, dict[int, Any]]:
    """Name and values, by rank, of the first part that all have and that differs."""
    first, *others = map(_keys, values.values())
    for key in (key for key in first if all(key in other for other in others)):
        parts = {rank: value[key] for rank, value in values.items()}
        if len(set(map(repr, parts.values()))) > 1:
            return _narrowed(f"{name}.{key}" if isinstance(key, str) else f"{name}[{key}]", parts)
    return name, values


def _keys(value: Any) -> list[Any]:
    if isinstance(value, list):
        return list(range(len(value)))
    return list(value) if isinstance(value, dict) else []
