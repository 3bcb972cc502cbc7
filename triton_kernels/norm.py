"""Sums of squares in float64, one for each chunk. A square of a float32 is exact there."""

import triton
import triton.language as tl

from .chunks import TAIL, live_length, load_chunk, whole_vectors
from .numbers import BF16, F16, F32, load, pointer


@triton.jit
def chunk_squares(address, chunk, FORMAT: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    p = pointer(address, chunk.offset, FORMAT, VECTOR)
    length = live_length(chunk, address)
    whole = whole_vectors(length, VECTOR)
    sums = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, whole, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = load(p, offsets, offsets < whole, FORMAT).to(tl.float64)
        sums += x * x
    result = tl.sum(sums, 0)
    if VECTOR > 1:
        offsets = whole + tl.arange(0, TAIL)
        x = load(p, offsets, offsets < length, FORMAT).to(tl.float64)
        result += tl.sum(x * x, 0)
    return result


@triton.jit
def squares(chunks, tensors, partials, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """One sum for each chunk. `tensors`: [tensor][2] address, type (csrc/core/numbers.h: DType)."""
    chunk = load_chunk(chunks)
    address = tl.load(tensors + 2 * chunk.tensor)
    kind = tl.load(tensors + 2 * chunk.tensor + 1)
    if kind == F32:
        result = chunk_squares(address, chunk, F32, 4 if ALIGNED else 1, BLOCK)
    elif kind == BF16:
        result = chunk_squares(address, chunk, BF16, 8 if ALIGNED else 1, BLOCK)
    else:
        result = chunk_squares(address, chunk, F16, 8 if ALIGNED else 1, BLOCK)
    tl.store(partials + tl.program_id(0), result)
