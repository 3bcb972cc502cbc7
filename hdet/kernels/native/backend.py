"""The native backends: one set of plans, on tables in the memory of a CPU or of a CUDA device, which also calls the kernels there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from .. import native
from ..spec.interface import Column, RankOneTensors, StepTensors
from .plans import NativeAveragePlan, NativeNormPlan, NativePairPlan
from .rank_one import NativeRankOnePlan
from .step import NativeStepPlan


class NativeBackend:
    name: ClassVar[str]
    memory: ClassVar[type[native.Memory]]

    def step_plan(self, tensors: StepTensors) -> NativeStepPlan:
        return NativeStepPlan(tensors, self.memory(tensors.params[0][0].device))

    def rank_one_plan(self, tensors: RankOneTensors) -> NativeRankOnePlan:
        return NativeRankOnePlan(tensors, self.memory(tensors.bases[0].device))

    def average_plan(self, params: Sequence[Sequence[Tensor]], masters: Sequence[Column] | None) -> NativeAveragePlan:
        return NativeAveragePlan(params, masters, self.memory(params[0][0].device))

    def pair_plan(
        self, sources: Sequence[Tensor], destinations: Sequence[Tensor], source_lowers: Column | None, masters: Column | None
    ) -> NativePairPlan:
        return NativePairPlan(sources, destinations, source_lowers, masters, self.memory(sources[0].device))

    def norm_plan(self, tensors: Sequence[Tensor]) -> NativeNormPlan:
        return NativeNormPlan(tensors, self.memory(tensors[0].device))


class CpuBackend(NativeBackend):
    """C++ loops over a chunk table, one parallel region for each phase, as many threads as torch uses."""

    name = "cpu"
    memory = native.Memory
