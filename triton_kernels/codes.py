"""Moments in 8 bits: csrc/core/eight_bit.h in Triton.

A table is a Codebook of that file: values by code, parts.
"""

import triton
import triton.language as tl

from .numbers import CODE_BLOCK, bits_of, float_of

LEAST_SHARE, LEAST_SHARE_BITS = tl.constexpr(2.0**-21), tl.constexpr(106 << 23)
TABLE_FLOATS = tl.constexpr(256 + 2704)
"""a table's size"""


@triton.jit
def load_codes(p, scales, table, offsets, mask):
    """float32 values; 0 where there is none."""
    codes = tl.load(p + offsets, mask=mask, other=0)
    scale = tl.load(scales + offsets // CODE_BLOCK, mask=mask, other=0)
    return tl.load(table + codes.to(tl.int32)) * scale


@triton.jit
def encode(table, share, SIGNED: tl.constexpr):
    """The code of a share of the scale: how many thresholds are below it."""
    magnitude = share
    if SIGNED:
        magnitude = tl.abs(share)
    # 0 for NaN as well
    place = tl.where(magnitude > LEAST_SHARE, bits_of(magnitude) - LEAST_SHARE_BITS, 0)
    parts = (table + 256).to(tl.pointer_type(tl.uint32))
    code = (tl.load(parts + (place >> 16).to(tl.int32)) + (place & 0xFFFF)) >> 16
    if SIGNED:
        return tl.where((code != 0) & (share < 0), code | 128, code)
    else:
        return tl.where(share > 0, code, 0)


@triton.jit
def store_codes(p, scales, table, offsets, live, x, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Of whole blocks of codes, in which what is not there is 0."""
    BLOCKS: tl.constexpr = BLOCK // CODE_BLOCK
    values = tl.reshape(x, (BLOCKS, CODE_BLOCK))
    largest = tl.max((bits_of(values) & 0x7FFFFFFF).to(tl.int32), axis=1)
    least = (127 - 104) << 23
    scale_bits = tl.where(
        largest >= 0x7F800000, 0x7FC00000, tl.where(largest < least, least, largest)
    )
    scale = float_of(scale_bits.to(tl.uint32))
    unit = tl.where(scale > 1.0, 0.25, 1.0)  # the inverse of a large scale is not a normal number
    inverse = tl.div_rn(tl.full((BLOCKS,), 1.0, tl.float32), unit * scale)
    shares = tl.reshape(values * unit[:, None] * inverse[:, None], (BLOCK,))
    spread = tl.reshape(tl.broadcast_to(scale[:, None], (BLOCKS, CODE_BLOCK)), (BLOCK,))
    tl.store(scales + offsets // CODE_BLOCK, spread, mask=live & (offsets % CODE_BLOCK == 0))
    tl.store(p + offsets, encode(table, shares, SIGNED).to(tl.uint8), mask=live)
