"""The weighted mean of K co-resident replicas, in place (Eq. 3): each set is read once and
written once."""

from dataclasses import dataclass

import triton
import triton.language as tl

from .arithmetic import add_weighted, empty_sum
from .chunks import BATCH, TAIL, load_chunk, whole_vectors
from .numbers import load_parameter, store_parameter
from .step import HELD, load_pointers


@dataclass(frozen=True)
class AverageVariant:
    """All that an average is compiled for."""

    replicas: int
    param: int  # formats: numbers.py
    master: int
    vector: int
    block: int


@triton.jit
def pointers_of(addresses, held, offset, k: tl.constexpr, V: tl.constexpr):
    if V.replicas <= HELD:
        return held[2 * k], held[2 * k + 1]
    else:
        return load_pointers(addresses, offset, k, V)


@triton.jit
def average_block(
    addresses, held, weights, offset, start, end, V: tl.constexpr, BLOCK: tl.constexpr
):
    K: tl.constexpr = V.replicas
    offsets = start + tl.arange(0, BLOCK)
    mask = offsets < end
    mean = empty_sum(BLOCK)
    for batch in tl.static_range(0, K, BATCH):
        values = ()
        for k in tl.static_range(batch, min(batch + BATCH, K)):
            param, master = pointers_of(addresses, held, offset, k, V)
            read = offsets < tl.where(weights[k] != 0, end, 0)
            values = values + (load_parameter(param, master, offsets, read, V.param, V.master),)
        for k in tl.static_range(batch, min(batch + BATCH, K)):
            mean = add_weighted(mean, weights[k], values[k - batch])
    for k in tl.static_range(K):
        param, master = pointers_of(addresses, held, offset, k, V)
        store_parameter(param, master, offsets, mask, mean, V.param, V.master)


@triton.jit(do_not_specialize=["slices"])
def average(chunks, addresses, weights, slices, V: tl.constexpr):
    """`addresses`: [tensor][params[K], masters[K]]."""
    K: tl.constexpr = V.replicas
    VECTOR: tl.constexpr = V.vector
    chunk = load_chunk(chunks, slices)
    addresses += chunk.tensor * (2 * K)
    # before the loop: a store may hit any address, so nothing would be kept from one block to the
    # next
    held = ()
    if K <= HELD:
        for k in tl.static_range(K):
            held = held + load_pointers(addresses, chunk.offset, k, V)
    numbers = ()
    for k in tl.static_range(K):
        numbers = numbers + (tl.load(weights + k),)
    whole = whole_vectors(chunk.length, VECTOR)
    for start in range(0, whole, V.block):
        average_block(addresses, held, numbers, chunk.offset, start, whole, V, V.block)
    if whole < chunk.length:
        end = chunk.length
        average_block(addresses, held, numbers, chunk.offset, whole, end, V, TAIL)
