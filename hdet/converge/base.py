"""The interface of a way of averaging: its settings, its task, and what an Ensemble asks of it (docs/converge.md says which pays when)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ..replicas import Replicas

Masters = Callable[[], Sequence[torch.Tensor | None]]
"""Gives the master of each of some tensors, float32 or the lower half of the split form, or None; asked whenever they are needed."""


@dataclass(frozen=True)
class Task:
    """What is to be averaged, on this rank."""

    tensors: Sequence[torch.Tensor]
    """Parameters, then buffers, in the same order on all peers; DTensors stand for their local shards (`local_parts`). To be asked whenever they
    are needed: another tensor may be in a buffer's place by then."""
    replicas: Replicas
    optimizer: Optimizer
    masters: Masters
    sync_interval: int
    """T, optimizer steps between averages."""
    bucket_bytes: int
    """Upper bound of the extra memory of a plain average."""
    gradients: str = "shared"
    """"shared" or "local"."""


class Average(Protocol):
    """Eq. 3 for one `Task`. All ranks call the same methods in the same order: what communicates, and when, is a pure function of the
    arguments. ``weights``: w_r of all N replicas, summing to 1; a replica of weight 0 contributes nothing, not even a NaN, and takes the
    average like the others.
    """

    @property
    def idle(self) -> bool:
        """Nothing is under way and nothing is kept back: after an average the tensors are the whole state, equal on all replicas."""

    def on_cycle_start(self) -> None:
        """Before the first step after an average, a start or a load. No communication."""

    def acts_after(self, position: int) -> bool:
        """Is there anything to do after step ``position`` (1 .. T - 1) of a cycle, before its end? The same on all ranks."""

    def after_step(self, position: int) -> list[str]:
        """Do it: may communicate and write to the tensors. Only where `acts_after` says so. Returns notes for the record."""

    def end_cycle(self, weights: Sequence[float]) -> list[str]:
        """After the last step of a cycle. Returns notes for the record."""

    def complete(self, weights: Sequence[float]) -> None:
        """Now, in full and exactly: afterwards `idle`. What was under way is finished or dropped, what was kept back is forgotten."""

    def mean(self) -> list[torch.Tensor] | None:
        """The mean of the replicas at this very step, without communication, where this rank has it; else None. Not to be written to."""

    def kept(self) -> list[torch.Tensor]:
        """What goes on from one cycle to the next and belongs into a checkpoint: a tensor for each parameter (for each shard of this rank), equal on
        all replicas after an average; [] for nothing."""

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Go on with what `kept` gave, of which these are copies, after the parameters were loaded; with []: begin anew, as what was kept is
        not of these parameters."""

    def close(self) -> None:
        """Give the optimizer back as it was given: no hooks, no further sets of parameters. No communication; the last call, and a
        second one does nothing. What is under way is dropped."""

    @property
    def companions(self) -> int:
        """Further sets of parameters that the optimizer steps at the base rate (multiplier 1) beside this replica's: 0 or 1."""


@runtime_checkable
class Converge(Protocol):
    """The settings of a way of averaging: a frozen dataclass that is checked when it is made."""

    def build(self, task: Task) -> Average:
        """Raises ValueError, by name and with the way out, for a task it cannot do; nothing is changed then."""


# -- who averages with whom, and torch's flat collectives under the names that this torch has ----------------------------


def peers(replicas: Replicas, member: int) -> list[int]:
    """Ranks of the default group that hold this part of the model, by replica."""
    return [replica[member] for replica in replicas.ranks]


def all_gather(output: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
    """output = the ``own`` of all ranks, one after the other."""
    _existing("all_gather_single", "all_gather_into_tensor")(output, own, group=group)


def reduce_scatter(own: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """own = this rank's part of the sum of all ``whole``."""
    _existing("reduce_scatter_single", "reduce_scatter_tensor")(own, whole, group=group)


def _existing(name: str, former: str) -> Any:
    """torch 2.13 renames these, and the former names warn."""
    return getattr(dist, name, None) or getattr(dist, former)
