"""The one error of this package, and how all ranks come to raise the same."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

import torch.distributed as dist

from ..replicas import Replicas
from ..replicas.agreement import gathered

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, is damaged, or does not fit this run.

    Raised on every rank alike, with the same text of one line.
    """


class Together:
    """Calls functions on all ranks of all replicas; an error on one is raised on all.

    Each call is one collective of objects.

    Attributes:
        place: of this process in the table of replicas, row by row; a later run knows it by that.
        size: how many there are. Replicas that share a process are one here.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.group = replicas.world_group
        self.ranks = list(chain(*replicas.ranks)) if self.group else [0]
        self.size = len(self.ranks)
        self.place = replicas.index * replicas.members + replicas.member if self.group else 0

    def all(self, function: Callable[[], T], problem: str = "") -> list[T]:
        """Call on each rank; return the results by place.

        Raises:
            CheckpointError: the call failed somewhere: ``problem``, and the text of the first.
        """
        own: tuple[Any, str] = (None, "")
        try:
            own = (function(), "")
        except Exception as error:  # noqa: BLE001 - the others must not wait for this rank
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            is_ours = isinstance(error, (CheckpointError, ValueError, TypeError))
            own = (None, line if is_ours else f"{type(error).__name__}: {line}")
        answers: dict[int, Any] = {0: own} if self.group is None else gathered(own, self.group)
        if failed := [rank for rank in self.ranks if answers[rank][1]]:
            where = f" (on rank {failed[0]})" if len(failed) < self.size else ""
            raise CheckpointError(problem + answers[failed[0]][1] + where)
        return [answers[rank][0] for rank in self.ranks]

    def first(self, function: Callable[[], T]) -> T:
        """Call on the first rank only; return its result on all."""
        answers: list[Any] = self.all(function if self.place == 0 else lambda: None)
        first: T = answers[0]
        return first

    def gather(self, value: T) -> list[T]:
        """Each rank's value, on the first rank only."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        own = values if self.place == 0 else None
        dist.gather_object(value, own, dst=self.ranks[0], group=self.group)
        return values
