"""The one error of this package, and how all ranks come to raise the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, is damaged, or does not fit this run. Raised on every rank alike, with the same text."""


class Together:
    """Runs a function on all ranks of a group, or on the first, and reports its result or error to all: one small collective a call."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def all(self, function: Callable[[], T]) -> list[T]:
        """What each rank's call returned, by rank of the group. Raises CheckpointError if it failed on some, with the first one's text."""
        result, error = _attempt(function)
        answers: list[Any] = [(result, error)]
        if self.group is not None:
            answers = [None] * self.size
            dist.all_gather_object(answers, (result, error), group=self.group)
        failed = [rank for rank, (_, text) in enumerate(answers) if text is not None]
        if failed:
            where = f" (on rank {failed[0]} of {self.size})" if 1 == len(failed) < self.size else ""
            raise CheckpointError(answers[failed[0]][1] + where)
        return [result for result, _ in answers]

    def each(self, function: Callable[[], T]) -> T:
        """This rank's own result; the others learn only whether it failed."""
        results: list[T] = []
        self.all(lambda: results.append(function()))
        return results[0]

    def first(self, function: Callable[[], T]) -> T:
        """Only the first rank calls; everyone gets its result."""
        return self.all(function if self.rank == 0 else lambda: None)[0]  # type: ignore[return-value]


def _attempt(function: Callable[[], T]) -> tuple[T | None, str | None]:
    try:
        return function(), None
    except CheckpointError as error:
        return None, str(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return None, first_line if isinstance(error, (ValueError, TypeError)) else f"{type(error).__name__}: {first_line}"
