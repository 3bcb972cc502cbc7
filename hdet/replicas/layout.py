"""Who is a replica, as arithmetic on rank numbers, without processes (docs/ranks.md has the same
tables for people)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import prod

import torch

from ..core.validate import whole

Ranks = tuple[int, ...]
Table = tuple[Ranks, ...]
"""Rank numbers: of groups, or [replica][member]."""

_AXES = ("tp", "cp", "ep", "dp", "pp")
_EXPERT_AXES = {"ep": "ep", "etp": "tp", "edp": "dp"}
"""Axes of expert layers, and whose places in the order they have."""
_SHARING = ("tp", "cp", "pp", "ep", "etp", "shard")


@dataclass(frozen=True)
class Layout:
    """Numbers every rank of a hybrid-parallel job, as Megatron-Core and meshes in the same order
    do.

    rank = sum over the axes of coordinate * stride, where the axis named first in ``order`` has
    stride 1. Layers without experts are laid out over tp, cp, dp, pp; expert layers over etp, ep,
    edp, pp on the same ranks, in the same order (cp and dp are theirs to use).

    Args:
        world: number of ranks.
        tp, cp, ep, pp: ranks that split layers, sequences, experts, and the depth of the model. dp
            = world / (tp cp pp) follows.
        order: the axes, the one whose ranks are neighbours first.
        etp: ranks that split one expert; default tp, if there are experts (ep > 1).
        shard: consecutive ranks of dp * cp that share one copy of the parameters or of the
            optimizer's state: the shard degree of HSDP, or dp * cp / (number of instances of
            Megatron's distributed optimizer). 1: each keeps all of it.

    Raises:
        ValueError: the sizes do not go together; the message names the way out.
    """

    world: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    order: str = "tp-cp-ep-dp-pp"
    etp: int | None = None
    shard: int = 1

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("world", "tp", "cp", "ep", "pp", "shard")}
        for name, size in (sizes | {"etp": self._etp}).items():
            whole(size, name)
        named = self.order.split("-")
        needed = {"dp", *(axis for axis in _AXES if sizes.get(axis, 1) > 1)}
        if len(set(named)) < len(named) or not needed <= set(named) <= set(_AXES):
            raise ValueError(
                f"order must name {', '.join(sorted(needed))} once each, of the axes "
                f"{', '.join(_AXES)}, as in 'tp-cp-ep-dp-pp', got {self.order!r}"
            )
        self._check_divisible({"tp": self.tp, "cp": self.cp, "pp": self.pp})
        if self._has_experts:
            self._check_divisible({"etp": self._etp, "ep": self.ep, "pp": self.pp})
            if self.groups("pp") != _lines(self._sizes(experts=True), ("pp",)):
                raise ValueError(
                    f"order {self.order!r} gives expert layers other pipelines than the rest: put "
                    "pp last, as in 'tp-cp-ep-dp-pp'"
                )
        cuts_samples = self.shard % self.cp and self.cp % self.shard
        if self.dp * self.cp % self.shard or cuts_samples:
            raise ValueError(
                f"shard {self.shard} must divide dp {self.dp} * cp {self.cp}, and not cut through "
                "groups of cp ranks, which work on one sample: choose a multiple of cp that does"
            )

    def _check_divisible(self, sizes: Mapping[str, int]) -> None:
        product = prod(sizes.values())
        if self.world % product:
            named = " * ".join(f"{name} {size}" for name, size in sizes.items())
            raise ValueError(
                f"{self.world} ranks are not divisible by {named} = {product}: start a multiple of "
                "that, or change one of them"
            )

    @property
    def dp(self) -> int:
        """Copies of the layers without experts, times cp of them working on one sample: world / (tp
        cp pp)."""
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def _has_experts(self) -> bool:
        return self.ep > 1 or self.etp is not None

    @property
    def _etp(self) -> int:
        return self.tp if self.etp is None else self.etp

    def _sizes(self, experts: bool = False) -> dict[str, int]:
        """By axis, the fastest first."""
        if experts:
            edp = self.world // (self._etp * self.ep * self.pp)
            sizes = {"tp": self._etp, "ep": self.ep, "dp": edp, "pp": self.pp}
        else:
            sizes = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        return {axis: sizes.get(axis, 1) for axis in self.order.split("-")}

    def groups(self, axis: str) -> Table:
        """All groups along one axis: tp, cp, dp, pp, shard; ep, etp and edp of expert layers (empty
        if there are none).

        Shards of experts need no axis of their own: they lie inside what `shard` and `ep` join.
        """
        if axis in _EXPERT_AXES:
            sizes = self._sizes(experts=True)
            return _lines(sizes, (_EXPERT_AXES[axis],)) if self._has_experts else ()
        if axis == "shard":
            ranks = torch.tensor(_lines(self._sizes(), ("dp", "cp")))
            return _table(ranks.view(-1, self.shard))
        if axis not in ("tp", "cp", "dp", "pp"):
            raise ValueError(
                f"axis must be one of tp, cp, dp, pp, shard, ep, etp, edp, got {axis!r}"
            )
        return _lines(self._sizes(), (axis,))

    @cached_property
    def replicas(self) -> Table:
        """[replica][member]: the smallest sets of ranks closed under every group that shares model
        state or one sample's forward pass."""
        sharing = {axis: self.groups(axis) for axis in _SHARING}
        return paired(
            range(self.world), sharing, {axis: self.groups(axis) for axis in ("dp", "edp")}
        )


def grouped(places: Iterable[tuple[int, int] | None]) -> Table:
    """Groups, from what each rank says: the first rank of its group, and its own place there. None:
    it is in none."""
    groups: dict[int, dict[int, int]] = {}
    for rank, place in enumerate(places):
        if place is not None:
            groups.setdefault(place[0], {})[place[1]] = rank
    return tuple(tuple(group[at] for at in sorted(group)) for _, group in sorted(groups.items()))


def closure(ranks: Iterable[int], groups: Iterable[Sequence[int]]) -> Table:
    """The smallest disjoint sets that no group sticks out of; each ascending, in the order of their
    first ranks."""
    home = {rank: {rank} for rank in ranks}
    for group in groups:
        joined = set().union(*(home[rank] for rank in group))
        home.update(dict.fromkeys(joined, joined))
    distinct = {id(members): members for members in home.values()}
    return tuple(sorted(tuple(sorted(members)) for members in distinct.values()))


def paired(
    ranks: Iterable[int], sharing: Mapping[str, Table], copies: Mapping[str, Table]
) -> Table:
    """[replica][member] -> rank, from groups of ranks by axis: of those in ``sharing`` each lies in
    one replica, in those of ``copies`` ranks hold the same parameters.

    Raises ValueError for replicas of unequal size or make, and for peers that do not hold the same
    parameters, as when a group was left out.
    """
    replicas = closure(ranks, (group for groups in sharing.values() for group in groups))
    sizes = {len(replica) for replica in replicas}
    if len(sizes) > 1:
        small, large = min(replicas, key=len), max(replicas, key=len)
        raise ValueError(
            f"replicas are of unequal size: ranks {brief(small)} and ranks {brief(large)}: lay all "
            "of them out alike, or give all groups"
        )
    place = {rank: (r, m) for r, replica in enumerate(replicas) for m, rank in enumerate(replica)}
    for axis, groups in sharing.items():
        made: list[set[Ranks]] = [set() for _ in replicas]
        for group in groups:
            made[place[group[0]][0]].add(tuple(place[rank][1] for rank in group))
        odd = next((r for r in range(1, len(replicas)) if made[r] != made[0]), None)
        if odd is not None:
            raise ValueError(
                f"ranks {brief(replicas[0])} and ranks {brief(replicas[odd])} have {axis} groups "
                "at different places, so it is not known whose parameters to average with whose: "
                "lay all replicas out alike, ranks ascending"
            )
    for axis, groups in copies.items():
        group_of = {rank: g for g, group in enumerate(groups) for rank in group}
        for peers in zip(*replicas, strict=True):
            if len({group_of.get(rank) for rank in peers}) > 1:
                raise ValueError(
                    f"ranks {brief(peers)} are at the same place of their replicas, but not in one "
                    f"{axis} group, so they hold different "
                    "parameters: a group that ties ranks to one replica is missing (tp, cp, pp, "
                    "ep, expt_tp), or replicas differ in layout"
                )
    return replicas


def brief(ranks: Collection[int], most: int = 8) -> str:
    """'0-3, 8, 10-11': ascending; what is beyond ``most`` runs is counted only."""
    # Neighbours in a run are as far from their places in the order.
    by_run = groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])
    runs = [[rank for _, rank in run] for _, run in by_run]
    text = ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs[:most])
    more = sum(map(len, runs[most:]))
    return f"{text} and {more} more" if more else text


def _lines(sizes: Mapping[str, int], along: Collection[str]) -> Table:
    """Groups of the ranks that differ only in the axes ``along``; ``sizes`` has the fastest axis
    first."""
    axes = list(sizes)[::-1]
    ranks = torch.arange(prod(sizes.values())).view([sizes[axis] for axis in axes])
    last = sorted(range(len(axes)), key=lambda k: axes[k] in along)
    return _table(ranks.permute(last).reshape(-1, prod(sizes.get(axis, 1) for axis in along)))


def _table(ranks: torch.Tensor) -> Table:
    return tuple(map(tuple, ranks.tolist()))
