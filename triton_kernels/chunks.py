"""What a program knows of its chunk, or of its slice of one: a Chunk of csrc/core/plan.h."""

from typing import NamedTuple

import triton
import triton.language as tl

TAIL = tl.constexpr(8)
"""a block that holds what is left of a chunk after its whole vectors"""
BATCH = tl.constexpr(4)
"""replicas whose parameters are on their way at the same time"""
SLICE = tl.constexpr(2048)
"""elements of a chunk's slices, which a program has each: an H100's memory is the faster the nearer
to each other programs are (0.98 of a copy for 0.95)"""


class Chunk(NamedTuple):
    offset: tl.tensor  # int64; all others int32
    length: tl.tensor
    tensor: tl.tensor
    formats: tl.tensor


@triton.jit
def load_chunk(chunks, slices):
    """`slices`: programs for each chunk. Without elements where it is shorter than the longest."""
    place = chunks + tl.program_id(0) // slices * 4
    packed = tl.load(place + 2)
    length = (packed >> 32).to(tl.int32)
    first = tl.program_id(0) % slices * SLICE
    rest = tl.maximum(tl.minimum(length - first, SLICE), 0)
    return Chunk(
        tl.load(place) + first,
        tl.where(slices == 1, length, rest),
        packed.to(tl.int32),
        tl.load(place + 3).to(tl.int32),
    )


@triton.jit
def live_length(chunk, address):
    """Of a chunk that there is something to do for: none where its gradient's address is 0."""
    return tl.where(address != 0, chunk.length, 0)


@triton.jit
def whole_vectors(length, VECTOR: tl.constexpr):
    """Elements up to the last whole vector."""
    return tl.multiple_of(length - length % VECTOR, VECTOR)
