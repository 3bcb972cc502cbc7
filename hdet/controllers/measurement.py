"""What is measured on tensors for a controller: a base class of hooks that do nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from ..converge import Masters
from ..core.clock import Clock

__all__ = ["Measurement", "Watched"]


@dataclass(frozen=True)
class Watched:
    """The run that a measurement is part of."""

    optimizer: Optimizer
    sets: Sequence[Sequence[torch.Tensor]]
    """[local replica]: the trained parameters, in the order of the optimizer's groups."""
    masters: Sequence[Masters]
    """[local replica]: gives what the optimizer keeps beside each of them."""
    clock: Clock


class Measurement:
    """Measures during the cycles whose plan names it. Only `measure` may communicate, on all ranks
    alike. docs/adding-a-controller.md has an example."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The models that it runs."""
        return ()

    def watch(self, watched: Watched) -> None:
        """Before the first step; again, if that run was refused. May refuse (ValueError).
        Allocates nothing of size."""

    def reset(self) -> None:
        """A cycle whose plan names it has begun, replicas were averaged ahead of time, or other
        weights are in place."""

    def sample(self, position: int, length: int) -> None:
        """After step ``position`` (1 .. ``length``) of a cycle of ``length`` steps."""

    def measure(self, cycle: int, slot: int = 0) -> torch.Tensor | None:
        """At a cycle's end: the row of local replica number ``slot``, one dimension, float64, to
        be added up over the replica's ranks; the model has its weights now. None, on all ranks
        alike: nothing to report."""
        return None

    def split(self, rows: Sequence[Sequence[float]]) -> list[list[float]]:
        """Added-up rows, [replica], into what stands in `Evidence.measured`."""
        return [list(row) for row in rows]

    def release(self) -> None:
        """No plan names it any more, or the Ensemble is closed: let go of memory and hooks."""
