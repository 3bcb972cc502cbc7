"""What every backend offers, and the values that pass between an optimizer and a backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..rules import StepSettings
from .ema import WeightAverage
from .numbers import CODES

Column = Sequence[Tensor | None]
"""one entry for each tensor of a plan, None where it has none"""


@dataclass(frozen=True)
class StepTensors:
    """The tensors one optimizer step works on: n tensors in one order, dense, contiguous, all on
    one device, K sets of parameters.

    params: K lists of n tensors, float32, bfloat16 or float16; equal shapes and dtypes in all
        lists.
    groups: which entry of the settings each tensor uses. Numbered from 0 without a gap.
    steps: torch's step counters, one of each tensor: 0-d float32 tensors on its device, counted up
        by the step.
    moments: n tensors for each moment of the rule (`RULES`), in its order: float32, bfloat16, or
        the uint8 codes of numbers.py, then for all moments of a tensor; but a rule's exact ones are
        float32. SGD without momentum has None.
    scales: the same of codes, float32, one for each block of 256 elements; None for other tensors,
        and where no tensor has codes.
    masters: K lists. None for a parameter without one; float32: the parameter is its rounded copy;
        int16: the lower half of a bfloat16 parameter's exact float32 value; int8: the first 8 bits
        of it, of a value of 24 bits (the split forms, csrc/core/numbers.h).
    ids: numbers of the tensors in messages and for stochastic rounding, default their positions.
    stochastic: the seed of stochastic rounding of bfloat16 parameters without a master, values of
        24 bits and bfloat16 second moments; None rounds to nearest.
    first_replica: number of the first of the K replicas, for random numbers.
    averages: what `emas` are, at most three.
    emas: of each average K lists of n float32 tensors, which a step moves to what it has made of
        the parameters (of their masters where there are some), as they are stored.
    ema_steps: counters like `steps`, of what the averages have seen.
    """

    rule: str
    params: Sequence[Sequence[Tensor]]
    groups: Sequence[int]
    steps: Sequence[Tensor]
    moments: Sequence[Column]
    masters: Sequence[Column] | None = None
    ids: Sequence[int] | None = None
    stochastic: int | None = None
    first_replica: int = 0
    scales: Sequence[Column] | None = None
    averages: Sequence[WeightAverage] = ()
    emas: Sequence[Sequence[Sequence[Tensor]]] = ()
    ema_steps: Sequence[Tensor] = ()

    @property
    def num_replicas(self) -> int:
        return len(self.params)

    @property
    def num_groups(self) -> int:
        return 1 + max(self.groups)

    @property
    def numbers(self) -> Sequence[int]:
        """`ids`, or positions."""
        return range(len(self.params[0])) if self.ids is None else self.ids

    def coded(self) -> list[int]:
        """The tensors whose moments are codes."""
        return [
            i for i, moment in enumerate(self.moments[0]) if getattr(moment, "dtype", None) == CODES
        ]

    def scales_of(self, moment: int) -> Column:
        """Of a moment, by its number."""
        return [None] * len(self.moments[moment]) if self.scales is None else self.scales[moment]


@dataclass(frozen=True)
class StepOptions:
    """What is folded into one step.

    grad_scale: one-element float32 tensor on the device: the gradients are that many times too
        large (torch's GradScaler).
    found_inf: one-element float32 tensor on the device: anything but 0 skips the step and its
        counters.
    max_norm: clip by the global norm of the unscaled gradients, as
        torch.nn.utils.clip_grad_norm_; a norm that is not finite skips the step. math.inf measures
        and skips without clipping. 0: no norm is taken.
    zero_gradients: the gradients are zeros afterwards, also after a skipped step.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    max_norm: float = 0.0
    zero_gradients: bool = False


PLAIN = StepOptions()


class StepPlan(Protocol):
    """An optimizer step prepared for one set of tensors."""

    norm: Tensor
    """0-d float32 on the device: the global norm that the last step found; of use only where
    max_norm was given"""
    skipped: Tensor
    """0-d float32 on the device: 1 if the last step was skipped"""

    def step(
        self, gradients: Column, settings: Sequence[StepSettings], options: StepOptions = PLAIN
    ) -> None:
        """Applies one update with one gradient for each tensor and one settings entry for each
        group, and counts the step.

        Gradients are float32, bfloat16 or float16, each of its own type if need be; None leaves the
        tensor and its counter alone, and costs no more than a gradient at another address. Raises
        ValueError or TypeError, before anything is written, for a gradient or a hyperparameter that
        it cannot use.
        """

    def gradient_norms(self) -> Tensor:
        """(n,) float32 on the device: of each tensor's unscaled gradient in the last step, where
        max_norm was given; 0 of a tensor without one. Made of what the step has left, without
        waiting."""

    def upload(self, settings: Sequence[StepSettings], options: StepOptions = PLAIN) -> None:
        """Writes the hyperparameters to the device without a step, for replays of a captured
        one."""


class AveragePlan(Protocol):
    """A weighted mean over K co-resident sets, prepared for one set of tensors."""

    def average(self, weights: Sequence[float]) -> None:
        """Every set becomes sum_k weights[k] * set k (Eq. 3). The weights sum to 1; a set of
        weight 0 is not read."""


class CopyPlan(Protocol):
    """A scaled copy of one set of tensors to another, which it does not overlap."""

    def copy(self, scale: float = 1.0) -> None:
        """destination = scale * source, for each pair.

        Scale 0 writes zeros, also where a source holds NaN.
        """


class Backend(Protocol):
    """One implementation of the kernels."""

    name: str

    def step_plan(self, tensors: StepTensors) -> StepPlan: ...

    def average_plan(
        self, params: Sequence[Sequence[Tensor]], masters: Sequence[Column] | None
    ) -> AveragePlan: ...

    def copy_plan(
        self,
        sources: Sequence[Tensor],
        destinations: Sequence[Tensor],
        source_lowers: Column | None,
        masters: Column | None,
    ) -> CopyPlan:
        """`source_lowers`: lower halves of bfloat16 sources; `masters`: of the destinations,
        written with them."""
