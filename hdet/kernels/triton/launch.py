"""Where a plan's tables lie and how its kernels are launched, on a CUDA device or in Triton's
interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from ...triton_kernels.chunks import SLICE
from ..tables import CHUNK_ELEMENTS, FORMAT_PLACES, Chunks, DeviceMemory

BLOCK = 1024
"""elements a program of 4 warps moves at a time: 8 a thread, in two accesses of 16 bytes for
float32"""
TABLE_BLOCK = 2048
"""numbers of a table, or of a norm, that one program takes at a time"""
DERIVED = 256
"""tensors whose hyperparameters one program derives"""
REGISTERS, CODED_REGISTERS = 128, 168
"""a thread's, in kernels for several replicas, where ptxas would rather spill than take more
than a threshold of its own. Blocks of codes stay in registers until their largest number is
known: four, or three programs of 4 warps on a multiprocessor"""

COMPILER = {"enable_fp_fusion": False}
"""for every kernel: no contraction, so that results have the bits of the native backends"""

interpreted: bool = triton.knobs.runtime.interpret
"""whether kernels run in Triton's interpreter, on CPU tensors: decided by TRITON_INTERPRET when
Triton was imported"""


def block_for(longest: int) -> int:
    """A program's elements at a time.

    The interpreter takes each operation as one numpy call, the larger the better: up to a chunk.
    """
    return max(16, triton.next_power_of_2(min(longest, CHUNK_ELEMENTS))) if interpreted else BLOCK


def slices_of(longest: int, coded: bool = False) -> int:
    """Programs for each chunk, as csrc/cuda/step.cuh has blocks.

    Codes are looked up in tables, which each program reads; the interpreter takes each program in
    turn.
    """
    return 1 if coded or interpreted else -(-longest // SLICE.value) or 1


def vector_of(kinds: Sequence[int], aligned: bool) -> int:
    """Elements a thread moves at a time (triton_kernels/numbers.py): 16 bytes of the widest stream,
    if every address is a multiple of 16."""
    return (4 if 1 in kinds else 8) if aligned else 1


def split_by_format(chunks: Chunks, placed: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
    """Chunks that lie in the order of their formats, by format: how gradient, parameter, master and
    moments are stored; and that part of the table."""
    packed, counts = torch.unique_consecutive(chunks.table[:, 3], return_counts=True)
    kinds = [tuple(one >> 4 * place & 15 for place in FORMAT_PLACES) for one in packed.tolist()]
    return list(zip(kinds, placed.split(counts.tolist()), strict=True))


def registers_for(replicas: int, coded: bool = False) -> dict[str, int]:
    """An option for ptxas, where there is ptxas."""
    return (
        {"maxnreg": CODED_REGISTERS if coded else REGISTERS}
        if replicas > 1 and torch.version.hip is None
        else {}
    )


class Memory(DeviceMemory):
    """Tables in the memory of one device, and launches on its current stream."""

    def __init__(self, device: torch.device) -> None:
        if interpreted and device.type != "cpu":
            raise ValueError(
                'backend="triton" runs in Triton\'s interpreter here, which cannot read tensors '
                f"on {device}: unset TRITON_INTERPRET"
            )
        if not interpreted and device.type != "cuda":
            raise ValueError(
                f'backend="triton" does not work on tensors on {device}; use backend="auto"'
            )
        super().__init__(device)

    def launch(self, kernel: Any, programs: int, *arguments: object, **options: object) -> None:
        """One launch with as many programs on the current stream; none where there is nothing to
        do."""
        if programs == 0:
            return
        self.check_launched((kernel, *options.items()))
        if interpreted:
            kernel[(programs,)](*arguments, **options)
            return
        with torch.cuda.device(self.device):
            self.stream()
            kernel[(programs,)](*arguments, **options, **COMPILER)
