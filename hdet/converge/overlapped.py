"""Overlapped: training goes on while the average travels (the delta rule)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..core.validate import whole
from ..replicas.process_groups import own_group
from .base import Average, Task, peers
from .plain import PlainAverage


@dataclass(frozen=True)
class Overlapped:
    """The average of the cycle's end is taken while the next ``steps`` steps run, and then theta += mean - snapshot.

    ``steps``: tau, 1 .. T - 1. With theta_r(0) at the cycle's end, after step tau of the next one

        theta_r <- theta_r(tau) + sum_q w_q theta_q(0) - theta_r(0),

    the mean plus what this replica has done since. So replicas are never all equal: they keep the displacements of tau steps
    (`Ensemble.converge` makes them equal). A cycle in which a replica is left out ends with the plain average, so that it trains on with the mean.

    Sends as many bytes as `Plain`, on a communicator of its own. Extra memory: twice the parameters in fp32.
    """

    steps: int

    def __post_init__(self) -> None:
        whole(self.steps, "steps", why="without steps to hide behind use Plain()")

    def build(self, task: Task) -> Average:
        """Raises ValueError unless the average can be done before the next one begins."""
        if self.steps >= task.sync_interval:
            raise ValueError(
                f"steps={self.steps} must be less than sync_interval={task.sync_interval}: an average is to be applied before the next begins"
            )
        return PlainAverage(task) if task.replicas.count == 1 else _Overlapped(task, self.steps)


class _Overlapped(PlainAverage):
    keeps_state = True

    def __init__(self, task: Task, steps: int) -> None:
        super().__init__(task)
        self._index, self._steps = task.replicas.index, steps
        # A communicator of its own: on a shared one the gradients of the next steps would queue behind the average.
        self._group = own_group([peers(task.replicas, member) for member in range(task.replicas.members)], task.replicas.ranks)
        self._snapshots = self._make_buckets(keep=True)
        self._sums: list[torch.Tensor] = []
        self._works: list[Any] = []

    def _forget(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self.idle = [], True

    def acts_after(self, position: int) -> bool:
        return position >= self._steps and bool(self._works)

    def after_step(self, position: int) -> list[str]:
        self._apply()
        return []

    @torch.no_grad()
    def end_cycle(self, weights: Sequence[float]) -> list[str]:
        self._apply()  # of a cycle that the run's end cuts short
        if notes := self._average_at_once(weights, ""):  # steps on its own values would spoil its moments and the next snapshot
            return notes
        fillings = self._snapshots.plan()
        if not self._sums:
            self._sums = [torch.empty_like(filling.flat) for filling in fillings]
        for filling, total in zip(fillings, self._sums, strict=True):
            torch.mul(filling.gather(), float(weights[self._index]), out=total)
            self._works.append(dist.all_reduce(total, group=self._group, async_op=True))
        self.idle = False
        return []

    @torch.no_grad()
    def _apply(self) -> None:
        """Wait for what is under way and apply the delta rule. On CUDA the wait orders streams, and the host goes on."""
        works, self._works = self._works, []
        if not works:
            return
        for filling, mean, work in zip(self._snapshots.plan(), self._sums, works, strict=True):
            work.wait()
            mean.sub_(filling.flat)  # which has been the snapshot until here
            filling.gather().add_(mean)
            filling.expect()
            filling.scatter()

    def complete(self, weights: Sequence[float]) -> None:
        self._apply()
        super().complete(weights)

    def close(self) -> None:
        super().close()
        self._sums = []
