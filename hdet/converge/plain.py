"""Plain: one all_reduce of the parameters at the end of each cycle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.hooks import RemovableHandle

from .base import Average, Task
from .bucketed_average import BucketedAverage

__all__ = ["Plain", "PlainAverage"]


@dataclass(frozen=True)
class Plain:
    """The average of all parameters at the end of each cycle, exactly, while training waits. The default.

    Sends 2 (N - 1) / N * P bytes a rank and cycle, P the bytes of the parameters on this rank (16-bit ones count as fp32).
    Extra memory: ``bucket_bytes`` at most.
    """

    def build(self, task: Task) -> Average:
        return PlainAverage(task)


class PlainAverage:
    """Eq. 3 in place; what the other ways fall back to."""

    idle = True
    companions = 0

    def __init__(self, task: Task) -> None:
        self._plain = BucketedAverage(task.tensors, task.replicas, task.bucket_bytes, task.masters)
        self._hooks: list[RemovableHandle] = []

    def acts_after(self, position: int) -> bool:
        return False

    def after_step(self, position: int) -> list[str]:
        return []

    def end_cycle(self, weights: Sequence[float]) -> list[str]:
        self._plain(weights)
        return []

    def complete(self, weights: Sequence[float]) -> None:
        self._plain(weights)

    def mean(self) -> list[torch.Tensor] | None:
        return None

    def close(self) -> None:
        """Hooks are all that most ways leave with the optimizer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
