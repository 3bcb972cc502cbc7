"""What is measured on tensors for a controller: one base class of documented hooks that do nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..converge import Masters
from ..core.clock import Clock
from ..core.plan import Question
from ..replicas import Replicas

__all__ = ["Measurement", "Watched"]


@dataclass(frozen=True)
class Watched:
    """The run that a measurement is part of."""

    optimizer: Optimizer
    sets: Sequence[Sequence[torch.Tensor]]
    """[local replica]: the trained parameters, in the order of the optimizer's groups."""
    masters: Sequence[Masters]
    """[local replica]: gives what the optimizer keeps beside each of them."""
    knobs: Sequence[Any]
    """Bound knobs."""
    clock: Clock
    replicas: Replicas
    multipliers: Callable[[], Sequence[Sequence[float]]]
    """[local replica][knob]: rho of the running cycle."""
    copied: bool
    """Does the optimizer have copies of the model's parameters, which follow them (`Ensemble`'s ``refresh``)?"""


class Measurement:
    """Measures during the cycles whose plan names it. Only `measure` and what is inside `answering` may communicate, on all ranks
    alike."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The models that it runs."""
        return ()

    def watch(self, watched: Watched) -> None:
        """Once, before the first step. May refuse (ValueError). Nothing of size is allocated here."""

    def on_cycle_start(self, settings: Any) -> None:
        """Before the first optimizer step after each average of a cycle whose plan names it with ``settings``."""

    def reset(self) -> None:
        """A cycle has begun, or replicas were averaged ahead of time."""

    def restart(self) -> None:
        """Parameters were loaded or restored: drop what is under way."""

    def sample(self, position: int, length: int, schedule_step: int) -> None:
        """After step ``position`` (1 .. ``length``) of a cycle of ``length`` steps."""

    def measure(self, cycle: int, place: int = 0) -> torch.Tensor | None:
        """At a cycle's end: the row of local replica number ``place``, float64, to be added up over the replica's ranks; the model has its
        weights now. None, on all ranks alike, if there is nothing to tell."""
        return None

    def split(self, rows: Sequence[Sequence[float]]) -> list[list[float]]:
        """Added-up rows, [replica], into what stands in `Evidence.measured`."""
        return [list(row) for row in rows]

    @contextmanager
    def answering(self) -> Iterator[Callable[[Question], Any]]:
        """At a cycle's end: a function that answers questions by plain numbers, the same on every rank. Weights, buffers and random states may
        be other ones inside, and are afterwards what they were. Raises ValueError if it answers no such questions."""
        raise ValueError(f"{type(self).__name__} answers no questions")
        yield

    def release(self) -> None:
        """The plan does not name it any more, or the Ensemble is given up: let go of memory and hooks. It may be named again later."""
