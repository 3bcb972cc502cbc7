"""The native backends: one set of plans, on tables in the memory of a CPU or of a CUDA device,
which also calls the kernels there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ...tensors.profiling import ranged
from .. import native
from ..checks import check_shares
from ..interface import Column, StepTensors
from .step import NativeStepPlan


class NativeAveragePlan:
    """The weighted mean of co-resident sets."""

    def __init__(
        self,
        params: Sequence[Sequence[Tensor]],
        masters: Sequence[Column] | None,
        memory: native.Memory,
    ) -> None:
        self.tensors = (params, masters)  # keeps alive what the tables point to
        self.memory = memory
        self.plan = plan = native._C.AveragePlan()
        count = len(params[0])
        packed = native.formats(count, None, params[0], None if masters is None else masters[0])
        chunks = native.chunks_of(params[0], packed, memory.chunks)
        self.chunks = memory.place(chunks.table)
        self.addresses = memory.place(native.address_table(*params, *(masters or [])))
        self.weights = torch.zeros(len(params), dtype=torch.float32, device="cpu")
        self.placed_weights = memory.place(self.weights)
        plan.chunks, plan.num_chunks = self.chunks.data_ptr(), chunks.number
        plan.num_tensors, plan.num_replicas = count, len(params)
        plan.all_float = int(native.only_float(*params) and native.nothing_in(masters))
        plan.params = self.addresses.data_ptr()
        plan.masters = (
            0 if native.nothing_in(masters) else self.addresses.data_ptr() + 8 * count * len(params)
        )
        plan.weights = self.placed_weights.data_ptr()

    @ranged("hdet.average")
    def average(self, weights: Sequence[float]) -> None:
        check_shares(weights, self.plan.num_replicas)
        self.weights.copy_(torch.tensor(weights, dtype=torch.float64, device="cpu"))
        self.memory.refresh(self.weights, self.placed_weights)
        self.memory.call("average", self.plan)


class NativeCopyPlan:
    """A scaled copy of one set of tensors to another."""

    def __init__(
        self,
        sources: Sequence[Tensor],
        destinations: Sequence[Tensor],
        source_lowers: Column | None,
        masters: Column | None,
        memory: native.Memory,
    ) -> None:
        self.tensors = (sources, destinations, source_lowers, masters)  # the tables point to them
        self.memory = memory
        self.plan = plan = native._C.CopyPlan()
        count = len(sources)
        nothing: Column = [None] * count
        chunks = native.chunks_of(
            sources, native.formats(count, sources, destinations, masters), memory.chunks
        )
        self.chunks = memory.place(chunks.table)
        self.addresses = memory.place(
            native.address_table(
                sources, destinations, source_lowers or nothing, masters or nothing
            )
        )
        plan.chunks, plan.num_chunks = self.chunks.data_ptr(), chunks.number
        plan.all_float = int(
            native.only_float(sources, destinations)
            and native.nothing_in([source_lowers or [], masters or []])
        )
        columns = [self.addresses.data_ptr() + 8 * count * column for column in range(4)]
        plan.sources, plan.destinations, plan.source_lowers, plan.masters = columns

    @ranged("hdet.copy")
    def copy(self, scale: float = 1.0) -> None:
        self.plan.scale = scale
        self.memory.call("copy", self.plan)


class NativeBackend:
    name: ClassVar[str]
    memory: ClassVar[type[native.Memory]]

    def step_plan(self, tensors: StepTensors) -> NativeStepPlan:
        return NativeStepPlan(tensors, self.memory(tensors.params[0][0].device))

    def average_plan(
        self, params: Sequence[Sequence[Tensor]], masters: Sequence[Column] | None
    ) -> NativeAveragePlan:
        return NativeAveragePlan(params, masters, self.memory(params[0][0].device))

    def copy_plan(
        self,
        sources: Sequence[Tensor],
        destinations: Sequence[Tensor],
        source_lowers: Column | None,
        masters: Column | None,
    ) -> NativeCopyPlan:
        return NativeCopyPlan(
            sources, destinations, source_lowers, masters, self.memory(sources[0].device)
        )


class CpuBackend(NativeBackend):
    """C++ loops over a chunk table, one parallel region for each phase, as many threads as torch
    uses."""

    name = "cpu"
    memory = native.Memory
