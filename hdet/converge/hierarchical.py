"""Hierarchical: inside a node first, then one n-th of the bytes across nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..core.validate import whole
from ..replicas.process_groups import own_group
from .base import Averager, Averaging, Task
from .buckets import Buckets
from .collectives import all_gather, reduce_scatter


@dataclass(frozen=True)
class Hierarchical(Averaging):
    """Average exactly in three steps: reduce-scatter inside each node, all-reduce of one n-th
    across nodes, all-gather inside.

    Sends 2 (n - 1) / n * P bytes inside and 2 (m - 1) / m * P / n across the m = N / n nodes, a
    rank and cycle. Sums are taken in another order than by `Plain`, so results differ by rounding;
    they are bitwise equal on all replicas.

    Args:
        replicas_per_node: n, how many neighbouring replicas (r // n) share a node, or whatever
            has a fast network inside. It divides N.

    Example::

        sync = hdet.Sync(100, converge=hdet.converge.Hierarchical(replicas_per_node=8))
    """

    replicas_per_node: int

    def __post_init__(self) -> None:
        why = "with one replica a node there is one level, use Plain()"
        whole(self.replicas_per_node, "replicas_per_node", 2, why=why)

    def make_averager(self, task: Task) -> Averager:
        n, count = self.replicas_per_node, task.replicas.count
        if n >= count or count % n:
            raise ValueError(
                f"replicas_per_node={n} must divide the {count} replicas, and leave two nodes or "
                "more: use another divisor, or Plain()"
            )
        return _Hierarchical(task, n)


class _Hierarchical(Averager):
    def __init__(self, task: Task, n: int) -> None:
        super().__init__(task)
        self._n, ranks = n, task.replicas.ranks
        columns = [list(column) for column in zip(*ranks, strict=True)]
        nodes = [column[i : i + n] for column in columns for i in range(0, len(column), n)]
        across = [column[place::n] for column in columns for place in range(n)]
        self._inside, self._across = own_group(nodes, ranks), own_group(across, ranks)
        self._buckets = Buckets(task.parts, task.bucket_bytes, multiple=n)

    @torch.no_grad()
    def end_cycle(self, weights: Sequence[float]) -> list[str]:
        weight = float(weights[self.task.replicas.index])
        for filling in self._buckets.plan():
            flat = filling.pack(weight)
            own = torch.empty_like(flat[: len(flat) // self._n])
            reduce_scatter(own, flat, self._inside)
            dist.all_reduce(own, group=self._across)
            all_gather(flat, own, self._inside)
            filling.unpack()
        return []
