"""The tables a plan gives to the kernels, made in host memory: chunks and addresses.

Needs torch alone.

A chunk is a row of int64 (offset, length, tensor): elements from the start of its tensor, elements,
row of the address tables and of the hyperparameters. Offsets of 64 bits appear only here; inside a
chunk an index has 32. An empty tensor has no chunk. Kernels are compiled for one format each, so a
plan has a chunk table for each format.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

CHUNK_ELEMENTS = 16384
SHORT_CHUNK = 2048
"""what a program that only streams has: an H100's memory is the faster the nearer to each other
programs are (0.98 of a copy for 0.95)"""

FORMATS = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.uint8: 4}
MASTERS = {None: 0, torch.float32: 1, torch.int16: 2}
"""in the order of csrc/core/numbers.h: DType, Master"""

Column = Sequence[Tensor | None]
Format = TypeVar("Format", bound=Hashable)


def formats_of(
    column: Column | None, count: int, codes: dict[torch.dtype | None, int] = FORMATS
) -> list[int]:
    """How each tensor of a column is stored."""
    if column is None:
        return [0] * count
    return [codes[None if tensor is None else tensor.dtype] for tensor in column]


def address_table(*columns: Column | None, count: int) -> Tensor:
    """[tensor][column] addresses, 0 where there is no tensor."""
    table = torch.zeros(count, len(columns), dtype=torch.int64, device="cpu")
    for c, column in enumerate(columns):
        if column is not None:
            table[:, c] = torch.tensor(
                [0 if tensor is None else tensor.data_ptr() for tensor in column],
                dtype=torch.int64,
                device="cpu",
            )
    return table


def typed_addresses(addresses: Sequence[int], dtypes: Sequence[torch.dtype]) -> Tensor:
    """[tensor][2] address, type: what the norm reads, whose kernel takes tensors of any format."""
    return torch.tensor(
        (addresses, [FORMATS[dtype] for dtype in dtypes]), dtype=torch.int64, device="cpu"
    ).T.contiguous()


def groups(formats: Sequence[Format]) -> dict[Format, list[int]]:
    """The tensors of each format, in the order in which formats first appear."""
    members: dict[Format, list[int]] = {}
    for i, format in enumerate(formats):
        members.setdefault(format, []).append(i)
    return members


def chunk_table(
    members: Sequence[int], elements: Sequence[int], longest: int = CHUNK_ELEMENTS
) -> Tensor:
    """Chunks of at most `longest` elements.

    `elements` has an entry for every tensor of the plan.
    """
    tensor = torch.tensor(members, dtype=torch.int64, device="cpu")
    length = torch.tensor([elements[i] for i in members], dtype=torch.int64, device="cpu")
    count = (length + longest - 1) // longest
    owner = torch.repeat_interleave(torch.arange(len(members), device="cpu"), count)
    before = torch.cumsum(count, 0) - count
    offset = (torch.arange(len(owner), device="cpu") - before[owner]) * longest
    return torch.stack(
        (offset, torch.clamp(length[owner] - offset, max=longest), tensor[owner]), dim=1
    )


def vector(formats: Sequence[int], aligned: bool) -> int:
    """Elements a thread moves at a time (numbers.py): 16 bytes of the widest stream, if every
    address is a multiple of 16."""
    return (4 if 1 in formats else 8) if aligned else 1
