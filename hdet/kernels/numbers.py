"""Numbers in memory, in torch: csrc/core/numbers.h, philox.h and eight_bit.h.

Ways of storing a float32 in 16 bits or 24, the random numbers for some, and moments in 8 bits.
Unsigned 32-bit arithmetic is done in int64, whose products wrap around where they must.

Moments in 8 bits are blocks of 256 numbers, each with a float32 scale, and codes from a table that
is dense near 0: dynamic tree quantisation (Dettmers et al. 2021, arXiv 2110.02861), computed here
alone; kernels get it uploaded (`codebook`).

A block's scale is its largest magnitude, which therefore is stored exactly, at least LEAST_SCALE,
or NaN where a number of the block is not finite. A number's code stands for the table's nearest to
number * (1 / scale): a division for each block, and none for each number. So `encode` gives back
scales and codes that `decode` was given, bitwise. The largest number is the scale itself. The
inverse and the products are each off by 2^-24 of their size. Neighbours in the table differ by 0.35
% at least.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch
from torch import Tensor

from hdet.tensors.strides import laid, memory_order

_LOW = 0xFFFFFFFF


def _bits(x: Tensor) -> Tensor:
    """The 32 bits of float32 numbers, 0 .. 2^32 - 1."""
    return x.contiguous().view(torch.int32).long() & _LOW


def _as_16(bits: Tensor) -> Tensor:
    """0 .. 65535 as int16 of the same bits."""
    return torch.where(bits >= 0x8000, bits - 0x10000, bits).to(torch.int16)


LOWER = (torch.int16, torch.int8)
"""what stands beside a bfloat16 in the split forms: the 16 bits that it lacks of a float32, or the
first 8 of them, of a number of 24 bits"""


def is_lower(master: Tensor | None) -> bool:
    """Of a split form? Then it is no value without its parameter."""
    return master is not None and master.dtype in LOWER


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """The float32 of a bfloat16 and what stands beside it: the split forms, exact for every number
    of 32 or 24 bits; zero where upper was set to zero."""
    # the lower half counts as signed: from 0x8000 on the upper half was rounded up, which never
    # makes a zero
    high = upper.view(torch.int16).int() << 16
    low = lower.int() << 16 - 8 * lower.itemsize
    return torch.where((upper == 0) & (lower < 0), high, high + low).view(torch.float32)


def split(x: Tensor, dtype: torch.dtype = torch.int16) -> tuple[Tensor, Tensor]:
    """A float32 as (bfloat16 rounded to nearest, ties away from zero; lower half of this dtype).
    To 24 bits it is rounded to nearest, ties to even.

    A NaN is 0x7fc0 and 0.
    """
    if dtype == torch.int8:
        x = to_24(x)
    bits = torch.where(x.isnan(), 0x7FC00000, _bits(x))
    upper, lower = _as_16((bits + 0x8000 & _LOW) >> 16), _as_16(bits & 0xFFFF)
    return upper.view(torch.bfloat16), (lower >> 16 - 8 * dtype.itemsize).to(dtype)


def to_24(x: Tensor, random: Tensor | None = None) -> Tensor:
    """Rounded to 24 bits: up with the probability of what is cut off, for a `random` uniform in
    0 .. 255; else to nearest, ties to even. Infinities and NaN are exact."""
    bits = _bits(x)
    bits = bits + (0x7F + (bits >> 8 & 1) if random is None else random) & 0xFFFFFF00
    rounded = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


def value_of(param: Tensor, master: Tensor | None) -> Tensor:
    if master is None:
        return param.float()
    return join(param, master) if is_lower(master) else master


def store(value: Tensor, param: Tensor, master: Tensor | None) -> None:
    if master is not None and is_lower(master):
        upper, lower = split(value.float(), master.dtype)
        param.copy_(upper)
        master.copy_(lower)
        return
    param.copy_(value)
    if master is not None:
        master.copy_(value)


def stochastic_bfloat16(x: Tensor, random: Tensor) -> Tensor:
    """Rounded up with the probability of what would be cut off.

    `random` is uniform in 0 .. 65535. Infinities and NaN are exact.
    """
    rounded = _as_16((_bits(x) + random) >> 16).view(torch.bfloat16)
    return torch.where(x.isfinite(), rounded, x.bfloat16())


def philox(
    seed: int, counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four words of 32 random bits for a key of 64 bits and a counter of four
    words."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _LOW, seed >> 32
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            _high(product1) ^ c1 ^ k0,
            product1 & _LOW,
            _high(product0) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3  # type: ignore[return-value]


def _high(product: Tensor | int) -> Tensor | int:
    return (product >> 32) & _LOW


def random_words(seed: int, step: Tensor, replica: int, identity: int, like: Tensor) -> Tensor:
    """A word for each element of `like`: four neighbours share a counter (quad, replica, identity,
    step)."""
    count = like.numel()
    quad = torch.arange((count + 3) // 4, device=like.device)
    words = philox(
        seed,
        (
            quad & _LOW,
            quad >> 32 & 0xFFFF | replica << 16,
            identity + 0 * quad,
            step.long() + 0 * quad,
        ),
    )
    return torch.stack(words, dim=1).flatten()[:count].view(like.shape)


# moments in 8 bits

CODE_BLOCK = 256
"""Elements of a tensor that share a scale, counted from its first one as it lies on this rank.

A chunk holds whole blocks.
"""
CODES = torch.uint8
PARTS = 2704
"""parts of the way from 2^-21 to 1 that have one threshold at most, 128 for each exponent"""
LEAST_SCALE = 2.0**-104
"""from here on scale * table is a normal float32, for every entry but 0"""


def count_scales(elements: int) -> int:
    return -(-elements // CODE_BLOCK)


@functools.cache
def magnitudes(signed: bool) -> tuple[float, ...]:
    """What codes stand for, ascending, in float32: 128 magnitudes, as one bit is the sign; or,
    unsigned, 256.

    The bits of a code of the tree are k zeros, a one, and a number j of those that are left: the
    middle of the j-th of n equal parts of [0.1, 1] * 10^-k. Where none is left it is 1, and all
    zeros are 0. Codes here are numbered by what they stand for.
    """
    bits = 7 if signed else 8
    parts = [(k, 2 ** (bits - 1 - k)) for k in range(bits - 1)]
    tree = [(2 * n + 18 * j + 9) / (20 * n * 10**k) for k, n in parts for j in range(n)]
    return _rounded([0.0, *sorted(tree), 1.0])


@functools.cache
def thresholds(signed: bool) -> tuple[float, ...]:
    """Where one magnitude gives way to the next: a magnitude's place in the table is the number of
    thresholds below it.

    Half-way, float32. Only an unsigned number that is not 0 never becomes 0: a second moment is
    what steps are divided by.
    """
    table = magnitudes(signed)
    middles = [(a + b) / 2 for a, b in itertools.pairwise(table)]
    return _rounded(middles if signed else [0.0, *middles[1:]])


def _rounded(numbers: list[float]) -> tuple[float, ...]:
    return tuple(torch.tensor(numbers, dtype=torch.float64, device="cpu").float().tolist())


@functools.cache
def _tables(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Values by code, thresholds."""
    table = list(magnitudes(signed))
    values = table + [-x for x in table] if signed else table
    made = [
        torch.tensor(numbers, dtype=torch.float32, device=device)
        for numbers in (values, thresholds(signed))
    ]
    return made[0], made[1]


@functools.cache
def codebook() -> Tensor:
    """[signed, unsigned][bytes] on the CPU: what kernels read, as csrc/core/eight_bit.h has it."""
    # the bits of the numbers at which parts begin
    edges = (torch.arange(PARTS + 1, device="cpu") << 16) + (127 - 21 << 23)
    rows = []
    for signed in (True, False):
        values, limits = _tables(signed, torch.device("cpu"))
        below = torch.bucketize(edges.int().view(torch.float32), limits)
        lower = _bits(limits)[below[:-1].clamp(max=len(limits) - 1)] & 0xFFFF
        parts = (below[:-1] << 16) + torch.where(below.diff() == 1, 0xFFFF - lower, 0)
        rows.append(torch.cat((values.view(torch.uint8), parts.int().view(torch.uint8))))
    return torch.stack(rows)


def encode(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes in the shape of the float32 values, and a scale for each block."""
    flat = _flat(values.detach())
    scales = _scales(flat)
    _, limits = _tables(signed, flat.device)
    # The inverse of a large scale is not a normal number, and 0 where a user has subnormal numbers
    # flushed.
    unit = torch.where(scales > 1.0, 0.25, 1.0)
    share = flat * _spread(unit, flat.numel()) * _spread(1.0 / (unit * scales), flat.numel())
    codes = torch.bucketize(share.abs() if signed else share, limits)
    codes = torch.where(share.isnan(), 0, codes)
    if signed:
        codes = codes + 128 * (share < -limits[0])  # no code for minus zero
    return _shaped(codes.to(CODES), values), scales


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """The float32 values."""
    flat = _flat(codes)
    values, _ = _tables(signed, codes.device)
    return _shaped(values[flat.long()] * _spread(scales, flat.numel()), codes)


def _flat(tensor: Tensor) -> Tensor:
    """As it lies in memory: neighbours there share a block."""
    return laid(tensor, memory_order(tensor)).reshape(-1)


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    """What `_flat` made of a tensor that lies as `like` does."""
    order = memory_order(like)
    if order is None:
        return flat.view(like.shape)
    return flat.view(laid(like, order).shape).permute([order.index(d) for d in range(len(order))])


def _scales(flat: Tensor) -> Tensor:
    rest = -flat.numel() % CODE_BLOCK
    padded = torch.nn.functional.pad(flat.abs(), (0, rest)).view(-1, CODE_BLOCK)
    largest = padded.amax(dim=1) if len(padded) else padded.new_zeros(0)  # NaN, if there is one
    return torch.where(largest.isfinite(), largest.clamp(min=LEAST_SCALE), math.nan)


def _spread(scales: Tensor, elements: int) -> Tensor:
    """The scale of each element."""
    return scales.repeat_interleave(CODE_BLOCK)[:elements]
