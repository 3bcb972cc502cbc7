"""The torch backend: every operation in torch's own calls, on any device. The others are compared with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import rounding
from .checks import check_shares, check_swap
from .interface import Column, RankOneTensors, StepTensors
from .reference_rules import Many, global_norm, running_average, store, value_of, values_of, weighted_sum
from .reference_step import TorchRankOnePlan, TorchStepPlan


class TorchAveragePlan:
    """The weighted mean of K co-resident sets (Eq. 3)."""

    def __init__(self, params: Sequence[Sequence[Tensor]], masters: Sequence[Column] | None) -> None:
        self.params = params
        self.masters: Sequence[Column] = [[None] * len(row) for row in params] if masters is None else masters

    @torch.no_grad()
    def average(self, weights: Sequence[float]) -> None:
        check_shares(weights, len(self.params))
        values = [values_of(*pair) for pair in zip(self.params, self.masters, strict=True)]
        mean = weighted_sum(values, torch.tensor(weights, dtype=torch.float32))
        for params, masters in zip(self.params, self.masters, strict=True):
            for value, param, master in zip(mean.tensors, params, masters, strict=True):
                store(value, param, master)


class TorchPairPlan:
    """Operations between two sets of tensors of any floating dtypes and strides."""

    def __init__(
        self, sources: Sequence[Tensor], destinations: Sequence[Tensor], source_lowers: Column | None, masters: Column | None
    ) -> None:
        self.sources, self.destinations = sources, destinations
        self.lowers: Column = source_lowers or [None] * len(sources)
        self.masters: Column = masters or [None] * len(destinations)

    @torch.no_grad()
    def copy(self, scale: float = 1.0) -> None:
        for source, lower, destination, master in zip(self.sources, self.lowers, self.destinations, self.masters, strict=True):
            value = source if lower is None else rounding.join(source, lower)
            if scale == 0:
                value = torch.zeros_like(value)
            elif scale != 1:
                value = (value if value.dtype == torch.float64 else value.float()) * scale
            store(value, destination, master)

    @torch.no_grad()
    def lerp(self, weight: float) -> None:
        _check_weight(weight)
        for source, lower, destination, master in zip(self.sources, self.lowers, self.destinations, self.masters, strict=True):
            towards, old = value_of(source, lower), value_of(destination, master)
            w = torch.tensor(weight, dtype=torch.float32)
            store(running_average(Many([old]), Many([towards]), w).tensors[0], destination, master)

    @torch.no_grad()
    def swap(self) -> None:
        check_swap(self.sources, self.destinations, self.lowers, self.masters)
        for one, other in (*zip(self.sources, self.destinations, strict=True), *zip(self.lowers, self.masters, strict=True)):
            if one is not None and other is not None:
                kept = one.clone()
                one.copy_(other)
                other.copy_(kept)


def _check_weight(weight: float) -> None:
    if not 0 <= weight <= 1:
        raise ValueError(f"weight={weight} must be in [0, 1]; 1 copies")


class TorchNormPlan:
    """The global norm of one set of tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    @torch.no_grad()
    def norm(self) -> Tensor:
        return global_norm(self.tensors).float()


class TorchBackend:
    name = "torch"

    def step_plan(self, tensors: StepTensors) -> TorchStepPlan:
        return TorchStepPlan(tensors)

    def rank_one_plan(self, tensors: RankOneTensors) -> TorchRankOnePlan:
        return TorchRankOnePlan(tensors)

    def average_plan(self, params: Sequence[Sequence[Tensor]], masters: Sequence[Column] | None) -> TorchAveragePlan:
        return TorchAveragePlan(params, masters)

    def pair_plan(
        self, sources: Sequence[Tensor], destinations: Sequence[Tensor], source_lowers: Column | None, masters: Column | None
    ) -> TorchPairPlan:
        return TorchPairPlan(sources, destinations, source_lowers, masters)

    def norm_plan(self, tensors: Sequence[Tensor]) -> TorchNormPlan:
        return TorchNormPlan(tensors)
