"""What a run is made of: one frozen description, which all its parts are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..converge.sync import Sync
from ..core.controller import Controller
from ..core.divergence import Divergence
from ..core.engine import Engine
from ..core.evidence import Run
from ..logging import CycleRecord
from ..replicas import Replicas
from ..schedule import Schedule
from ..tensors.buffers import ReplicaTensors
from ..trial.auto import AutoLR

__all__ = ["Setup"]


@dataclass(frozen=True)
class Setup:
    """The arguments of an `hdet.Ensemble`; from `prepare` on with what is made of them."""

    optimizer: Optimizer
    scheduler: Any
    knobs: Any
    """As given; then [knob], a `BoundKnob` each."""
    search: AutoLR | None
    controller: Controller | None
    replicas: Replicas
    sync: Sync
    divergence: Divergence
    design: str | None
    warmup_steps: int
    total_steps: int | None
    seed: int
    log: Callable[[CycleRecord, int], object] | None
    # made of them
    tensors: ReplicaTensors = None  # type: ignore[assignment]
    """What is averaged: parameters, then buffers; DTensors stand for their shards."""
    schedule: Schedule = None  # type: ignore[assignment]
    engine: Engine = None  # type: ignore[assignment]
    facts: Run = None  # type: ignore[assignment]
    """What search and controller are told of the run."""

    @property
    def explored(self) -> list[Any]:
        """The knobs in which replicas can differ."""
        return [knob for knob in self.knobs if knob.grid.explores]

    @property
    def can_explore(self) -> bool:
        """A search alone never lets them."""
        return bool(self.explored) and (self.search is None or self.controller is not None)

    @property
    def moves_values(self) -> bool:
        return self.search is not None or self.controller is not None

    @property
    def is_local(self) -> bool:
        """Does each replica step with gradients of its own?"""
        return self.sync.gradients == "local"

    @property
    def trained(self) -> list[torch.Tensor]:
        """The optimizer's parameters."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def models(self) -> list[nn.Module]:
        """Those that are known to hold the parameters."""
        measured = [] if self.controller is None else self.controller.measurements.values()
        found = [module for one in measured for module in one.modules]
        found += [] if self.search is None else [self.search.model]
        return found + [one for one in [self.sync.buffers] if isinstance(one, nn.Module)]
