"""The replica group: index, count, and the process group that connects the same parameters of
different replicas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from .agreement import ReplicaDisagreement, digest, gathered, reachable, who_has
from .layout import Layout
from .megatron_groups import megatron_table
from .mesh import mesh_of_the_world, mesh_table
from .process_groups import build, check_initialised, listed_table, own_group, together

WIDTH = 32
"""Numbers of a replica in a small collective: the length of all of them is the same."""


@dataclass(eq=False, repr=False)
class Replicas:
    """N replicas. This process holds one, or a part of one (or, as `hdet.CoresidentReplicas`, all).

    Attributes:
        index: this replica's number, 0 .. count - 1.
        count: N.
        ranks: [replica][member] -> rank of the default group; member m of every replica holds the
            same part of the model. Empty if nothing is distributed.
        member: this process's place inside its replica.
        peer_group: the ``torch.distributed`` group of the ranks with this ``member`` number, in the
            order of their replicas: it averages parameters. None when there is one replica.
        world_group: all ranks of all replicas: it adds up the losses. None when this process is
            alone.

    Use `single`, `from_group`, `from_mesh`, `from_layout`, `from_megatron` or `default`.

    Example::

        replicas = hdet.Replicas.single()
        ensemble = hdet.Ensemble(optimizer, scheduler, replicas=replicas)
    """

    index: int
    count: int
    peer_group: dist.ProcessGroup | None = None
    _: KW_ONLY
    ranks: Sequence[Sequence[int]] = ()
    member: int = 0
    world_group: dist.ProcessGroup | None = None

    in_use = False
    """Has the model the weights of one of several local replicas for the moment?"""

    def __post_init__(self) -> None:
        index, count = self.index, self.count
        if not (isinstance(index, int) and isinstance(count, int) and 0 <= index < count):
            raise ValueError(
                f"index must be one of 0 .. count - 1, got index {index!r} of count {count!r}"
            )

    def __repr__(self) -> str:
        return f"Replicas(index={self.index}, count={self.count})"

    @classmethod
    def single(cls) -> Replicas:
        """One replica, no communication."""
        return cls(0, 1, None)

    @classmethod
    def from_group(
        cls, group: dist.ProcessGroup | Sequence[Sequence[int]] | None = None
    ) -> Replicas:
        """Each rank of ``group`` is a replica, as under DDP.

        None means the world. Right only if nothing else is parallel.

        Or ``group`` is a list of lists: the ranks of each replica. They share a rate and average
        their gradients among themselves as plain data parallelism does; HDET is between the lists.
        All ranks of the world call it with the same lists, which name each of them once.

        Raises:
            ValueError: no process group exists, this rank is not in ``group``, or the lists do not
                share out all ranks equally.
            ReplicaDisagreement: on all ranks, if they give different lists.
        """
        if isinstance(group, Sequence):
            return build(cls, listed_table(group))
        check_initialised("from_group")
        group = dist.group.WORLD if group is None else group
        index, count = dist.get_rank(group), dist.get_world_size(group)
        if index < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not a member of the group given to from_group: pass "
                "each rank the group it belongs to"
            )
        if count == 1:
            return cls(0, 1)
        ranks = [[rank] for rank in dist.get_process_group_ranks(group)]
        return cls(index, count, group, ranks=ranks, world_group=group)

    @classmethod
    def from_mesh(cls, mesh: Any, replicate: str | Sequence[str] = "dp_replicate") -> Replicas:
        """Replicas are numbered along the dimensions ``replicate`` of a DeviceMesh; its other
        dimensions lie inside a replica.

        HSDP and torchtitan's meshes are of this kind. The mesh may be a part of a larger one
        (``mesh["dp_replicate"]``), of which all ranks count. All ranks of the world call it, also
        those that the mesh leaves out. ``replicate=()``: the whole mesh is one replica.

        Raises:
            ValueError: there is no such dimension; or this rank is not in the mesh.
            ReplicaDisagreement: on all ranks, if they give different meshes or dimensions.
        """
        return build(cls, *mesh_table(mesh, replicate))

    @classmethod
    def from_layout(
        cls,
        tp: int = 1,
        cp: int = 1,
        ep: int = 1,
        pp: int = 1,
        order: str = "tp-cp-ep-dp-pp",
        *,
        etp: int | None = None,
        shard: int = 1,
    ) -> Replicas:
        """From the sizes of a layout, for code that makes its groups by hand;
        `hdet.replicas.layout.Layout` explains them.

        All ranks of the world call it with the same sizes.

        Raises:
            ValueError: the sizes do not go together.
            ReplicaDisagreement: on all ranks, if they give different sizes.
        """

        def layout() -> Layout:
            return Layout(dist.get_world_size(), tp, cp, ep, pp, order, etp, shard)

        together("from_layout", lambda: (f": {layout()}", None))
        return build(cls, layout().replicas)

    @classmethod
    def from_megatron(cls, groups: Any) -> Replicas:
        """From an object with the names of Megatron-Core's ProcessGroupCollection.

        ``dp`` must be there; of tp, cp, pp, ep, expt_tp, embd, expt_dp what is missing or None is
        not parallel. All ranks of the world call it. Instances of a distributed optimizer are said
        by ``from_layout(shard=...)``.

        Raises:
            ValueError: a group is missing or does not fit the others; a distributed optimizer.
            ReplicaDisagreement: on all ranks, if they ask for different things.
        """
        return build(cls, *megatron_table(groups))

    @classmethod
    def default(cls) -> Replicas:
        """The world if ``torch.distributed`` is initialised, else a single replica."""
        return cls.from_group() if dist.is_available() and dist.is_initialized() else cls.single()

    @classmethod
    def of_shards(cls, tensors: Iterable[torch.Tensor]) -> Replicas | None:
        """All ranks of the world as one replica, where tensors are sharded over a mesh of one
        dimension that is the world, as under plain FSDP2;
        None where they are not. An Ensemble asks for it by itself."""
        mesh = mesh_of_the_world(tensors)
        return None if mesh is None else cls.from_mesh(mesh, replicate=())

    # -- what this process holds: one replica here, several in a subclass --------------------------

    @property
    def local(self) -> Sequence[int]:
        """Numbers of the replicas in this process, in the order in which the methods below take and
        give them."""
        return (self.index,)

    def slot(self, replica: int | None) -> int:
        """Where ``replica`` stands in `local`; None means the one that runs.

        Raises:
            ValueError: this process does not hold it.
        """
        if replica not in (None, self.index):
            raise ValueError(
                f"replica is {replica!r}, but this process holds replica {self.index} alone: leave "
                "it out"
            )
        return 0

    def use(self, replica: int) -> AbstractContextManager[None]:
        """Inside, the model has this local replica's weights."""
        return nullcontext()

    def sets(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The same parameters of each local replica."""
        return [list(tensors)]

    def write_back(self) -> None:
        """Local replicas that are still to be copies of the model become what it is now."""

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises TypeError or ValueError for an optimizer that cannot step the local replicas."""

    def attach(self, optimizer: Optimizer) -> None:
        """Let ``optimizer`` step all local replicas; an `Ensemble` does this."""

    def detach(self) -> None:
        """The end of `attach`: the optimizer is not listened to any more."""

    @property
    def members(self) -> int:
        """Ranks of one replica."""
        return len(self.ranks[0]) if self.ranks else 1

    def check_group(self) -> None:
        """Raises RuntimeError if torch does not know the process groups any more."""
        for group in (self.world_group, self.peer_group):
            try:
                if group is not None:
                    dist.get_process_group_ranks(group)
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                raise RuntimeError(
                    f"the process group of replica {self.index} has been destroyed "
                    "(destroy_process_group), but an Ensemble still averages over it: "
                    "close() the Ensemble before, and make a new one after init_process_group"
                ) from error

    # -- hdet's own small collectives --------------------------------------------------------------

    moment = ""
    """Where this rank is in its run, such as "step 12"."""
    purpose = ""
    """Of the small collective that is under way, or has failed."""

    def sum_rows(self, *rows: torch.Tensor, purpose: str) -> torch.Tensor:
        """(width,) numbers for each local replica -> (N, width) float64, bitwise the same in all
        processes: the stats of a cycle.

        All ranks of a replica add to its row. A NaN stays in its own row, because the ranks of
        other replicas add zeros there. One all_reduce of N * `WIDTH` numbers, whatever is sent, and
        a second one of what does not fit. Each row begins with a digest of ``purpose``, `moment`
        and width, so that ranks notice that they are not in the same call.

        Raises:
            ReplicaDisagreement: on all ranks alike, if their purposes, moments or widths differ.
        """
        [row] = rows
        if self.world_group is None:
            rows_here = row.new_zeros(self.count, row.numel())
            rows_here[self.index] = row
            return rows_here
        ranks = dist.get_process_group_ranks(self.world_group)
        group = own_group(ranks)
        text, width = f"{purpose} at {self.moment}" if self.moment else purpose, row.numel()
        sent = torch.zeros(self.count, max(WIDTH, width + 1), dtype=torch.float64)
        sent[self.index, 0] = mark = float(digest((text, width)))
        device = reachable(group, row.device)
        sent = sent.to(device)
        sent[self.index, 1 : width + 1] = row.detach().to(device)
        head, rest = sent[:, :WIDTH].contiguous(), sent[:, WIDTH:].contiguous()
        self.purpose = text
        dist.all_reduce(head, group=group)
        head = head.cpu()
        self.purpose = ""
        if (head[:, 0] != mark * (len(ranks) // self.count)).any():
            asked = gathered((text, f"{text}, with {width} numbers"), group, device)
            is_same = len({short for short, _ in asked.values()}) == 1
            raise ReplicaDisagreement(
                "ranks are at different places. "
                f"{who_has({rank: said[is_same] for rank, said in asked.items()})}. Call step(), "
                "its closure, converge() and checkpoints on every rank alike, and give each as "
                "many batches"
            )
        if rest.numel():
            dist.all_reduce(rest, group=group)
        return torch.cat([head, rest.cpu()], dim=1)[:, 1 : width + 1]

    def meet(self, purpose: str) -> None:
        """Before collectives of other lengths. Raises `ReplicaDisagreement`, on all ranks alike,
        unless all have come for this ``purpose``."""
        self.sum_rows(*[torch.zeros(0)] * len(self.local), purpose=purpose)
