"""The native CPU backend: C++ loops over a chunk table, one parallel region for each call, as many threads as torch uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import native
from .checks import check_settings
from .interface import AdamWSettings, AdamWTensors

if native.missing is None:
    from hdet import _C


class CpuAdamWPlan:
    """An AdamW step on tensors in host memory."""

    def __init__(self, tensors: AdamWTensors) -> None:
        self.tensors = tensors  # keeps alive what the tables point to
        self.shapes = [param.shape for param in tensors.params]
        self.leaders = tensors.leaders()
        self.tables = native.StepTables(tensors.params, tensors.exp_avgs, tensors.exp_avg_sqs, tensors.rows)
        self.step_table = native.bytes_for(self.tables.step_bytes)
        self.step_counters = native.address_table(tensors.steps)
        rows, addresses, column = self.step_table.data_ptr(), self.tables.addresses.data_ptr(), 8 * self.tables.num_tensors
        self.arguments = (
            self.tables.chunks.data_ptr(),
            self.tables.num_chunks,
            rows,
            rows + self.tables.row_bytes,
            addresses,
            addresses + column,
            addresses + 2 * column,
        )

    def step(self, gradients: Sequence[Tensor], settings: Sequence[AdamWSettings]) -> None:
        addresses = native.gradient_addresses(gradients, self.tensors.params, self.shapes, -1)
        check_settings(settings, len(self.leaders))
        rows = [(*s, counter.item() + 1) for s, counter in zip(settings, self.leaders, strict=True)]
        self.tables.write_step(self.step_table, rows, addresses)
        _C.cpu_adamw(*self.arguments, torch.get_num_threads())
        _C.add_to_steps(self.step_counters.data_ptr(), self.tables.num_tensors, 1.0)


class CpuCopyPlan:
    """A scaled copy between tensors in host memory."""

    def __init__(self, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
        self.tensors = (sources, destinations)  # keeps alive what the table points to
        self.chunks = native.chunk_table(sources, [0] * len(sources))
        self.addresses = native.address_table(sources, destinations)
        table = self.addresses.data_ptr()
        self.arguments = (self.chunks.data_ptr(), native.num_chunks(self.chunks), table, table + 8 * len(sources))

    def copy(self, scale: float) -> None:
        _C.cpu_copy(*self.arguments, scale, torch.get_num_threads())


class CpuBackend:
    name = "cpu"

    def copy_plan(self, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> CpuCopyPlan:
        return CpuCopyPlan(sources, destinations)

    def adamw_plan(self, tensors: AdamWTensors) -> CpuAdamWPlan:
        return CpuAdamWPlan(tensors)

    def average_(self, replicas: Sequence[Sequence[Tensor]], weights: Sequence[float]) -> None:
        first = replicas[0]
        chunks = native.chunk_table(first, [0] * len(first))
        addresses = native.address_table(*replicas)
        table = torch.tensor(weights, dtype=torch.float32)
        _C.cpu_average(
            chunks.data_ptr(),
            native.num_chunks(chunks),
            addresses.data_ptr(),
            len(first),
            len(replicas),
            table.data_ptr(),
            torch.get_num_threads(),
        )
