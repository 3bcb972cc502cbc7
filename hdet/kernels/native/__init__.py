"""The compiled module, or the reason why it is not there; and the tables its kernels read.

Tables are made in host memory. Where its kernels read them is a matter of the `Memory` of the
device: on a CPU they lie there already.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch  # before _C: both then share torch's OpenMP runtime (csrc/cpu/dispatch.cpp)
from torch import Tensor

from ...rules import DIGEST
from ..interface import Column
from ..numbers import CODES

INTERFACE = 14
"""the functions of csrc/bindings.cpp this package calls; counted up there and here whenever they
change"""

try:
    from hdet import _C
except ImportError as error:  # reported by name wherever a native backend is asked for
    missing: str | None = (
        f"hdet's native module cannot be imported: {error}. Reinstall hdet (pip install -e .) with "
        "a C++ compiler"
    )
else:
    # After an update without a new build, a missing function would otherwise surface in the middle
    # of a run.
    stale = getattr(_C, "INTERFACE", 0) != INTERFACE or _C.RULES != DIGEST
    missing = (
        "hdet's native module was built from other sources: reinstall hdet (pip install -e .)"
        if stale
        else None
    )

DTYPES = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, CODES: 4}
MASTERS = {None: 0, torch.float32: 1, torch.int16: 2}
"""in the order of csrc/core/numbers.h: DType, Master"""


def formats(count: int, *columns: Column | None, stochastic: bool = False) -> list[int]:
    """Chunk::formats (csrc/core/numbers.h) of each tensor: how gradient, parameter, master and
    moments are stored."""
    packed = [int(stochastic) << 24] * count
    for place, column in enumerate(columns):
        codes = MASTERS if place == 2 else DTYPES
        for i, tensor in enumerate(column or ()):
            packed[i] |= codes[None if tensor is None else tensor.dtype] << 4 * place
    return packed


def only_float(*columns: Column | None) -> bool:
    """Whether every tensor there is holds float32."""
    return all(
        tensor is None or tensor.dtype == torch.float32
        for column in columns
        if column is not None
        for tensor in column
    )


def nothing_in(columns: Sequence[Column] | None) -> bool:
    return columns is None or all(tensor is None for column in columns for tensor in column)


class Chunks(NamedTuple):
    """Some tensors cut into chunks (csrc/core/plan.h)."""

    table: Tensor
    """Bytes, which torch aligns to 64."""
    number: int
    longest: int
    """Elements of the longest chunk."""


def chunks_of(tensors: Sequence[Tensor], packed_formats: Sequence[int], least: int) -> Chunks:
    """The tensors cut into chunks, if possible into `least`."""
    elements = [tensor.numel() for tensor in tensors]
    length = _C.chunk_length(elements, least)
    number = _C.count_chunks(elements, length)
    table = torch.empty(number * _C.CHUNK_BYTES, dtype=torch.uint8, device="cpu")
    _C.write_chunks(table.data_ptr(), elements, list(packed_formats), length)
    return Chunks(table, number, min(length, max(elements, default=0)))


def address_table(*columns: Column) -> Tensor:
    """Addresses of tensors as int64, one column after the other; 0 where there is none."""
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in itertools.chain(*columns)]
    table = torch.empty(len(addresses), dtype=torch.int64, device="cpu")
    _C.write_addresses(table.data_ptr(), addresses)
    return table


class Memory:
    """Where a plan's tables lie, and how its kernels are called: here in host memory.

    CUDA has its own (hdet/kernels/native/cuda.py).
    """

    carries = 0
    """words of settings that a kernel can bring along; here it reads them where they are"""
    chunks = 0
    """at least so many keep the device busy; threads of a CPU cut chunks where they like"""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def place(self, table: Tensor) -> Tensor:
        """A table that a plan keeps, where kernels read it."""
        return table

    def refresh(self, table: Tensor, placed: Tensor) -> None:
        """`table` has changed in host memory: what place() returned for it follows, before the next
        kernel reads it."""

    def differs(self, table: Tensor, placed: Tensor) -> bool:
        return False

    def note(self, table: Tensor, placed: Tensor) -> None:
        """There is nothing to remember."""

    def is_captured(self, placed: Tensor) -> bool:
        return False

    def replayed(self, placed: Tensor) -> Tensor | None:
        """Nothing here is captured."""
        return None

    def room(self, count: int) -> Tensor:
        """Bytes that kernels fill for each other."""
        return torch.zeros(count, dtype=torch.uint8, device="cpu")

    def call(self, operation: str, *arguments: object, norm: bool = False) -> None:
        """One of hdet._C's operations on this device. `norm`: is a norm taken with it?"""
        getattr(_C, "cpu_" + operation)(*arguments, torch.get_num_threads())
