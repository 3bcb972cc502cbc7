"""The native CUDA backend: one launch for each call, on torch's current stream, from tables in device memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import native
from .checks import check_settings
from .interface import AdamWSettings, AdamWTensors

if native.missing is None:
    from hdet import _C


# What follows is all that a test replaces to run this file against the kernels' host build (tests/kernels/test_shim.py).
def _current_stream(device: torch.device) -> torch.cuda.Stream:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("hdet's CUDA kernels cannot be captured in a CUDA graph: they copy this step's table from the host")
    return torch.cuda.current_stream(device)


def _pinned_bytes(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, pin_memory=True)


def _to_device(table: Tensor, device: torch.device) -> Tensor:
    """A copy that does not wait. torch keeps pinned memory until the copy is done; the copy belongs to the current stream."""
    return table.pin_memory().to(device, non_blocking=True)


def _used_on(stream: torch.cuda.Stream, *tables: Tensor) -> None:
    """Keeps the memory of tables, once they are dropped, until this stream has passed this point."""
    for table in tables:
        table.record_stream(stream)


class CudaAdamWPlan:
    """An AdamW step on tensors in the memory of one CUDA device."""

    def __init__(self, tensors: AdamWTensors) -> None:
        self.tensors = tensors  # keeps alive what the tables point to
        self.device = tensors.params[0].device
        self.device_number = tensors.params[0].get_device()
        self.shapes = [param.shape for param in tensors.params]
        self.leaders = tensors.leaders()
        self.tables = native.StepTables(tensors.params, tensors.exp_avgs, tensors.exp_avg_sqs, tensors.rows)
        self.step_counters = native.address_table(tensors.steps)
        # These copies wait, so that every stream may read them.
        self.chunks = self.tables.chunks.to(self.device)
        self.addresses = self.tables.addresses.to(self.device)

    def step(self, gradients: Sequence[Tensor], settings: Sequence[AdamWSettings]) -> None:
        addresses = native.gradient_addresses(gradients, self.tensors.params, self.shapes, self.device_number)
        check_settings(settings, len(self.leaders))
        stream = _current_stream(self.device)
        rows = [(*s, counter.item() + 1) for s, counter in zip(settings, self.leaders, strict=True)]
        host = _pinned_bytes(self.tables.step_bytes)
        self.tables.write_step(host, rows, addresses)
        # New device memory in each step: it belongs to the current stream, whichever that is, until the kernel has run.
        table = host.to(self.device, non_blocking=True)
        _used_on(stream, self.chunks, self.addresses)
        column = 8 * self.tables.num_tensors
        params = self.addresses.data_ptr()
        _C.cuda_adamw(
            self.chunks.data_ptr(),
            self.tables.num_chunks,
            table.data_ptr(),
            table.data_ptr() + self.tables.row_bytes,
            params,
            params + column,
            params + 2 * column,
            self.device_number,
            stream.cuda_stream,
        )
        _C.add_to_steps(self.step_counters.data_ptr(), self.tables.num_tensors, 1.0)


class CudaCopyPlan:
    """A scaled copy between tensors in the memory of one CUDA device."""

    def __init__(self, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
        self.tensors = (sources, destinations)  # keeps alive what the table points to
        self.device, self.device_number = sources[0].device, sources[0].get_device()
        chunks = native.chunk_table(sources, [0] * len(sources))
        self.num_chunks = native.num_chunks(chunks)
        # These copies wait, so that every stream may read them.
        self.chunks = chunks.to(self.device)
        self.addresses = native.address_table(sources, destinations).to(self.device)

    def copy(self, scale: float) -> None:
        stream = _current_stream(self.device)
        _used_on(stream, self.chunks, self.addresses)
        table = self.addresses.data_ptr()
        column = 8 * len(self.tensors[0])
        _C.cuda_copy(self.chunks.data_ptr(), self.num_chunks, table, table + column, scale, self.device_number, stream.cuda_stream)


class CudaBackend:
    name = "cuda"

    def copy_plan(self, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> CudaCopyPlan:
        return CudaCopyPlan(sources, destinations)

    def adamw_plan(self, tensors: AdamWTensors) -> CudaAdamWPlan:
        return CudaAdamWPlan(tensors)

    def average_(self, replicas: Sequence[Sequence[Tensor]], weights: Sequence[float]) -> None:
        first = replicas[0]
        device = first[0].device
        stream = _current_stream(device)
        host_chunks = native.chunk_table(first, [0] * len(first))
        chunks = _to_device(host_chunks, device)
        addresses = _to_device(native.address_table(*replicas), device)
        table = _to_device(torch.tensor(weights, dtype=torch.float32), device)
        _C.cuda_average(
            chunks.data_ptr(),
            native.num_chunks(host_chunks),
            addresses.data_ptr(),
            len(first),
            len(replicas),
            table.data_ptr(),
            first[0].get_device(),
            stream.cuda_stream,
        )
