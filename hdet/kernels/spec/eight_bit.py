"""Moments in 8 bits: blocks of 256 numbers, each with a float32 scale, and codes from a table that is dense near 0.

The table is dynamic tree quantisation (Dettmers et al. 2021, arXiv 2110.02861), computed here alone; kernels get it uploaded (`codebook`).

A block's scale is its largest magnitude, which therefore is stored exactly, at least LEAST_SCALE, or NaN where a number of the block is
not finite. A number's code stands for the table's nearest to number / scale. So `encode` gives back scales and codes that
`decode` was given, bit for bit: the largest is the scale itself, products with a normal result are off by 2^-24 of their size, quotients by
as much, and neighbours in the table differ by 0.35 % at least.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

BLOCK = 256
"""Elements of a tensor that share a scale, counted from its first one as it lies on this rank. A chunk holds whole blocks."""
CODES = torch.uint8
LEAST_SCALE = 2.0**-104
"""from here on scale * table is a normal float32, for every entry but 0"""


def count_scales(elements: int) -> int:
    return -(-elements // BLOCK)


@functools.cache
def magnitudes(signed: bool) -> tuple[float, ...]:
    """What codes stand for, ascending, in float32: 128 magnitudes, as one bit is the sign; or, unsigned, 256.

    The bits of a code of the tree are k zeros, a one, and a number j of those that are left: the middle of the j-th of n equal parts of
    [0.1, 1] * 10^-k. Where none is left it is 1, and all zeros are 0. Codes here are numbered by what they stand for.
    """
    bits = 7 if signed else 8
    parts = [(k, 2 ** (bits - 1 - k)) for k in range(bits - 1)]
    tree = [(2 * n + 18 * j + 9) / (20 * n * 10**k) for k, n in parts for j in range(n)]
    return tuple(torch.tensor([0.0, *sorted(tree), 1.0], dtype=torch.float64).float().tolist())


@functools.cache
def thresholds(signed: bool) -> tuple[float, ...]:
    """Where one magnitude gives way to the next: a magnitude's place in the table is the number of thresholds below it.

    Half-way, float32. Only an unsigned number that is not 0 never becomes 0: a second moment is what steps are divided by.
    """
    table = magnitudes(signed)
    middles = [(a + b) / 2 for a, b in zip(table, table[1:], strict=False)]
    return tuple(torch.tensor(middles if signed else [0.0, *middles[1:]], dtype=torch.float64).float().tolist())


@functools.cache
def codebook(device: torch.device) -> Tensor:
    """[signed, unsigned][values by code, thresholds][256], float32: what kernels read (csrc/core/eight_bit.h)."""
    rows = []
    for signed in (True, False):
        table = list(magnitudes(signed))
        rows.append([table + [-x for x in table] if signed else table, [*thresholds(signed)]])
        rows[-1][1] += [math.inf] * (256 - len(rows[-1][1]))
    return torch.tensor(rows, dtype=torch.float32).to(device)


def encode(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes in the shape of the float32 values, and a scale for each block."""
    flat = values.detach().contiguous().view(-1)
    scales = _scales(flat)
    table = codebook(flat.device)[0 if signed else 1]
    share = flat / _spread(scales, flat.numel())
    place = torch.bucketize(share.abs() if signed else share, table[1][: 127 if signed else 255])
    codes = torch.where(share.isnan(), 0, place)
    if signed:
        codes = codes + 128 * (share < -table[1][0])  # no code for minus zero
    return codes.to(CODES).view(values.shape), scales


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """The float32 values."""
    flat = codes.reshape(-1)
    table = codebook(codes.device)[0 if signed else 1]
    return (table[0][flat.long()] * _spread(scales, flat.numel())).view(codes.shape)


def _scales(flat: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(flat.abs(), (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    largest = padded.amax(dim=1) if len(padded) else padded.new_zeros(0)  # NaN, if there is one
    return torch.where(largest.isfinite(), largest.clamp(min=LEAST_SCALE), math.nan)


def _spread(scales: Tensor, elements: int) -> Tensor:
    """The scale of each element."""
    return scales.repeat_interleave(BLOCK)[:elements]
