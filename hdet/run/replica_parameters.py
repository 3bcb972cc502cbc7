"""The parameters of the replicas on this rank: averaged, kept tied, taken back.

Between these, the optimizer owns them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..controllers.softmax import softmax_weights
from ..converge import Averager, Task
from ..core.divergence import Divergence
from ..policies import Sync
from ..replicas import ReplicaDisagreement, Replicas
from ..replicas.agreement import digest
from ..tensors.buffers import ReplicaTensors
from ..tensors.dtensor import local_parts, reshard
from .cycle_stats import LocalReplica, local_replicas
from .moments import Moments
from .snapshot import CycleStarts

__all__ = ["ReplicaWeights", "check_tied"]


class ReplicaWeights:
    """What an `Ensemble` does to parameters.

    Args:
        tensors: parameters, then buffers; DTensors stand for their shards.
        sync: its ``converge`` is unused if one process holds all replicas, whose optimizer averages
            them.
        modules: what is known to hold these parameters.
    """

    def __init__(
        self,
        tensors: ReplicaTensors,
        optimizer: Optimizer,
        replicas: Replicas,
        sync: Sync,
        divergence: Divergence,
        modules: Sequence[nn.Module] = (),
    ) -> None:
        self.tensors, self.optimizer, self.replicas = tensors, optimizer, replicas
        self.local: list[LocalReplica] = local_replicas(replicas, optimizer, self.tensors)
        task = Task(
            self.tensors,
            replicas,
            optimizer,
            self.local[0].masters,
            sync.every,
            sync.bucket_bytes,
            sync.gradients,
        )
        self.average: Averager = (
            _CoresidentAverager(optimizer) if len(self.local) > 1 else sync.converge.build(task)
        )
        self.moments = Moments(sync.moments, optimizer, replicas, sync.bucket_bytes)
        self._kind, self._tied, self._refresh, self.modules = (
            sync.weights,
            list(sync.tied),
            sync.refresh,
            list(modules),
        )
        self._starts = (
            None
            if divergence.rollback is None
            else CycleStarts(self.tensors, optimizer, divergence.rollback)
        )

    # -- what is known -----------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return local_parts(self.tensors[:1])[0].device

    def marks(self) -> list[float | torch.Tensor]:
        """What peers have to compare for this cycle's average, as whole numbers for the stats.

        Raises ValueError for moments without a mean.
        """
        found: list[float | torch.Tensor] = []
        moments, model = self.moments, self.tensors.model
        if moments.must_be_compared:
            found.append(moments.digest())
        if moments.must_be_compared or moments.are_averaged or model is not None:
            buffers = (
                []
                if model is None
                else [(tuple(b.shape), str(b.dtype)) for b in local_parts(self.tensors.buffers)]
            )
            found.append(float(digest((moments.structure(), buffers))))
        return found

    def check_marks(self, marks: Sequence[Sequence[float]]) -> None:
        """Of all replicas, each of `marks`.

        Raises `ReplicaDisagreement`, on every rank alike, if what is to be averaged is not the same
        on all.
        """
        moments = self.moments
        if marks and len(set(marks[-1])) > 1:
            if not (moments.are_averaged or moments.must_be_compared):
                raise ReplicaDisagreement(
                    "the model's buffers differ in number, shape or dtype between replicas, so "
                    "they have no average: make them alike on all, or leave out buffers=model"
                )
            raise ReplicaDisagreement(
                "the optimizer's moments differ in number or shape between replicas, because some "
                "parameters have had a gradient on some "
                "replicas only: moments='average' needs the same on all; use 'keep' or 'reset'"
                + (
                    ""
                    if self.tensors.model is None
                    else " (or the model's buffers differ, which are averaged too)"
                )
            )
        if moments.must_be_compared:
            moments.differ = len(set(marks[0])) > 1
            moments.check()

    # -- in the course of a cycle ------------------------------------------------------------------

    def on_cycle_start(self) -> None:
        """Before the first step of a cycle."""
        self.average.on_cycle_start()
        if self._starts is not None:
            self._starts.advance()

    def loaded(self) -> None:
        """Parameters may have been loaded: earlier ones are dropped."""
        if self._starts is not None:
            self._starts.forget()

    def after_step(self, position: int) -> list[str]:
        """What `Averager.acts_after` has announced. Returns notes for the record."""
        notes = self.average.after_step(position)
        self._publish()
        return notes

    def end_cycle(self, healthy: Sequence[int], losses: Sequence[float | None]) -> list[str]:
        """An average as `Sync.converge` says.

        ``losses``: of all replicas. Returns notes for the record.
        """
        weights = self._weights(healthy, losses)
        notes = self.average.end_cycle(weights)
        self.moments.end_cycle(weights)
        self._publish()
        return notes

    def complete(self, healthy: Sequence[int], losses: Sequence[float | None]) -> None:
        """Eq. 3 now and exactly, whatever `Sync.converge` is. Moments only if they are averaged:
        it is no end of a cycle."""
        weights = self._weights(healthy, losses)
        self.average.complete(weights)
        if self.moments.are_averaged:
            self.moments.average(weights)
        self._publish()

    def roll_back(self, attempt: int) -> None:
        """Parameters and the optimizer's state as they were before the cycle's first step
        (`CycleStarts.go_back`), and equal on all replicas.

        They need not have been: after a noisy start, or where an average never makes them so.
        """
        assert self._starts is not None, "rollback needs a snapshot"
        self._starts.go_back(attempt)
        if attempt >= 2:  # before the last average
            self.average.load_state([])
        self.average.complete([1 / self.replicas.count] * self.replicas.count)
        self._publish()

    def took_back(self) -> None:
        """A snapshot was restored, on all ranks alike: the first replica's becomes everyone's.

        They need not have been equal when it was taken.
        """
        self.loaded()
        self.average.load_state([])
        if self.replicas.count > 1:
            self.complete([0], [None] * self.replicas.count)
        else:
            self._publish()

    def _weights(self, healthy: Sequence[int], losses: Sequence[float | None]) -> list[float]:
        """w_r of all replicas: uniform over the healthy ones, or Eq. 4 ("softmax"; uniform again
        where a healthy one has no loss)."""
        weights = [0.0] * len(losses)
        known = [loss for loss in (losses[r] for r in healthy) if loss is not None]
        softmax = self._kind == "softmax" and len(known) == len(healthy)
        for r, w in zip(
            healthy,
            softmax_weights(known, 0.1) if softmax else [1 / len(healthy)] * len(healthy),
            strict=True,
        ):
            weights[r] = w
        return weights

    @torch.no_grad()
    def _publish(self) -> None:
        """Parameters were written: whoever holds copies follows."""
        for tensor, group in self._tied:
            for part in [*self._with_master(tensor), *self.moments.tensors_of(tensor)]:
                sent = part.reshape(-1).view(
                    torch.uint8
                )  # no backend's business what it is, and gloo knows no int16
                dist.broadcast(sent, group_src=0, group=group)
                if not part.is_contiguous():
                    part.copy_(sent.view(part.dtype).view(part.shape))
        for module in self.modules:
            reshard(module)
        if self._refresh is not None:
            self._refresh()

    def _with_master(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        place = next(i for i, own in enumerate(self.tensors) if own is tensor)
        master: Any = self.local[0].masters()[place]
        return local_parts([tensor] if master is None else [tensor, master])


def check_tied(tied: Any, parameters: Sequence[torch.Tensor]) -> None:
    """Raises TypeError or ValueError for a pair that is not (one of the averaged tensors, its
    group)."""
    if not isinstance(tied, (list, tuple)):
        raise TypeError(f"tied must be a list of (tensor, group), got {type(tied).__name__}")
    for i, pair in enumerate(tied):
        if not (
            isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], torch.Tensor)
        ):
            raise TypeError(
                f"tied[{i}] must be (tensor, group), got {pair!r}: the tensor and the group of the "
                "ranks with a copy"
            )
        if not any(pair[0] is p for p in parameters):
            raise ValueError(
                f"the tensor of tied[{i}] is none of the optimizer's parameters on this rank: pass "
                "the parameter itself"
            )
        if pair[1] is None:
            raise ValueError(
                f"the group of tied[{i}] is None, which torch takes for the world: pass the group "
                "of the ranks with a copy"
            )
        if not isinstance(pair[1], dist.ProcessGroup):
            raise ValueError(
                f"the group of tied[{i}] must be a process group that this rank is in, got "
                f"{pair[1]!r}"
            )


class _CoresidentAverager(Averager):
    """All replicas are in this process: their optimizer has all sets and averages them."""

    def __init__(self, optimizer: Any) -> None:
        self.idle, self._hooks, self._optimizer = True, [], optimizer

    def _average_plainly(self, weights: Sequence[float]) -> None:
        self._optimizer.average_replicas(weights)
