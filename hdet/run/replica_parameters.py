"""The parameters of the replicas on this rank: averaged, kept tied, rolled back.

Between these, the optimizer owns them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..converge import Averager, Task
from ..converge.sync import Tied
from ..optim.snapshot import CycleStarts, beside, masters_of
from ..replicas import ReplicaDisagreement
from ..replicas.agreement import digest
from ..tensors.dtensor import local_parts, reshard
from .moments import Moments
from .setup import Setup

__all__ = ["ReplicaParameters", "check_tied"]


class ReplicaParameters:
    """What an `Ensemble` does to parameters. If one process holds all replicas, their optimizer
    averages them, and not the `Sync`'s way."""

    def __init__(self, run: Setup) -> None:
        self.tensors, self.replicas, self._optimizer = run.tensors, run.replicas, run.optimizer
        self._sync, self._models = run.sync, run.models
        slots = range(len(run.replicas.local))
        self.masters = [masters_of(run.optimizer, run.tensors, slot) for slot in slots]
        task = Task(
            run.tensors, run.replicas, run.optimizer, self.masters[0], run.sync.bucket_bytes,
            run.sync.gradients, run.can_explore,
        )  # fmt: skip
        self.moments = Moments(run.sync.moments, run.optimizer, run.replicas, run.sync.bucket_bytes)
        kept_on = run.divergence.rollback
        self._starts = None if kept_on is None else CycleStarts(run.tensors, run.optimizer, kept_on)
        # It may keep a second set of parameters in the optimizer, so nothing is refused after it.
        self.average: Averager = (
            _CoresidentAverager(task) if len(slots) > 1 else run.sync.converge.build(task)
        )

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return local_parts(self.tensors[:1])[0].device

    # -- what peers compare ------------------------------------------------------------------------

    def marks(self) -> list[float | torch.Tensor]:
        """What peers have to compare for this cycle's average, as whole numbers for the stats: of
        the moments, then of what there is to average. 0 where that is nothing, as stages of a
        pipeline may have other optimizers, and all ranks exchange as many numbers.

        Raises ValueError for moments without a mean.
        """
        moments, of_structure = self.moments, 0.0
        if moments.must_agree or self.tensors.model is not None:
            buffers = [(tuple(b.shape), str(b.dtype)) for b in local_parts(self.tensors.buffers)]
            of_structure = float(digest((moments.structure(), buffers)))
        return [moments.digest() if moments.must_be_compared else 0.0, of_structure]

    def check_marks(self, marks: Sequence[Sequence[float]]) -> None:
        """Of all replicas, each of `marks`.

        Raises `ReplicaDisagreement`, on every rank alike, if what is to be averaged is not the same
        on all.
        """
        moments = self.moments
        if len(set(marks[1])) > 1:
            if moments.must_agree:
                raise ReplicaDisagreement(
                    "the optimizer's moments (or the model's buffers) differ in number or shape "
                    "between replicas, as after gradients on some only: moments='average' needs "
                    "the same on all; use 'keep' or 'reset'"
                )
            raise ReplicaDisagreement(
                "the model's buffers differ in number, shape or dtype between replicas, so they "
                "have no average: make them alike on all, or leave out buffers=model"
            )
        if moments.must_be_compared:
            moments.differ = len(set(marks[0])) > 1
            moments.check()

    # -- in the course of a cycle ------------------------------------------------------------------

    def on_cycle_start(self, may_differ: bool) -> None:
        """Before the first step of a cycle. ``may_differ``: if False, it ends by `complete` at
        most."""
        if may_differ:
            self.average.on_cycle_start()
        if self._starts is not None:
            self._starts.advance()

    def note_load(self) -> None:
        """Parameters may have been loaded: earlier ones are dropped."""
        if self._starts is not None:
            self._starts.forget()

    def end_cycle(self, healthy: Sequence[int]) -> list[str]:
        """An average as `Sync.converge` says. Returns notes for the record."""
        shares = self._shares(healthy)
        notes = self.average.end_cycle(shares)
        self.moments.end_cycle(shares)
        self._publish()
        return notes

    def complete(self, healthy: Sequence[int]) -> None:
        """Eq. 3 now and exactly, whatever `Sync.converge` is. Moments only if they are averaged:
        it is no end of a cycle."""
        shares = self._shares(healthy)
        self.average.complete(shares)
        if self.moments.are_averaged:
            self.moments.average(shares)
        self._publish()

    def roll_back(self, attempt: int) -> None:
        """Parameters and the optimizer's state as they were before the cycle's first step
        (`CycleStarts.go_back`), and equal on all replicas.

        They need not have been: after a noisy start, or where an average never makes them so. Then
        all have the first replica's, as a mean of equal ones is not always the same number.
        """
        assert self._starts is not None, "rollback needs a snapshot"
        self._starts.go_back(attempt)
        if attempt >= 2:  # before the last average
            self.average.load_state([])
        self.average.complete(self._shares([0]))
        self._publish()

    def note_restore(self) -> None:
        """A snapshot was restored, on all ranks alike: the first replica's becomes everyone's.

        They need not have been equal when it was taken.
        """
        self.note_load()
        self.average.load_state([])
        self.complete([0])

    def _shares(self, healthy: Sequence[int]) -> list[float]:
        """w_r of all replicas: uniform over the healthy ones."""
        share_of = dict.fromkeys(healthy, 1 / len(healthy))
        return [share_of.get(r, 0.0) for r in range(self.replicas.count)]

    @torch.no_grad()
    def _publish(self) -> None:
        """Parameters were written: whoever holds copies follows."""
        for tensor, group in self._sync.tied:
            for part in [*self._with_weights(tensor), *self.moments.tensors_of(tensor)]:
                # As bytes: gloo knows no int16, and it is no backend's business what they are.
                sent = part.reshape(-1).view(torch.uint8)
                dist.broadcast(sent, group_src=0, group=group)
                if not part.is_contiguous():
                    part.copy_(sent.view(part.dtype).view(part.shape))
        for module in self._models:
            reshard(module)
        if self._sync.refresh is not None:
            self._sync.refresh()

    def _with_weights(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """And with its master."""
        place = next(i for i, own in enumerate(self.tensors) if own is tensor)
        own = [tensor, self.masters[0]()[place], *beside(self._optimizer, [tensor])]
        return local_parts([one for one in own if one is not None])


def check_tied(tied: Sequence[Tied], parameters: Sequence[torch.Tensor]) -> None:
    """Raises ValueError for a pair that is not (one of the averaged tensors, its group)."""
    for i, (tensor, group) in enumerate(tied):
        if not any(tensor is p for p in parameters):
            raise ValueError(
                f"the tensor of tied[{i}] is none of the optimizer's parameters on this rank: pass "
                "the parameter itself"
            )
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(
                f"the group of tied[{i}] must be a process group that this rank is in, got "
                f"{group!r}: pass that of the ranks with a copy"
            )


class _CoresidentAverager(Averager):
    """All replicas are in this process: their optimizer has all sets and averages them."""

    def _average_plainly(self, shares: Sequence[float]) -> None:
        optimizer: Any = self.task.optimizer
        optimizer.average_replicas(shares)
