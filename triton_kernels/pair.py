"""Operations between two sets of tensors: a scaled copy, a running average, an exchange
(csrc/core/plan.h, PairPlan)."""

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl

from .chunks import TAIL, load_chunk, whole_vectors
from .numbers import SPLIT, load_parameter, pointer, store_parameter
from .rules import running_average, scaled


@dataclass(frozen=True)
class PairVariant:
    """All that a pairing is compiled for."""

    pairing: str
    source: int = 1  # formats: numbers.py
    lower: int = 0  # SPLIT: the source has a lower half
    param: int = 1
    master: int = 0
    vector: int = 4
    block: int = 1024


class Pointers(NamedTuple):
    source: tl.tensor
    lower: tl.tensor
    param: tl.tensor
    master: tl.tensor


@triton.jit
def exchange(a, b, offsets, mask):
    x = tl.load(a + offsets, mask=mask, other=0)
    y = tl.load(b + offsets, mask=mask, other=0)
    tl.store(a + offsets, y, mask=mask)
    tl.store(b + offsets, x, mask=mask)


@triton.jit
def pair_block(p, scale, start, end, V: tl.constexpr, BLOCK: tl.constexpr):
    offsets = start + tl.arange(0, BLOCK)
    mask = offsets < end
    if V.pairing == "swap":
        exchange(p.source, p.param, offsets, mask)
        if V.lower == SPLIT and V.master == SPLIT:
            exchange(p.lower, p.master, offsets, mask)
    else:
        read = offsets < tl.where(scale != 0, end, 0)
        value = load_parameter(p.source, p.lower, offsets, read, V.source, V.lower)
        if V.pairing == "lerp":
            old = load_parameter(p.param, p.master, offsets, mask, V.param, V.master)
            value = running_average(old, value, scale)
        else:
            value = scaled(scale, value)
        store_parameter(p.param, p.master, offsets, mask, value, V.param, V.master)


@triton.jit
def pair(chunks, addresses, scale, V: tl.constexpr):
    """`addresses`: [tensor][4] source, its lower half, destination, its master.

    `scale` is the weight of a running average.
    """
    VECTOR: tl.constexpr = V.vector
    chunk = load_chunk(chunks)
    addresses += chunk.tensor * 4
    p = Pointers(
        pointer(tl.load(addresses), chunk.offset, V.source, V.vector),
        pointer(tl.load(addresses + 1), chunk.offset, V.lower, V.vector),
        pointer(tl.load(addresses + 2), chunk.offset, V.param, V.vector),
        pointer(tl.load(addresses + 3), chunk.offset, V.master, V.vector),
    )
    whole = whole_vectors(chunk.length, VECTOR)
    for start in range(0, whole, V.block):
        pair_block(p, scale, start, whole, V, V.block)
    if whole < chunk.length:
        pair_block(p, scale, whole, chunk.length, V, TAIL)
