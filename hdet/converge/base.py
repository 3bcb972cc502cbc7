"""What all ways of averaging share: settings and their averager, and the plain average."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from ..optim.snapshot import attach_hook, beside
from ..replicas import Replicas
from .buckets import Buckets, Masters, Part, parts_of


@dataclass(frozen=True)
class Task:
    """What is to be averaged, on this rank."""

    tensors: Sequence[torch.Tensor]
    """Parameters, then buffers, in the same order on all peers; a DTensor stands for its shard.
    Ask whenever they are needed: another tensor may be in a buffer's place by then."""
    replicas: Replicas
    optimizer: Optimizer
    masters: Masters
    bucket_bytes: int
    """Upper bound of the extra memory of a plain average."""
    gradients: str = "shared"
    """"shared" or "local"."""
    can_explore: bool = True
    """May replicas differ by their knobs?"""

    def parts(self) -> list[Part]:
        """All that is averaged, as it lies on this rank: the tensors with their masters, then the
        weights that the optimizer keeps beside them. Those that are missing are made: only to be
        asked when something is averaged."""
        kept = map(Part, beside(self.optimizer, self.tensors))
        return [*parts_of(self.tensors, self.masters), *kept]


@dataclass(frozen=True)
class Averaging:
    """How replicas are averaged: settings, from which `build` makes an `Averager`.

    Subclasses are frozen dataclasses, because ranks compare their fields. Class attributes say what
    they need of a run; a run that has it not is refused.
    """

    needs_processes: ClassVar[bool] = True
    """Does each replica need a process of its own?"""
    needs_rates_only: ClassVar[bool] = False
    """May replicas differ in learning rates only?"""
    moves_equal: ClassVar[bool] = False
    """Does it move replicas that are equal, and one alone?"""

    def build(self, task: Task) -> Averager:
        """The averager for this task; of one replica, one that does nothing, unless the way
        `moves_equal` ones.

        Raises:
            ValueError: the task cannot be done, by name and with the way out. Nothing is changed.
        """
        is_alone = task.replicas.count == 1 and not self.moves_equal
        return Averager(task) if is_alone else self.make_averager(task)

    def make_averager(self, task: Task) -> Averager:
        """The plain one, unless a subclass has another. Raises as `build`."""
        return Averager(task)


class Averager:
    """Averages the tensors of a `Task`: plainly, unless a subclass does otherwise (Eq. 3).

    All ranks call the same methods in the same order. What communicates, and when, is a pure
    function of the arguments. ``shares``: w_r of all N replicas, summing to 1. A replica of
    share 0 contributes nothing, not even a NaN, and takes the average like the others.
    """

    companions: ClassVar[int] = 0
    """Further sets of parameters that the optimizer steps beside this one, at multiplier 1."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.idle = True
        """Is nothing kept back? Then tensors are equal on all replicas after an average, and they
        are the whole state."""
        self._plain = Buckets(task.parts, task.bucket_bytes, in_place=True)
        self._hooks: list[Callable[[], object]] = []
        """Remove those on the optimizer."""

    def on_cycle_start(self) -> None:
        """Before the first step after an average, a start or a load. No communication."""

    def end_cycle(self, shares: Sequence[float]) -> list[str]:
        """After the last step of a cycle. Returns notes for the record."""
        self._average_plainly(shares)
        return []

    def complete(self, shares: Sequence[float]) -> None:
        """Average now, in full and exactly. Afterwards it is `idle`: what was kept back is
        forgotten."""
        self._average_plainly(shares)
        self._forget()

    def mean(self) -> list[torch.Tensor] | None:
        """The mean at this very step, where this rank has it without communication; else None."""
        return None

    def state(self) -> list[torch.Tensor]:
        """What goes on from one step to the next and belongs into a checkpoint: a tensor for each
        parameter (for each shard of this rank), or several such lists in a row; equal on all
        replicas after an average."""
        return []

    def load_state(self, tensors: Sequence[torch.Tensor]) -> None:
        """Go on with copies of what `state` gave, after the parameters were loaded. With []: begin
        again, because what was kept belongs to other parameters."""

    def close(self) -> None:
        """Give the optimizer back as it was given. No communication. Twice is as good as once."""
        for remove in self._hooks:
            remove()
        self._hooks = []
        self._forget()

    def _average_plainly(self, shares: Sequence[float]) -> None:
        self._plain.average(self.task.replicas, shares)

    def _forget(self, *_: Any) -> None:
        """Drop what is kept back."""
        self.idle = True

    def _forget_on_load(self) -> None:
        """What was kept is of no use once the optimizer has loaded another state."""
        register = self.task.optimizer.register_load_state_dict_post_hook
        self._hooks.append(attach_hook(register, self._forget))


@dataclass(frozen=True)
class Plain(Averaging):
    """Average all parameters at the end of each cycle, exactly, while training waits: the default.

    Sends 2 (N - 1) / N * P bytes a rank and cycle, P the bytes of the parameters on this rank
    (16-bit ones count as fp32). Extra memory: ``bucket_bytes`` at most.

    Example::

        sync = hdet.Sync(100, converge=hdet.converge.Plain())
    """

    needs_processes: ClassVar[bool] = False
