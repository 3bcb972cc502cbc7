"""K replicas on one line, A * base - rho_k * D: csrc/core/rank_one.h in Triton, where the formulas
are explained.

Between steps each tensor keeps A in a double. A line is what an update reads of a tensor:
(step_size, decay) in a step, (rho_mean, A) in a converge.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .chunks import TAIL, live_length, load_chunk, whole_vectors
from .hyper import store_pair
from .numbers import F32, load, pointer, store
from .rules import HYPER_ROW, load_row, take_step
from .step import SHARED, load_shared, locate, new_direction, pointers_of


@triton.jit(do_not_specialize=["num_tensors"])
def derive_converge(groups, mean_rho, scales, lines, num_tensors, TENSORS: tl.constexpr):
    """The replicas' mean becomes base and outputs; D = 0 and A = 1."""
    tensor = tl.program_id(0) * TENSORS + tl.arange(0, TENSORS)
    live = tensor < num_tensors
    address = tl.load(scales + tensor, mask=live, other=0).to(tl.pointer_type(tl.float64))
    scale = tl.load(address, mask=live, other=0)
    rho = tl.load(mean_rho + tl.load(groups + tensor, mask=live, other=0), mask=live, other=0)
    store_pair(lines + tensor * 2, rho, scale, live)
    tl.store(address, scale * 0 + 1, mask=live)


class Line(NamedTuple):
    base: tl.tensor
    displacement: tl.tensor
    along: tl.tensor  # step_size, or rho_mean
    scale: tl.tensor  # decay, or A


@triton.jit
def load_line(addresses, lines, chunk, V: tl.constexpr):
    line = lines + chunk.tensor * 2
    return Line(
        pointer(tl.load(addresses + 2 * chunk.tensor), chunk.offset, F32, V.vector),
        pointer(tl.load(addresses + 2 * chunk.tensor + 1), chunk.offset, F32, V.vector),
        tl.load(line),
        tl.load(line + 1),
    )


@triton.jit
def load_place(line, offsets, mask):
    """Base and D of a block."""
    return load(line.base, offsets, mask, F32), load(line.displacement, offsets, mask, F32)


@triton.jit
def rank_one_block(shared, place, line, row, start, end, V: tl.constexpr, BLOCK: tl.constexpr):
    K: tl.constexpr = V.replicas
    offsets = start + tl.arange(0, BLOCK)
    mask = offsets < end
    live = offsets < tl.where(place.skip == 0, end, 0)
    none = tl.zeros((BLOCK,), tl.float32)
    loaded = load_shared(shared, offsets, mask, V)
    base, displacement = load_place(line, offsets, mask)
    u, _ = new_direction(shared, place, row, start, loaded, offsets, live, none, V, BLOCK)
    displacement = line.scale * displacement + line.along * tl.where(place.skip == 0, u, 0.0)
    store(line.displacement, offsets, mask, displacement, F32)
    for k in tl.static_range(K):
        output, _ = pointers_of(place, k, V)
        new = take_step(
            place.replica_rows[2 * k], place.replica_rows[2 * k + 1], base, displacement
        )
        store(output, offsets, mask, new, V.param)
    if V.zero_gradients:
        store(shared.gradient, offsets, mask, none, V.gradient)


@triton.jit
def update_rank_one(
    chunks,
    gradients,  # [tensor][2] address, type
    addresses,  # [tensor][SHARED + 2 K], the outputs for params
    line_addresses,  # [tensor][2] base, displacement
    ids,
    rows,
    replica_rows,
    lines,
    control,
    random,  # seed, first replica
    V: tl.constexpr,
):
    VECTOR: tl.constexpr = V.vector
    chunk = load_chunk(chunks)
    shared, place = locate(chunk, gradients, addresses, ids, replica_rows, control, random, V)
    line = load_line(line_addresses, lines, chunk, V)
    row = load_row(rows + chunk.tensor * HYPER_ROW)
    length = live_length(chunk, place.gradient)
    whole = whole_vectors(length, VECTOR)
    for start in range(0, whole, V.block):
        rank_one_block(shared, place, line, row, start, whole, V, V.block)
    if whole < length:
        rank_one_block(shared, place, line, row, whole, length, V, TAIL)


@triton.jit
def converge_block(addresses, offset, line, start, end, V: tl.constexpr, BLOCK: tl.constexpr):
    K: tl.constexpr = V.replicas
    offsets = start + tl.arange(0, BLOCK)
    mask = offsets < end
    base, displacement = load_place(line, offsets, mask)
    base = take_step(line.along, line.scale, base, displacement)
    store(line.base, offsets, mask, base, F32)
    store(line.displacement, offsets, mask, tl.zeros((BLOCK,), tl.float32), F32)
    for k in tl.static_range(K):
        store(
            pointer(tl.load(addresses + k), offset, V.param, V.vector), offsets, mask, base, V.param
        )


@triton.jit
def converge(chunks, addresses, line_addresses, lines, V: tl.constexpr):
    VECTOR: tl.constexpr = V.vector
    chunk = load_chunk(chunks)
    outputs = addresses + chunk.tensor * (SHARED + 2 * V.replicas) + SHARED
    line = load_line(line_addresses, lines, chunk, V)
    whole = whole_vectors(chunk.length, VECTOR)
    for start in range(0, whole, V.block):
        converge_block(outputs, chunk.offset, line, start, whole, V, V.block)
    if whole < chunk.length:
        converge_block(outputs, chunk.offset, line, whole, chunk.length, V, TAIL)
