from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .average import BucketedAverage
from .protocol import Average, Task


@dataclass(frozen=True)
class Plain:
    def build(self, task: Task) -> Average:
        return _P(task)


class _P:
    settled = True
    companions = 0

    def __init__(self, task: Task) -> None:
        self.a = BucketedAverage(task.tensors, task.replicas, task.bucket_bytes, task.masters)

    def after_step(self, position: int) -> list[str]:
        return []

    def end_cycle(self, weights: Sequence[float]) -> list[str]:
        self.a(weights)
        return []

    def complete(self, weights: Sequence[float]) -> None:
        self.a(weights)

    def mean(self) -> list[torch.Tensor] | None:
        return None
