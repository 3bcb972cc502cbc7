"""K replicas on one line, A * base - rho_k * D: csrc/core/rank_one.h in Triton, where the formulas are explained.

Between steps each row keeps A in a double. A line is what an update reads of a row: (step_size, decay) in a step, (rho_mean, A) in a
converge.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .chunks import TAIL, load_chunk, whole_vectors
from .hyper import ROWS, correction1, count_steps, derive_control, derive_decay, load_settings, rho_settings, store_row
from .numbers import F32, load, pointer, store
from .rules import HYPER_ROW, load_row, take_step
from .step import SHARED, load_shared, locate, new_direction, pointers_of


@triton.jit
def derive_lines(settings, skip, s, scales, lines, replica_rows, row, live, num_rows, num_replicas, RULE: tl.constexpr):
    """The lines of ROWS rows, what their scales become, and (rho_k, A') for each replica's output."""
    decay = tl.where(skip, tl.full((ROWS,), 1.0, tl.float64), derive_decay(s, s.lr, RULE))
    scale = tl.load(scales + row, mask=live, other=0) * decay
    tl.store(lines + row * 2, (s.lr / correction1(s, RULE)).to(tl.float32), mask=live)
    tl.store(lines + row * 2 + 1, decay.to(tl.float32), mask=live)
    tl.store(scales + row, scale, mask=live)
    for k in range(num_replicas):
        place = row * num_replicas + k
        rho = tl.load(rho_settings(settings, num_rows) + place, mask=live, other=0)
        tl.store(replica_rows + place * 2, rho.to(tl.float32), mask=live)
        tl.store(replica_rows + place * 2 + 1, scale.to(tl.float32), mask=live)


@triton.jit(
    do_not_specialize=["num_partials", "num_tensors", "num_rows", "num_replicas"],
    do_not_specialize_on_alignment=["grad_scale", "found_inf", "rates"],
)
def derive_rank_one(
    settings,
    partials,
    grad_scale,
    found_inf,
    counters,  # [tensor] addresses
    leaders,  # [row] addresses
    rates,  # [row] addresses, or 0: the rate is in the settings
    rows,
    replica_rows,
    scales,
    lines,
    control,
    num_partials,
    num_tensors,
    num_rows,
    num_replicas,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    skip, gradient_scale = derive_control(settings, partials, num_partials, grad_scale, found_inf, control, BLOCK)
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        live = row < num_rows
        s = load_settings(settings, leaders, rates, row, live)
        store_row(rows + row * HYPER_ROW, s, gradient_scale, live, RULE)
        derive_lines(settings, skip, s, scales, lines, replica_rows, row, live, num_rows, num_replicas, RULE)
    tl.debug_barrier()  # all rows have read their leader's counter
    count_steps(counters, num_tensors, skip, BLOCK)


@triton.jit(do_not_specialize=["num_rows"])
def derive_converge(mean_rho, scales, lines, num_rows):
    """The replicas' mean becomes base and outputs; D = 0 and A = 1."""
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        live = row < num_rows
        tl.store(lines + row * 2, tl.load(mean_rho + row, mask=live, other=0).to(tl.float32), mask=live)
        tl.store(lines + row * 2 + 1, tl.load(scales + row, mask=live, other=0).to(tl.float32), mask=live)
        tl.store(scales + row, tl.full((ROWS,), 1.0, tl.float64), mask=live)


class Line(NamedTuple):
    base: tl.tensor
    displacement: tl.tensor
    along: tl.tensor  # step_size, or rho_mean
    scale: tl.tensor  # decay, or A


@triton.jit
def load_line(addresses, lines, chunk, V: tl.constexpr):
    line = lines + chunk.row * 2
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
        new = take_step(place.replica_rows[2 * k], place.replica_rows[2 * k + 1], base, displacement)
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
    row = load_row(rows + chunk.row * HYPER_ROW)
    whole = whole_vectors(chunk.length, VECTOR)
    for start in range(0, whole, V.block):
        rank_one_block(shared, place, line, row, start, whole, V, V.block)
    if whole < chunk.length:
        rank_one_block(shared, place, line, row, whole, chunk.length, V, TAIL)


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
        store(pointer(tl.load(addresses + k), offset, V.param, V.vector), offsets, mask, base, V.param)


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
