"""What measures for a controller during the cycle, on real tensors; its numbers travel in the replicas' slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from .converge import Masters
from .core.clock import Clock
from .replicas import Replicas

__all__ = ["Run", "Sensor"]


@dataclass(frozen=True)
class Run:
    """What there is to know of the run that is watched."""

    clock: Clock
    replicas: Replicas
    gradients: str
    """"shared" or "local"."""
    multipliers: Callable[[], Sequence[Sequence[float]]]
    """[local replica][knob]: rho of the running cycle."""


@runtime_checkable
class Sensor(Protocol):
    """A controller with these members measures too: the `Ensemble` calls them in this order. Only `measure` may communicate."""

    measures: str
    """The argument of `Engine.close` that gets what `split` returns: "probes" or "inner"."""

    @property
    def idle(self) -> bool:
        """Then `depart`, `sample` and `measure` are not called."""
        ...

    def watch(
        self, *replicas: Sequence[torch.Tensor], masters: Sequence[Masters] | None = None, knobs: Sequence[Any] = (), run: Run | None = None
    ) -> None:
        """Once: the trained parameters of each replica in this process, their masters, and the bound knobs. May refuse (ValueError)."""
        ...

    def begin_anew(self) -> None:
        """Parameters were loaded, or a cycle was taken back: what is under way is worth nothing."""
        ...

    def close(self) -> None:
        """The Ensemble is given up: let go of the optimizer, and of the memory."""
        ...

    def depart(self, step: int) -> None:
        """Before the first optimizer step after ``step`` of them, and after each average, of a cycle at whose end `measure` is called."""
        ...

    def forget(self) -> None:
        """The window begins anew: a cycle has begun, or replicas were averaged ahead of time."""
        ...

    def sample(self, position: int, length: int) -> None:
        """After step ``position`` (1 .. ``length``) of a cycle of ``length`` steps at whose end `measure` is called."""
        ...

    def measure(self, cycle: int, place: int = 0) -> torch.Tensor:
        """The row of the ``place``-th of the watched replicas, float64, to be added up over the replica's ranks; on all ranks alike an
        empty one if this cycle's end has nothing to tell."""
        ...

    def split(self, rows: Sequence[Sequence[float]]) -> list[list[float]] | None:
        """Added-up rows, [replica], into what the rule is given; None for empty ones."""
        ...
