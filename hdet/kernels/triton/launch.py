"""Where a plan's tables lie and how its kernels are launched, on a CUDA device or in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ...profiling import ranged
from ..spec.mirrors import Mirrors, captured

BLOCK = 1024
"""elements a program of 4 warps moves at a time: 8 a thread, in two accesses of 16 bytes for float32"""
TABLE_BLOCK = 2048
"""numbers of a table, or of a norm, that one program takes at a time"""
REGISTERS = 128
"""a thread's, in kernels for several replicas, where ptxas would rather spill than take more than a threshold of its own"""

COMPILER = {"enable_fp_fusion": False}
"""for every kernel: no contraction, so that results have the bits of the native backends"""

interpreted: bool = triton.knobs.runtime.interpret
"""whether kernels run in Triton's interpreter, on CPU tensors: decided by TRITON_INTERPRET when Triton was imported"""


def block_for(longest: int) -> int:
    """A program's elements at a time. The interpreter takes each operation as one numpy call, the larger the better."""
    return max(16, triton.next_power_of_2(longest)) if interpreted else BLOCK


def registers_for(replicas: int) -> dict[str, int]:
    """An option for ptxas, where there is ptxas."""
    return {"maxnreg": REGISTERS} if replicas > 1 and torch.version.hip is None else {}


def _capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


class Memory:
    """Tables in the memory of one device, and launches on its current stream."""

    def __init__(self, device: torch.device) -> None:
        if interpreted and device.type != "cpu":
            raise ValueError(
                f'backend="triton" runs in Triton\'s interpreter here, which cannot read tensors on {device}: unset TRITON_INTERPRET'
            )
        if not interpreted and device.type != "cuda":
            raise ValueError(f'backend="triton" does not work on tensors on {device}; use backend="auto"')
        self.device = device
        self._on_cuda = device.type == "cuda"
        self._tables: list[Tensor] = []
        self._streams: set[int] = set()
        self._mirrors = Mirrors(lambda: _capturing(device))  # looked up in each call: a test replaces it
        self._captured = False

    def place(self, table: Tensor) -> Tensor:
        """A table that a plan keeps, where kernels read it. Waits for the copy, so that every stream may read it."""
        self._mirrors.check_new()
        return self._keep(table.to(self.device))

    def _keep(self, table: Tensor) -> Tensor:
        self._tables.append(table)
        self._streams.clear()
        return table

    @ranged("hdet.upload")
    def refresh(self, table: Tensor, placed: Tensor) -> None:
        """`table` may have changed in host memory: what place() returned for it follows on the current stream, without waiting."""
        if table is not placed:
            self._mirrors.refresh(table, placed, self._copy)

    def _copy(self, table: Tensor, placed: Tensor) -> None:
        """torch keeps the pinned copy until it has been read, so the next change does not touch it."""
        placed.copy_(table.pin_memory() if self._on_cuda else table, non_blocking=True)

    def room(self, count: int, dtype: torch.dtype) -> Tensor:
        """Numbers that kernels fill for each other."""
        self._mirrors.check_new()
        return self._keep(torch.zeros(count, dtype=dtype, device=self.device))

    def launch(self, kernel: Any, programs: int, *arguments: object, **options: object) -> None:
        """One launch with as many programs on the current stream; none where there is nothing to do."""
        if programs == 0:
            return
        self._mirrors.check_launched((kernel, *options.items()))
        if not self._on_cuda:
            kernel[(programs,)](*arguments, **options)
            return
        with torch.cuda.device(self.device):
            self._note_stream()
            kernel[(programs,)](*arguments, **options, **COMPILER)

    def _note_stream(self) -> None:
        """Tables that are dropped stay in memory until every stream that has used them has passed that point; captured ones for good."""
        stream = torch.cuda.current_stream(self.device)
        if stream.cuda_stream not in self._streams:
            self._streams.add(stream.cuda_stream)
            for table in self._tables:
                table.record_stream(stream)
        if not self._captured and torch.cuda.is_current_stream_capturing():
            self._captured = True
            captured.append(self._tables)
