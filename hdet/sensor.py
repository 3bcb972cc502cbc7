"""What measures for a controller during the cycle, on real tensors; its numbers travel in the replicas' slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from .converge import Masters

__all__ = ["Sensor"]


@runtime_checkable
class Sensor(Protocol):
    """A controller with these members measures too: the `Ensemble` calls them in this order. Nothing here communicates."""

    measures: str
    """The argument of `Engine.close` that gets what `split` returns: "probes" or "inner"."""

    @property
    def idle(self) -> bool:
        """Then `sample` and `measure` are not called."""
        ...

    def watch(self, *replicas: Sequence[torch.Tensor], masters: Sequence[Masters] | None = None, knobs: Sequence[Any] = ()) -> None:
        """Once: the trained parameters of each replica in this process, their masters, and the bound knobs. May refuse (ValueError)."""
        ...

    def forget(self) -> None:
        """The window begins anew: a cycle has begun, or replicas were averaged ahead of time."""
        ...

    def sample(self, position: int, length: int) -> None:
        """After step ``position`` (1 .. ``length``) of a cycle of ``length`` steps at whose end `measure` is called."""
        ...

    def measure(self, cycle: int, place: int = 0) -> torch.Tensor:
        """The row of the ``place``-th of the watched replicas, float64, to be added up over the replica's ranks."""
        ...

    def split(self, rows: Sequence[Sequence[float]]) -> list[list[float]]:
        """Added-up rows, [replica], into what the rule is given."""
        ...
