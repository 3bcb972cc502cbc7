"""The native backends: one set of plans, on tables in the memory of a CPU or of a CUDA device,
which also calls the kernels there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...rules import RULES
from ...tensors.profiling import ranged
from .. import native
from ..checks import check_shares
from ..interface import Column, StepOptions, StepTensors
from ..step import TableStepPlan
from ..tables import HostMemory, address_table, chunks_of, formats


class Memory(HostMemory):
    """CUDA has its own (cuda.py)."""

    def call(self, operation: str, *arguments: object, norm: bool = False) -> None:
        """One of hdet._C's operations on this device. `norm`: is a norm taken with it?"""
        getattr(native._C, "cpu_" + operation)(*arguments, torch.get_num_threads())


MakeMemory = Callable[[torch.device], Memory]


class NativeStepPlan(TableStepPlan):
    memory: Memory

    def __init__(self, tensors: StepTensors, memory: MakeMemory) -> None:
        self.plan = native._C.StepPlan()
        super().__init__(tensors, memory(tensors.params[0][0].device))
        plan, t, count = self.plan, tensors, self.count
        plan.rule, plan.longest = list(RULES).index(t.rule), self.chunks.longest
        plan.num_chunks, plan.num_tensors = self.chunks.number, count
        plan.num_replicas, plan.num_groups = t.num_replicas, t.num_groups
        plan.seed, plan.first_replica = (t.stochastic or 0) % 2**64, t.first_replica
        plan.addresses, plan.columns = self.addresses.data_ptr(), len(self.addresses) // count
        plan.ids, plan.groups = self.numbers.data_ptr(), self.numbers[count:].data_ptr()
        plan.codebooks = 0 if self.codebooks is None else self.codebooks.data_ptr()
        plan.num_sums, plan.sums = self.num_sums, self.sums.data_ptr()
        plan.spans = 0 if self.spans is None else self.spans.data_ptr()
        plan.control, plan.rows = self.control.data_ptr(), self.rows.data_ptr()
        plan.replica_rows = self.replica_rows.data_ptr()
        if self.emas is not None and self.ema_settings is not None:
            plan.emas, plan.num_emas = self.emas.data_ptr(), len(t.averages)
            plan.ema_settings = self.ema_settings.data_ptr()
            plan.ema_rows = self.ema_rows.data_ptr()

    def _point_to_chunks(self) -> None:
        self.plan.chunks = self.placed_chunks.data_ptr()
        self.plan.known = native._C.known_of(self.packed)

    def _point_to_inputs(self) -> None:
        gradients, settings, rates = (part.data_ptr() for part in self.inputs.parts())
        self.plan.gradients, self.plan.settings, self.plan.rates = gradients, settings, rates

    def _take_options(self, options: StepOptions) -> None:
        plan = self.plan
        plan.zero_gradients = int(options.zero_gradients)
        self._takes_norm = options.max_norm != 0
        plan.partials = self.partials.data_ptr() if self._takes_norm else 0
        plan.grad_scale = 0 if options.grad_scale is None else options.grad_scale.data_ptr()
        plan.found_inf = 0 if options.found_inf is None else options.found_inf.data_ptr()
        super()._take_options(options)

    @ranged("hdet.step")
    def _run(self, carried: Tensor | None = None) -> None:
        plan = self.plan
        plan.num_carried = 0 if carried is None else len(carried)
        if carried is not None:
            plan.carried = carried.data_ptr()
        self.memory.call("step", plan, norm=self._takes_norm)


def _chunks(
    plan: Any, memory: HostMemory, tensors: Sequence[Tensor], packed: Sequence[int]
) -> Tensor:
    """What `plan` points to afterwards."""
    elements = [tensor.numel() for tensor in tensors]
    chunks = chunks_of(elements, packed, memory.chunks, range(len(elements)))
    placed = memory.place(chunks.table)
    plan.chunks, plan.num_chunks = placed.data_ptr(), chunks.number
    return placed


def _only_float(*columns: Column) -> bool:
    """Whether every tensor there is holds float32, and so has no master."""
    return all(t is None or t.dtype == torch.float32 for column in columns for t in column)


class NativeAveragePlan:
    """The weighted mean of co-resident sets."""

    def __init__(
        self,
        params: Sequence[Sequence[Tensor]],
        masters: Sequence[Column] | None,
        memory: MakeMemory,
    ) -> None:
        self.tensors = (params, masters)  # keeps alive what the tables point to
        self.memory = memory(params[0][0].device)
        self.plan = plan = native._C.AveragePlan()
        count, replicas = len(params[0]), len(params)
        plan.num_replicas = replicas
        masters = [[None] * count] * replicas if masters is None else masters
        packed = formats(count, None, params[0], masters[0])
        self.chunks = _chunks(plan, self.memory, params[0], packed)
        plan.all_float = int(_only_float(params[0], masters[0]))
        self.addresses = self.memory.place(address_table(*params, *masters))
        plan.addresses = self.addresses.data_ptr()
        self.weights = torch.zeros(replicas, dtype=torch.float32, device="cpu")
        self.placed_weights = self.memory.place(self.weights)
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
        memory: MakeMemory,
    ) -> None:
        self.tensors = (sources, destinations, source_lowers, masters)  # the tables point to them
        self.memory = memory(sources[0].device)
        self.plan = plan = native._C.CopyPlan()
        count = len(sources)
        nothing: Column = [None] * count
        lowers, masters = source_lowers or nothing, masters or nothing
        packed = formats(count, sources, destinations, masters, lowers)
        self.chunks = _chunks(plan, self.memory, sources, packed)
        plan.all_float = int(_only_float(sources, destinations, lowers, masters))
        columns = address_table(sources, lowers, destinations, masters)
        self.addresses = self.memory.place(columns)
        plan.addresses = self.addresses.data_ptr()

    @ranged("hdet.copy")
    def copy(self, scale: float = 1.0) -> None:
        self.plan.scale = scale
        self.memory.call("copy", self.plan)


class NativeBackend:
    name: ClassVar[str]
    memory: ClassVar[type[Memory]]

    def __init__(self) -> None:
        self.step_plan = partial(NativeStepPlan, memory=self.memory)
        self.average_plan = partial(NativeAveragePlan, memory=self.memory)
        self.copy_plan = partial(NativeCopyPlan, memory=self.memory)


class CpuBackend(NativeBackend):
    """C++ loops over a chunk table, one parallel region for each phase, as many threads as torch
    uses."""

    name = "cpu"
    memory = Memory
