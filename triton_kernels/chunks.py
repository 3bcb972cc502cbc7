"""What a program knows of its chunk: a row of int64 of the table that tables.py makes."""

from typing import NamedTuple

import triton
import triton.language as tl

TAIL = tl.constexpr(8)
"""a block that holds what is left of a chunk after its whole vectors"""
BATCH = tl.constexpr(4)
"""replicas whose parameters are on their way at the same time"""


class Chunk(NamedTuple):
    offset: tl.tensor  # int64; all others int32
    length: tl.tensor
    tensor: tl.tensor


@triton.jit
def load_chunk(chunks):
    place = chunks + tl.program_id(0) * 3
    return Chunk(tl.load(place), tl.load(place + 1).to(tl.int32), tl.load(place + 2).to(tl.int32))


@triton.jit
def live_length(chunk, address):
    """Of a chunk that there is something to do for: none where its gradient's address is 0."""
    return tl.where(address != 0, chunk.length, 0)


@triton.jit
def whole_vectors(length, VECTOR: tl.constexpr):
    """Elements up to the last whole vector."""
    return tl.multiple_of(length - length % VECTOR, VECTOR)
