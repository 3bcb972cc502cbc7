"""What all ranks must have alike, compared in one small collective; the error says who has what."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from .layout import brief


class ReplicaDisagreement(RuntimeError):
    """Ranks were started with different settings.

    Every rank raises it, naming the setting and who has which value.
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


Value = TypeVar("Value")


def gathered(
    numbers: Sequence[int], group: dist.ProcessGroup | None, device: torch.device | None = None
) -> list[list[int]]:
    """Every rank's whole numbers, by its place in ``group`` (None: the world).

    One all_gather, on ``device`` if the group can.
    """
    own = torch.tensor(numbers, dtype=torch.int64, device=reachable(group, device))
    everyone = own.new_empty(dist.get_world_size(group), len(numbers))
    dist.all_gather(list(everyone.unbind(0)), own, group=group)
    return everyone.tolist()


def who_has(values: Mapping[int, Value], most: int = 4) -> str:
    """'ranks 0-2: a; rank 3: b', what most have first; ``values`` is by rank."""
    holders: dict[Value, list[int]] = {}
    for rank, value in values.items():
        holders.setdefault(value, []).append(rank)
    ordered = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))
    shown = [
        f"{'ranks' if len(ranks) > 1 else 'rank'} {brief(ranks)}: {value}"
        for value, ranks in ordered[:most]
    ]
    return "; ".join(
        shown + ([f"and {len(ordered) - most} more values"] if len(ordered) > most else [])
    )


def compare(
    place: tuple[int, int],
    ranks: Sequence[Sequence[int]],
    common: Mapping[str, int],
    by_member: Mapping[str, int],
    orders: Mapping[str, tuple[int, int]],
    group: dist.ProcessGroup,
    device: torch.device | None,
) -> None:
    """See `Replicas.require_agreement`. ``place``: this rank's (replica, member)."""
    common = {
        "the number of replicas and their ranks (digest)": digest(
            [list(replica) for replica in ranks]
        ),
        **common,
    }
    names = [*common, *by_member, *orders]
    row = [
        digest(names),
        *place,
        len(ranks[0]) if ranks else 1,
        *common.values(),
        *by_member.values(),
    ]
    row += [order for _, order in orders.values()] + [things for things, _ in orders.values()]
    # Of a fixed width: ranks of another version may have another number of settings, and would else
    # be cut off or waited for.
    rows = gathered(row + [0] * (-len(row) % 64), group, device)
    said = dict(zip(dist.get_process_group_ranks(group), rows, strict=True))
    problems = _misfits(said)
    for k, name in enumerate([] if problems else names, start=4):
        alike: dict[
            tuple[int, ...], dict[int, int]
        ] = {}  # by what ranks share that are to have the same value
        for rank, row in said.items():
            shared = (
                ()
                if name in common
                else (row[2],)
                if name in by_member
                else (row[2], row[k + len(orders)])
            )
            alike.setdefault(shared, {})[rank] = row[k]
        differing = next(
            (found for _, found in sorted(alike.items()) if len(set(found.values())) > 1), None
        )
        if differing is not None:
            where = (
                "replicas' ranks"
                if name in common
                else "replicas, among ranks with the same part of the model"
            )
            problems.append(f"{name} differs between {where}: {who_has(differing)}")
    if problems:
        raise ReplicaDisagreement(
            ". ".join(problems) + ". Start all ranks with the same code, settings and model"
        )


def _misfits(said: Mapping[int, Sequence[int]]) -> list[str]:
    """Ranks that do not even compare the same things, or stand at one place."""
    for k, what in (
        (0, "the settings to compare differ between replicas' ranks: several versions of hdet?"),
        (3, "the number of ranks in a replica differs between replicas' ranks"),
    ):
        values = {rank: row[k] for rank, row in said.items()}
        if len(set(values.values())) > 1:
            return [f"{what}: {who_has(values)}"]
    at: dict[tuple[int, int], list[int]] = {}
    for rank, row in said.items():
        at.setdefault((row[1], row[2]), []).append(rank)
    return [
        f"ranks {brief(who)} all are member {m} of replica {r}"
        for (r, m), who in sorted(at.items())
        if len(who) > 1
    ][:4]
