"""What every backend offers, and the values that pass between an optimizer and a backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


class AdamWSettings(NamedTuple):
    """Hyperparameters of one group of parameters for one step.

    The rate of the step and of its weight decay is `lr * multiplier` (Eq. 2), as stock AdamW decays at the rate it steps with.
    """

    lr: float
    multiplier: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool


@dataclass(frozen=True)
class AdamWTensors:
    """The tensors one AdamW step writes, in one order: float32, contiguous, on one device.

    `steps` are torch's step counters (0-d float32 tensors on the CPU). `rows[i]` says which entry of the settings tensor i uses;
    all tensors of one row have the same step count.
    """

    params: Sequence[Tensor]
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    steps: Sequence[Tensor]
    rows: Sequence[int]

    def leaders(self) -> list[Tensor]:
        """The step counter of the first tensor of each row: it speaks for the row."""
        first = dict(zip(reversed(self.rows), reversed(self.steps), strict=True))
        return [first[row] for row in range(len(first))]


class AdamWPlan(Protocol):
    """A step prepared for one set of tensors."""

    def step(self, gradients: Sequence[Tensor], settings: Sequence[AdamWSettings]) -> None:
        """Applies one update with one gradient for each parameter and one settings entry for each row, and counts the step.

        Raises ValueError or TypeError, before anything is written, for a gradient or a hyperparameter that it cannot use.
        """


class CopyPlan(Protocol):
    """A scaled copy prepared for one set of tensors: into a communication bucket, or out of it."""

    def copy(self, scale: float) -> None:
        """destination = scale * source, for each pair. Scale 0 writes zeros, also where a source holds NaN."""


class Backend(Protocol):
    """One implementation of the kernels."""

    def adamw_plan(self, tensors: AdamWTensors) -> AdamWPlan: ...

    def copy_plan(self, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> CopyPlan: ...

    def average_(self, replicas: Sequence[Sequence[Tensor]], weights: Sequence[float]) -> None:
        """Writes sum_k weights[k] * replicas[k][i] to replicas[k][i] for all k. The weights sum to 1."""
