"""Plain: one all_reduce of the parameters at the end of each cycle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from .base import Average, Task
from .bucketed_average import BucketedAverage
from .buckets import Buckets, parts_of


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

    companions = 0
    keeps_state = False
    """Does it keep anything between calls, which is of no use once another state was loaded?"""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._plain = BucketedAverage(task.tensors, task.replicas, task.bucket_bytes, task.masters)
        self.idle = True
        self._hooks: list[RemovableHandle] = []
        register = getattr(task.optimizer, "register_load_state_dict_post_hook", None)
        if self.keeps_state and register is not None:
            self._hooks.append(register(lambda _: self._forget()))

    def _make_buckets(self, **settings: Any) -> Buckets:
        """For another way of sending the same tensors; ``settings``: of `Buckets`."""
        task = self._task
        return Buckets(lambda: parts_of(task.tensors, task.masters), task.bucket_bytes, **settings)

    def _forget(self) -> None:
        """Drop what is under way or kept back: another state was loaded, all was averaged in full, or this is the end."""
        self.idle = True

    def on_cycle_start(self) -> None:
        pass

    def acts_after(self, position: int) -> bool:
        return False

    def after_step(self, position: int) -> list[str]:
        return []

    def end_cycle(self, weights: Sequence[float]) -> list[str]:
        self._plain(weights)
        return []

    def complete(self, weights: Sequence[float]) -> None:
        self._plain(weights)
        self._forget()

    def _average_at_once(self, weights: Sequence[float], what: str) -> list[str]:
        """`complete`, and a note, in a cycle that leaves a replica out: that one is to train on with the mean. Otherwise nothing."""
        absent = [r for r, weight in enumerate(weights) if weight == 0]
        if not absent:
            return []
        self.complete(weights)
        return [f"{what}averaged at once: replica {', '.join(map(str, absent))} is left out"]

    def mean(self) -> list[torch.Tensor] | None:
        return None

    def kept(self) -> list[torch.Tensor]:
        return []

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        pass

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._forget()
