"""The native CPU backend: C++ loops over a chunk table, one parallel region for each phase, as many threads as torch uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...profiling import ranged
from .. import native
from ..spec.interface import Column, RankOneTensors, StepTensors
from .plans import NativeAveragePlan, NativeNormPlan, NativePairPlan
from .rank_one import NativeRankOnePlan
from .step import NativeStepPlan

if native.missing is None:
    from hdet import _C


class CpuStepPlan(NativeStepPlan):
    @ranged("hdet.step")
    def _run(self) -> None:
        _C.cpu_step(self.plan, torch.get_num_threads())


class CpuRankOnePlan(NativeRankOnePlan):
    @ranged("hdet.step")
    def _run(self) -> None:
        _C.cpu_rank_one(self.plan, torch.get_num_threads())

    @ranged("hdet.converge")
    def _run_converge(self) -> None:
        _C.cpu_converge(self.plan, torch.get_num_threads())


class CpuAveragePlan(NativeAveragePlan):
    @ranged("hdet.average")
    def _run(self) -> None:
        _C.cpu_average(self.plan, torch.get_num_threads())


class CpuPairPlan(NativePairPlan):
    @ranged("hdet.pair")
    def _run(self) -> None:
        _C.cpu_pair(self.plan, torch.get_num_threads())


class CpuNormPlan(NativeNormPlan):
    @ranged("hdet.norm")
    def _run(self, result: Tensor) -> None:
        chunks, tensors, partials = self.chunks.data_ptr(), self.addresses.data_ptr(), self.partials.data_ptr()
        _C.cpu_norm(chunks, self.num_chunks, tensors, partials, result.data_ptr(), torch.get_num_threads())


class CpuBackend:
    name = "cpu"

    def step_plan(self, tensors: StepTensors) -> CpuStepPlan:
        return CpuStepPlan(tensors, native.Memory())

    def rank_one_plan(self, tensors: RankOneTensors) -> CpuRankOnePlan:
        return CpuRankOnePlan(tensors, native.Memory())

    def average_plan(self, params: Sequence[Sequence[Tensor]], masters: Sequence[Column] | None) -> CpuAveragePlan:
        return CpuAveragePlan(params, masters, native.Memory())

    def pair_plan(
        self, sources: Sequence[Tensor], destinations: Sequence[Tensor], source_lowers: Column | None, masters: Column | None
    ) -> CpuPairPlan:
        return CpuPairPlan(sources, destinations, source_lowers, masters, native.Memory())

    def norm_plan(self, tensors: Sequence[Tensor]) -> CpuNormPlan:
        return CpuNormPlan(tensors, native.Memory())
