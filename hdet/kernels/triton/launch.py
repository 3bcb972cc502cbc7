"""Where a plan's tables lie and how its kernels are launched, on a CUDA device or in Triton's
interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from ...triton_kernels import tables as t
from ..tables import DeviceMemory

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
    return max(16, triton.next_power_of_2(min(longest, t.CHUNK_ELEMENTS))) if interpreted else BLOCK


def chunk_for(formats: Sequence[int]) -> int:
    """A program's elements.

    Codes are looked up in tables, which each program reads; the interpreter takes each program in
    turn.
    """
    coded = t.FORMATS[torch.uint8] in formats
    return t.CHUNK_ELEMENTS if coded or interpreted else t.SHORT_CHUNK


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


def place_by_format(
    memory: DeviceMemory, columns: Sequence[Sequence[int]], elements: Sequence[int]
) -> list[tuple[Any, int, torch.Tensor]]:
    """(formats, block, chunk table) of the tensors that are stored alike, as ``columns`` say:
    kernels are compiled for one combination."""
    return [
        (
            formats,
            block_for(max(elements[i] for i in members)),
            memory.place(t.chunk_table(members, elements, chunk_for(formats))),
        )
        for formats, members in t.groups(list(zip(*columns, strict=True))).items()
    ]
