"""The one error of this package, and how all ranks come to raise the same."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

import torch.distributed as dist

from ..replicas import Replicas

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
        answer: tuple[int, Any, str] = (self.place, None, "")
        try:
            answer = (self.place, function(), "")
        except Exception as error:  # noqa: BLE001 - the others must not wait for this rank
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            is_ours = isinstance(error, (CheckpointError, ValueError, TypeError))
            answer = (self.place, None, line if is_ours else f"{type(error).__name__}: {line}")
        answers: list[Any] = [answer]
        if self.group is not None:
            answers *= self.size
            dist.all_gather_object(answers, answer, group=self.group)
        answers.sort(key=lambda answer: answer[0])
        failed = [(place, text) for place, _, text in answers if text]
        if failed:
            place, text = failed[0]
            where = f" (on rank {self.ranks[place]})" if len(failed) < self.size else ""
            raise CheckpointError(problem + text + where)
        return [answer[1] for answer in answers]

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
