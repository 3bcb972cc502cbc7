"""Numbers in memory and random numbers: csrc/core/numbers.h and csrc/core/philox.h in Triton.

A stream is an address from a table and a format, by the numbers of numbers.h: DType, or Master for
a master.

VECTOR is how many elements a thread moves at a time: 16 bytes of a launch's widest stream where all
its addresses are multiples of 16, so 4 elements beside float32 and 8 otherwise; 1 where some
address is not. Streams of one launch move in equal vectors, because values would have to change
threads between vectors of different lengths.
"""

import triton
import triton.language as tl

NONE, F32, BF16, F16 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
CODES = tl.constexpr(4)
"""of moments alone: 8 bits, csrc/core/eight_bit.h"""
CODE_BLOCK = tl.constexpr(256)
"""elements that share a scale"""
SPLIT = tl.constexpr(2)
"""a master that is the lower half of a bfloat16 parameter, 16 bits as well"""
SPLIT24 = tl.constexpr(4)
"""a master that is the first 8 bits of it"""


@triton.jit
def bits_of(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def from_bf16(x):
    return float_of(x.to(tl.uint32) << 16)


@triton.jit
def to_bf16(x):
    """To nearest, ties to even. NaN stays NaN."""
    bits = bits_of(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def to_bf16_stochastic(x, random):
    """Up with the probability of what would be cut off.

    `random` is uniform in 0 .. 65535. Infinities and NaN are exact.
    """
    bits = bits_of(x)
    special = (bits & 0x7F800000) == 0x7F800000
    return tl.where(special, to_bf16(x), ((bits + random) >> 16).to(tl.uint16))


@triton.jit
def join(upper, lower):
    """The split form (csrc/core/numbers.h): a float32 as its bfloat16 (ties away from zero) and its
    low 16 bits."""
    bits = ((upper.to(tl.uint32) - (lower >> 15).to(tl.uint32)) << 16) + lower.to(tl.uint32)
    return float_of(
        tl.where(((upper & 0x7FFF) == 0) & (lower >= 0x8000), upper.to(tl.uint32) << 16, bits)
    )


@triton.jit
def not_nan(x):
    """The bits of x; a NaN's are those of the canonical one."""
    bits = bits_of(x)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits).to(tl.uint32)


@triton.jit
def upper_half(x):
    return ((not_nan(x) + 0x8000) >> 16).to(tl.uint16)


@triton.jit
def lower_half(x):
    return not_nan(x).to(tl.uint16)


@triton.jit
def to_24(x, random):
    """To the 24 bits of SPLIT24, up with the probability of what is cut off. `random` is uniform in
    0 .. 255."""
    bits = bits_of(x)
    special = (bits & 0x7F800000) == 0x7F800000
    return float_of(tl.where(special, bits, (bits + random) & 0xFFFFFF00).to(tl.uint32))


@triton.jit
def half_of_24(x):
    """In the place of random bits it rounds to nearest, ties to even."""
    return 0x7F + ((bits_of(x) >> 8) & 1)


@triton.jit
def pointer(address, element, FORMAT: tl.constexpr, VECTOR: tl.constexpr):
    """To one element of a tensor: the start of a chunk, whose offset in bytes is a multiple of
    16."""
    if FORMAT == F32:
        p = (address + element * 4).to(tl.pointer_type(tl.float32))
        return tl.multiple_of(p, 4 * VECTOR)
    elif FORMAT == F16:
        p = (address + element * 2).to(tl.pointer_type(tl.float16))
        return tl.multiple_of(p, 2 * VECTOR)
    elif FORMAT == CODES:
        p = (address + element).to(tl.pointer_type(tl.uint8))
        return tl.multiple_of(p, VECTOR)
    else:
        p = (address + element * 2).to(tl.pointer_type(tl.uint16))
        return tl.multiple_of(p, 2 * VECTOR)


@triton.jit
def load(p, offsets, mask, FORMAT: tl.constexpr):
    """float32 values."""
    x = tl.load(p + offsets, mask=mask, other=0)
    if FORMAT == BF16:
        return from_bf16(x)
    else:
        return x.to(tl.float32)


@triton.jit
def rounded(x, FORMAT: tl.constexpr):
    """To nearest, and in float32 again."""
    if FORMAT == BF16:
        return from_bf16(to_bf16(x))
    elif FORMAT == F16:
        return x.to(tl.float16).to(tl.float32)
    else:
        return x


@triton.jit
def store(p, offsets, mask, x, FORMAT: tl.constexpr):
    """Rounds to nearest."""
    if FORMAT == BF16:
        x = to_bf16(x)
    elif FORMAT == F16:
        x = x.to(tl.float16)
    tl.store(p + offsets, x, mask=mask)


@triton.jit
def load_parameter(param, master, offsets, mask, PARAM: tl.constexpr, MASTER: tl.constexpr):
    """The value of the master where there is one, else the parameter."""
    if MASTER == F32:
        return load(master, offsets, mask, F32)
    elif MASTER == SPLIT:
        return join(
            tl.load(param + offsets, mask=mask, other=0),
            tl.load(master + offsets, mask=mask, other=0),
        )
    elif MASTER == SPLIT24:
        lower = tl.load(master + offsets, mask=mask, other=0).to(tl.uint16) << 8
        return join(tl.load(param + offsets, mask=mask, other=0), lower)
    else:
        return load(param, offsets, mask, PARAM)


@triton.jit
def store_parameter(param, master, offsets, mask, x, PARAM: tl.constexpr, MASTER: tl.constexpr):
    if MASTER == F32:
        tl.store(master + offsets, x, mask=mask)
        store(param, offsets, mask, x, PARAM)
    elif MASTER == SPLIT:
        tl.store(param + offsets, upper_half(x), mask=mask)
        tl.store(master + offsets, lower_half(x), mask=mask)
    elif MASTER == SPLIT24:
        x = to_24(x, half_of_24(x))
        tl.store(param + offsets, upper_half(x), mask=mask)
        tl.store(master + offsets, (lower_half(x) >> 8).to(tl.uint8), mask=mask)
    else:
        store(param, offsets, mask, x, PARAM)


@triton.jit
def rounding_bits(seed, step, replica, id, element, BLOCK: tl.constexpr):
    """32 random bits for each of BLOCK elements from `element` on, a multiple of 4: philox.h,
    rounding_bits().

    The low 16 bits round the parameter of a replica, the high 16 bits of replica 0 the second
    moment.
    """
    quad = (element // 4).to(tl.int64) + tl.arange(0, BLOCK // 4)
    high = ((quad >> 32).to(tl.uint32) & 0xFFFF) | (replica.to(tl.uint32) << 16)
    a, b, c, d = tl.philox(seed, quad.to(tl.uint32), high, id.to(tl.uint32), step)
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
