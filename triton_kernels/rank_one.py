"""K replicas on one line, A * base - rho_k * D: csrc/core/rank_one.h in Triton, where the formulas are explained.

Between steps each row keeps three doubles: A, rho_mean of the last mean, and 1 where that mean waits to become the base (the fold).
A line is what an update reads of a row: (rho, A) of the fold, 1 if it folds, decay, step_size.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .chunks import TAIL, load_chunk, whole_vectors
from .hyper import (
    ROWS,
    correction1,
    count_steps,
    derive_control,
    derive_decay,
    load_settings,
    rho_settings,
    store_row,
    weight_settings,
)
from .numbers import F32, load, pointer, store
from .rules import HYPER_ROW, load_row, take_step
from .step import SHARED, load_shared, locate, new_direction, pointers_of

STATE = tl.constexpr(3)
LINE = tl.constexpr(5)


@triton.jit
def mean_rho(settings, row, live, num_rows, num_replicas):
    """sum_k w_k rho_k of each row, in float64."""
    total = tl.zeros((ROWS,), tl.float64)
    for k in range(num_replicas):
        rho = tl.load(rho_settings(settings, num_rows) + row * num_replicas + k, mask=live, other=0)
        total += tl.load(weight_settings(settings, num_rows, num_replicas) + k) * rho
    return total


@triton.jit
def store_line(line, rho, scale, folds, decay, step_size, live):
    tl.store(line, rho.to(tl.float32), mask=live)
    tl.store(line + 1, scale.to(tl.float32), mask=live)
    tl.store(line + 2, folds.to(tl.float32), mask=live)
    tl.store(line + 3, decay.to(tl.float32), mask=live)
    tl.store(line + 4, step_size.to(tl.float32), mask=live)


@triton.jit
def derive_lines(settings, skip, s, states, lines, replica_rows, row, live, num_rows, num_replicas, RULE: tl.constexpr, MEAN: tl.constexpr):
    """The lines of ROWS rows, what their states become, and (rho_k, A') for each replica's output."""
    one = tl.full((ROWS,), 1.0, tl.float64)
    state = states + row * STATE
    scale = tl.load(state, mask=live, other=0)
    pending = tl.load(state + 2, mask=live, other=0)
    decay = tl.where(skip, one, derive_decay(s, s.lr, RULE))
    store_line(lines + row * LINE, tl.load(state + 1, mask=live, other=0), scale, pending, decay, s.lr / correction1(s, RULE), live)
    scale = tl.where(pending != 0, one, scale) * decay
    rho_mean = mean_rho(settings, row, live, num_rows, num_replicas)
    tl.store(state, scale, mask=live)
    tl.store(state + 1, rho_mean, mask=live)
    tl.store(state + 2, one if MEAN else one * 0, mask=live)
    for k in range(num_replicas):
        place = row * num_replicas + k
        rho = rho_mean
        if not MEAN:
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
    states,
    lines,
    control,
    num_partials,
    num_tensors,
    num_rows,
    num_replicas,
    RULE: tl.constexpr,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    skip, gradient_scale = derive_control(settings, partials, num_partials, grad_scale, found_inf, control, BLOCK)
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        live = row < num_rows
        s = load_settings(settings, leaders, rates, row, live)
        store_row(rows + row * HYPER_ROW, s, gradient_scale, live, RULE)
        derive_lines(settings, skip, s, states, lines, replica_rows, row, live, num_rows, num_replicas, RULE, MEAN)
    tl.debug_barrier()  # all rows have read their leader's counter
    count_steps(counters, num_tensors, skip, BLOCK)


@triton.jit(do_not_specialize=["num_rows", "num_replicas"])
def derive_converge(settings, states, lines, num_rows, num_replicas):
    """The replicas' mean, or the pending one, becomes base and outputs; D = 0 and A = 1."""
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        live = row < num_rows
        one = tl.full((ROWS,), 1.0, tl.float64)
        state = states + row * STATE
        pending = tl.load(state + 2, mask=live, other=0)
        rho = tl.where(pending != 0, tl.load(state + 1, mask=live, other=0), mean_rho(settings, row, live, num_rows, num_replicas))
        store_line(lines + row * LINE, rho, tl.load(state, mask=live, other=0), one, one, one * 0, live)
        tl.store(state, one, mask=live)
        tl.store(state + 1, one * 0, mask=live)
        tl.store(state + 2, one * 0, mask=live)


class Line(NamedTuple):
    base: tl.tensor
    displacement: tl.tensor
    rho: tl.tensor
    scale: tl.tensor
    folds: tl.tensor
    decay: tl.tensor
    step_size: tl.tensor


@triton.jit
def load_line(addresses, lines, chunk, V: tl.constexpr):
    line = lines + chunk.row * LINE
    return Line(
        pointer(tl.load(addresses + 2 * chunk.tensor), chunk.offset, F32, V.vector),
        pointer(tl.load(addresses + 2 * chunk.tensor + 1), chunk.offset, F32, V.vector),
        tl.load(line),
        tl.load(line + 1),
        tl.load(line + 2),
        tl.load(line + 3),
        tl.load(line + 4),
    )


@triton.jit
def load_place(line, offsets, mask):
    """Base and D of a block."""
    return load(line.base, offsets, mask, F32), load(line.displacement, offsets, mask, F32)


@triton.jit
def move_on_line(line, u, loaded, offsets, mask, end):
    """Base and D of a block after a step along u. The base is written where it has changed."""
    base, displacement = loaded
    base = tl.where(line.folds != 0, take_step(line.rho, line.scale, base, displacement), base)
    displacement = line.decay * tl.where(line.folds != 0, 0.0, displacement) + line.step_size * u
    store(line.base, offsets, offsets < tl.where(line.folds != 0, end, 0), base, F32)
    store(line.displacement, offsets, mask, displacement, F32)
    return base, displacement


@triton.jit
def rank_one_block(shared, place, line, row, start, end, V: tl.constexpr, BLOCK: tl.constexpr):
    K: tl.constexpr = V.replicas
    offsets = start + tl.arange(0, BLOCK)
    mask = offsets < end
    live = offsets < tl.where(place.skip == 0, end, 0)
    none = tl.zeros((BLOCK,), tl.float32)
    loaded, on_line = load_shared(shared, offsets, mask, V), load_place(line, offsets, mask)
    u, _ = new_direction(shared, place, row, start, loaded, offsets, live, none, V, BLOCK)
    base, displacement = move_on_line(line, tl.where(place.skip == 0, u, 0.0), on_line, offsets, mask, end)
    for k in tl.static_range(K):
        output, _, _ = pointers_of(place, k, V)
        new = take_step(place.replica_rows[2 * k], place.replica_rows[2 * k + 1], base, displacement)
        store(output, offsets, mask, new, V.param)
    if V.zero_gradients:
        store(shared.gradient, offsets, mask, none, V.gradient)


@triton.jit
def update_rank_one(
    chunks,
    gradients,  # [tensor][2] address, type
    addresses,  # [tensor][SHARED + 3 K], the outputs for params
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
    shared, place = locate(chunk, gradients, addresses, ids, replica_rows, control, control, random, V)
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
    base, _ = move_on_line(line, tl.zeros((BLOCK,), tl.float32), load_place(line, offsets, mask), offsets, mask, end)
    for k in tl.static_range(K):
        store(pointer(tl.load(addresses + k), offset, V.param, V.vector), offsets, mask, base, V.param)


@triton.jit
def converge(chunks, addresses, line_addresses, lines, V: tl.constexpr):
    VECTOR: tl.constexpr = V.vector
    chunk = load_chunk(chunks)
    outputs = addresses + chunk.tensor * (SHARED + 3 * V.replicas) + SHARED
    line = load_line(line_addresses, lines, chunk, V)
    whole = whole_vectors(chunk.length, VECTOR)
    for start in range(0, whole, V.block):
        converge_block(outputs, chunk.offset, line, start, whole, V, V.block)
    if whole < chunk.length:
        converge_block(outputs, chunk.offset, line, whole, chunk.length, V, TAIL)
