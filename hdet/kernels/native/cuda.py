"""The native CUDA backend: a step is two launches, or three with a norm, on torch's current stream, from tables in device memory.

Nothing here reads device memory. What changes between steps is copied from pinned memory without waiting, and only if it changed:
the settings (one table for all hyperparameters) and the addresses of gradients that have moved.

Under capture a copy would be replayed with what the host had at the time, so there is none: what a captured step reads must be on
the device already, from a step before it (the warm-up that capturing needs anyway). `upload` then changes rates between replays.

A captured graph holds the addresses of tables. A plan may be replaced while its graph lives on (new parameters, load_state_dict), so
the tables of a plan that was captured stay in memory until the process ends. They take 40 bytes for each chunk of 16 384 elements, 0.3 MB
for GPT-2 (124M) and 17 MB for 7 billion parameters, and 8 for each address of a tensor. The tensors they point to are the caller's to
keep, as with any other captured operation.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from hdet.profiling import ranged

from .. import native
from ..spec.mirrors import Mirrors, captured
from .backend import NativeBackend

if native.missing is None:
    from hdet import _C


# What follows is all that a test replaces to run this file against the kernels' host build (tests/kernels/test_shim.py).
def _current_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.current_stream(device)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """The device is torch's current one inside. Afterwards that is what it was, without a context on a GPU that nobody has used."""
    return torch.cuda.device(device)


def _capturing(device: torch.device) -> bool:
    with _on(device):
        return torch.cuda.is_current_stream_capturing()


def _placed(table: Tensor, device: torch.device) -> Tensor:
    """A copy on the device. This waits, so that every stream may read it."""
    return table.to(device)


def _copy_without_waiting(table: Tensor, placed: Tensor) -> None:
    """Through pinned memory of torch's, which keeps it until the copy is done: `table` may change right away."""
    placed.copy_(table.pin_memory(), non_blocking=True)


def _used_on(stream: torch.cuda.Stream, table: Tensor) -> None:
    """Keeps the table's memory, once it is dropped, until this stream has done all it was given before."""
    table.record_stream(stream)


class CudaMemory(native.Memory):
    """The tables of one plan in the memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._tables: list[Tensor] = []
        self._mirrors = Mirrors(lambda: _capturing(device))  # looked up in each call: tests replace it
        self._streams: set[int] = set()  # those that have used the tables
        self._captured = False

    def place(self, table: Tensor) -> Tensor:
        self._mirrors.check_new()
        placed = _placed(table, self.device)
        self._tables.append(placed)
        self._streams.clear()
        return placed

    @ranged("hdet.upload")
    def refresh(self, table: Tensor, placed: Tensor) -> None:
        self._mirrors.refresh(table, placed, _copy_without_waiting)

    def room(self, count: int) -> Tensor:
        return self.place(torch.zeros(count, dtype=torch.uint8))

    def call(self, operation: str, *arguments: object, norm: bool = False) -> None:
        """Launches kernels on this device and its current stream."""
        self._mirrors.check_launched((operation, norm))
        with _on(self.device):
            getattr(_C, "cuda_" + operation)(*arguments, -1 if self.device.index is None else self.device.index, self._stream())

    def _stream(self) -> int:
        """The current stream, to launch on. It may be another one at each call, and may be captured."""
        stream = _current_stream(self.device)
        if not self._captured and _capturing(self.device):
            self._captured = True
            captured.append(self._tables)
        if stream.cuda_stream not in self._streams:
            for table in self._tables:
                _used_on(stream, table)
            self._streams.add(stream.cuda_stream)
        return stream.cuda_stream


class CudaBackend(NativeBackend):
    name = "cuda"
    memory = CudaMemory
