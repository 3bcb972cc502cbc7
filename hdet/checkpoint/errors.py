"""The one error of this package, and how all ranks come to raise the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, is damaged, or does not fit this run.

    Raised on every rank alike, with the same text of one line.
    """


class Together:
    """Calls functions on the ranks of a group and shares results and errors.

    Each call is one collective of objects. ``group`` None: one process.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def all(self, function: Callable[[], T]) -> list[T]:
        """Call on each rank; return the results by rank.

        Raises:
            CheckpointError: the call failed somewhere, with the text of the first such rank.
        """
        answer = _attempt(function)
        answers: list[Any] = [answer]
        if self.group is not None:
            answers = [None] * self.size
            dist.all_gather_object(answers, answer, group=self.group)
        failed = [rank for rank, (_, text) in enumerate(answers) if text is not None]
        if failed:
            where = f" (on rank {failed[0]} of {self.size})" if 1 == len(failed) < self.size else ""
            raise CheckpointError(answers[failed[0]][1] + where)
        return [result for result, _ in answers]

    def each(self, function: Callable[[], T]) -> T:
        """Call on each rank; return this rank's own result, which does not travel."""
        results: list[T] = []
        self.all(lambda: results.append(function()))
        return results[0]

    def first(self, function: Callable[[], T]) -> T:
        """Call on the first rank only; return its result on all."""
        answers: list[Any] = self.all(function if self.rank == 0 else lambda: None)
        first: T = answers[0]
        return first

    def gather(self, value: T) -> list[T]:
        """The first rank gets each rank's value, by rank; the others get nothing."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        is_first = self.rank == 0
        dist.gather_object(value, values if is_first else None, group=self.group, group_dst=0)
        return values if is_first else []


def _attempt(function: Callable[[], T]) -> tuple[T | None, str | None]:
    try:
        return function(), None
    except Exception as error:  # noqa: BLE001 - the others must not wait for this rank
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        known = isinstance(error, (CheckpointError, ValueError, TypeError))
        return None, line if known else f"{type(error).__name__}: {line}"
