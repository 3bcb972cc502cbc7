"""Who is a replica, as arithmetic on rank numbers: no torch, no processes (docs/layouts.md has the
same tables for people)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..core.validate import whole

Ranks = tuple[int, ...]
Table = tuple[Ranks, ...]
"""Rank numbers: of groups, or [replica][member]."""

_AXES = ("tp", "cp", "ep", "dp", "pp")
_EXPERT_AXES = {
    "ep": "ep",
    "etp": "tp",
    "edp": "dp",
}  # and what their places in the order are called
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
        for name in ("world", "tp", "cp", "ep", "pp", "shard", "etp"):
            if (name, getattr(self, name)) != ("etp", None):
                whole(getattr(self, name), name)
        self._check_order()
        dense = self.tp * self.cp * self.pp
        if self.world % dense:
            raise ValueError(
                f"{self.world} ranks are not divisible by tp {self.tp} * cp {self.cp} * pp "
                f"{self.pp} = {dense}: start a multiple of that, or change one of them"
            )
        if self._experts and self.world % (self._etp * self.ep * self.pp):
            raise ValueError(
                f"{self.world} ranks are not divisible by etp {self._etp} * ep {self.ep} * pp "
                f"{self.pp} = {self._etp * self.ep * self.pp}: "
                "start a multiple of that, or change one of them"
            )
        if self._experts and self.groups("pp") != _lines(self._expert_sizes(), ("pp",)):
            raise ValueError(
                f"order {self.order!r} gives expert layers other pipelines than the rest: put pp "
                "last, as in 'tp-cp-ep-dp-pp'"
            )
        copies = self.dp * self.cp
        if copies % self.shard:
            raise ValueError(
                f"shard {self.shard} does not divide dp {self.dp} * cp {self.cp} = {copies}: "
                "choose one that does"
            )
        if self.shard % self.cp and self.cp % self.shard:
            raise ValueError(
                f"shard {self.shard} cuts through groups of cp {self.cp} ranks, which work on one "
                "sample: choose a multiple of cp"
            )

    def _check_order(self) -> None:
        names = self.order.split("-") if isinstance(self.order, str) else []
        unknown = [name for name in names if name not in _AXES]
        if not names or unknown or len(set(names)) < len(names):
            problem = (
                f"it has {unknown[0]!r}" if unknown else "an axis occurs twice, or it is no text"
            )
            raise ValueError(
                f"order must be made of {', '.join(_AXES)}, each once, joined by '-', got "
                f"{self.order!r}: {problem}"
            )
        missing = [
            name
            for name in _AXES
            if name not in names and (name == "dp" or getattr(self, name) > 1)
        ]
        if missing:
            raise ValueError(
                f"order {self.order!r} lacks {' and '.join(missing)}: say where in it, as in "
                "'tp-cp-ep-dp-pp'"
            )

    @property
    def dp(self) -> int:
        """Copies of the layers without experts, times cp of them working on one sample: world / (tp
        cp pp)."""
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def _experts(self) -> bool:
        return self.ep > 1 or self.etp is not None

    @property
    def _etp(self) -> int:
        return self.tp if self.etp is None else self.etp

    def _sizes(self) -> dict[str, int]:
        """Of the layers without experts; the fastest axis first."""
        return {
            name: {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}.get(name, 1)
            for name in self.order.split("-")
        }

    def _expert_sizes(self) -> dict[str, int]:
        edp = self.world // (self._etp * self.ep * self.pp)
        return {
            name: {"tp": self._etp, "ep": self.ep, "dp": edp, "pp": self.pp}.get(name, 1)
            for name in self.order.split("-")
        }

    def groups(self, axis: str) -> Table:
        """All groups along one axis: tp, cp, dp, pp, shard; ep, etp and edp of expert layers (empty
        if there are none).

        Shards of experts need no axis of their own: they lie inside what `shard` and `ep` join.
        """
        if axis in _EXPERT_AXES:
            return _lines(self._expert_sizes(), (_EXPERT_AXES[axis],)) if self._experts else ()
        if axis == "shard":
            cut = range(0, self.dp * self.cp, self.shard)
            return tuple(
                line[i : i + self.shard]
                for line in _lines(self._sizes(), ("dp", "cp"))
                for i in cut
            )
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

    @property
    def peers(self) -> Table:
        """[member][replica]: ranks that hold the same part of the model, one in each replica;
        parameters are averaged over them."""
        return tuple(zip(*self.replicas, strict=True))

    @property
    def losses(self) -> Table:
        """[replica]: its ranks that see a loss, those of the last pipeline stage."""
        last = {group[-1] for group in self.groups("pp")}
        return tuple(tuple(rank for rank in replica if rank in last) for replica in self.replicas)

    @property
    def tied(self) -> Table:
        """Pairs of ranks of the first and the last stage, which both hold an embedding that is tied
        to the output; none without stages."""
        return tuple((group[0], group[-1]) for group in self.groups("pp") if self.pp > 1)


def closure(ranks: Iterable[int], groups: Iterable[Sequence[int]]) -> Table:
    """The smallest disjoint sets that no group sticks out of; each ascending, in the order of their
    first ranks."""
    home = {rank: {rank} for rank in ranks}
    for group in groups:
        for rank in group[1:]:
            large, small = sorted((home[group[0]], home[rank]), key=len, reverse=True)
            if large is not small:
                large |= small
                for moved in small:
                    home[moved] = large
    return tuple(
        sorted(
            tuple(sorted(members))
            for members in {id(members): members for members in home.values()}.values()
        )
    )


def paired(
    ranks: Iterable[int], sharing: Mapping[str, Table], copies: Mapping[str, Table]
) -> Table:
    """[replica][member] -> rank.

    ``sharing``: groups whose ranks belong to one replica; ``copies``: groups whose ranks hold
    the same parameters, within which peers must be found. Groups are lists of ranks in their
    order, by axis. Raises ValueError for replicas of unequal size or make, and for peers that do
    not hold the same parameters, as when a group was left out."""
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
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs[:most])
    more = sum(high - low + 1 for low, high in runs[most:])
    return f"{text} and {more} more" if more else text


def _lines(sizes: Mapping[str, int], along: Collection[str]) -> Table:
    """Groups of the ranks that differ only in the axes ``along``; ``sizes`` has the fastest axis
    first."""
    offsets, starts = (
        _offsets(sizes, along),
        _offsets(sizes, [name for name in sizes if name not in along]),
    )
    return tuple(tuple(start + offset for offset in offsets) for start in starts)


def _offsets(sizes: Mapping[str, int], names: Collection[str]) -> list[int]:
    """Rank numbers reached along the axes ``names`` from rank 0, ascending."""
    reached, stride = [0], 1
    for name, size in sizes.items():
        if name in names:
            reached = [rank + k * stride for k in range(size) for rank in reached]
        stride *= size
    return reached
