"""Sums of squares, a float64 for each chunk, mostly added up in pairs of float32, as
csrc/cuda/norm.cu does: float64 is slow on many GPUs."""

import triton
import triton.language as tl

from .chunks import TAIL, live_length, load_chunk, whole_vectors
from .numbers import BF16, F16, F32, bits_of, load, pointer

LEAST = tl.constexpr(2.0**-80)
"""a sum of fewer than 2^15 squares that is smaller may lack bits of numbers whose squares are not
normal float32"""


@triton.jit
def add_squares(total, rest, x):
    """What rounding takes away is in `rest`, which is NaN if a square is infinite."""
    square = x * x
    after = total + square
    added = after - total
    rest += tl.fma(x, x, -square) + ((total - (after - added)) + (square - added))
    return after, rest


@triton.jit
def wide_squares(p, whole, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    """In float64, where a square of a float32 is exact."""
    sums = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, whole, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = load(p, offsets, offsets < whole, FORMAT).to(tl.float64)
        sums += x * x
    return tl.sum(sums, 0)


@triton.jit
def chunk_squares(address, chunk, FORMAT: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    p = pointer(address, chunk.offset, FORMAT, VECTOR)
    length = live_length(chunk, address)
    whole = whole_vectors(length, VECTOR)
    total = tl.zeros((BLOCK,), tl.float32)
    rest = total
    bits = tl.zeros((BLOCK,), tl.uint32)
    for start in range(0, whole, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = load(p, offsets, offsets < whole, FORMAT)
        total, rest = add_squares(total, rest, x)
        bits |= bits_of(x)
    result = tl.sum(total.to(tl.float64) + rest.to(tl.float64), 0)
    # NaN where a square was too large
    if not (result >= LEAST) and tl.max((bits & 0x7FFFFFFF).to(tl.int32), 0) != 0:
        result = wide_squares(p, whole, FORMAT, BLOCK)
    if VECTOR > 1:
        result += wide_squares(p + whole, length - whole, FORMAT, TAIL)
    return result


@triton.jit
def squares(chunks, gradients, partials, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """One sum for each chunk. `gradients`: [tensor] addresses."""
    chunk = load_chunk(chunks, 1)
    address = tl.load(gradients + chunk.tensor)
    kind = chunk.formats & 15
    if kind == F32:
        result = chunk_squares(address, chunk, F32, 4 if ALIGNED else 1, BLOCK)
    elif kind == BF16:
        result = chunk_squares(address, chunk, BF16, 8 if ALIGNED else 1, BLOCK)
    else:
        result = chunk_squares(address, chunk, F16, 8 if ALIGNED else 1, BLOCK)
    tl.store(partials + tl.program_id(0), result)
