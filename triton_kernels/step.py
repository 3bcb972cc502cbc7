"""The update phase of an optimizer step: one program for each chunk, all replicas in it
(csrc/core/plan.h, StepPlan)."""

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl

from .arithmetic import HYPER_ROW, load_row, take_step
from .chunks import BATCH, TAIL, live_length, load_chunk, whole_vectors
from .codes import TABLE_FLOATS, load_codes, store_codes
from .numbers import (
    BF16,
    CODE_BLOCK,
    CODES,
    NONE,
    load,
    load_parameter,
    pointer,
    rounding_bits,
    store,
    store_parameter,
    to_bf16_stochastic,
)
from .rules import direction

SHARED = tl.constexpr(4)
"""columns of the address table before those of the replicas: exp_avg, exp_avg_sq and the scales of
both; then params[K], masters[K]"""
HELD = tl.constexpr(4)
"""up to so many replicas' addresses are held in registers; of more they are read again in each
block"""


@dataclass(frozen=True)
class StepVariant:
    """All that a step is compiled for. Formats are those of numbers.py."""

    rule: str
    replicas: int
    gradient: int = 1
    param: int = 1
    master: int = 0
    exp_avg: int = 1
    exp_avg_sq: int = 1
    stochastic: bool = False
    # the plan's first replica is replica 0, so that it can share random bits with the second moment
    first: bool = True
    block: int = 1024
    vector: int = 4
    zero_gradients: bool = False


class Shared(NamedTuple):
    """Where the streams of a chunk begin that all replicas share."""

    gradient: tl.tensor
    exp_avg: tl.tensor
    exp_avg_sq: tl.tensor
    exp_avg_scales: tl.tensor  # as numbers: addresses of the chunk's first block of codes
    exp_avg_sq_scales: tl.tensor
    tables: tl.tensor  # of first and of second moments


class Place(NamedTuple):
    """What a block must know of its chunk.

    Stores may hit any address, so what is not loaded here is loaded again in each block.
    """

    gradient: tl.tensor  # its address; 0: there is nothing to do
    addresses: tl.tensor  # of this tensor: params[K], masters[K]
    pointers: (
        tuple  # the parameter's and the master's, of each replica; of more than HELD replicas none
    )
    replica_rows: tuple  # three numbers of each replica
    offset: tl.tensor
    seed: tl.tensor
    first_replica: tl.tensor
    id: tl.tensor
    skip: tl.tensor


@triton.jit
def load_pointers(addresses, offset, k, V: tl.constexpr):
    """Of replica k: parameter, master."""
    param = pointer(tl.load(addresses + k), offset, V.param, V.vector)
    master = pointer(tl.load(addresses + V.replicas + k), offset, V.master, V.vector)
    return param, master


@triton.jit
def pointers_of(place, k: tl.constexpr, V: tl.constexpr):
    if V.replicas <= HELD:
        return place.pointers[2 * k], place.pointers[2 * k + 1]
    else:
        return load_pointers(place.addresses, place.offset, k, V)


@triton.jit
def load_batch(place, offsets, mask, FIRST: tl.constexpr, V: tl.constexpr):
    """The parameters of up to BATCH replicas from the first on, all on their way before one is
    used."""
    K: tl.constexpr = V.replicas
    values = ()
    for k in tl.static_range(FIRST, min(FIRST + BATCH, K)):
        param, master = pointers_of(place, k, V)
        values = values + (load_parameter(param, master, offsets, mask, V.param, V.master),)
    return values


@triton.jit
def floats(address):
    return address.to(tl.pointer_type(tl.float32))


@triton.jit
def load_shared(shared, offsets, mask, V: tl.constexpr):
    """Gradient and moments."""
    gradient = load(shared.gradient, offsets, mask, V.gradient)
    exp_avg = tl.zeros_like(gradient)  # 0 times an infinite gradient would be NaN
    exp_avg_sq = exp_avg
    if V.exp_avg == CODES:
        exp_avg = load_codes(
            shared.exp_avg, floats(shared.exp_avg_scales), floats(shared.tables), offsets, mask
        )
    elif V.exp_avg != NONE:
        exp_avg = load(shared.exp_avg, offsets, mask, V.exp_avg)
    if V.exp_avg_sq == CODES:
        exp_avg_sq = load_codes(
            shared.exp_avg_sq,
            floats(shared.exp_avg_sq_scales),
            floats(shared.tables) + TABLE_FLOATS,
            offsets,
            mask,
        )
    elif V.exp_avg_sq != NONE:
        exp_avg_sq = load(shared.exp_avg_sq, offsets, mask, V.exp_avg_sq)
    return gradient, exp_avg, exp_avg_sq


@triton.jit
def new_direction(
    shared, place, row, start, loaded, offsets, live, param, V: tl.constexpr, BLOCK: tl.constexpr
):
    """Moves the moments along what load_shared has read, returns u and the random bits of replica
    0."""
    RULE: tl.constexpr = V.rule
    gradient, exp_avg, exp_avg_sq = loaded
    u, exp_avg, exp_avg_sq = direction(
        row, gradient * row.gradient_scale, param, exp_avg, exp_avg_sq, RULE
    )
    bits = tl.zeros((BLOCK,), tl.uint32)
    if V.stochastic and (V.exp_avg_sq == BF16 or (V.first and V.param == BF16)):
        bits = rounding_bits(
            place.seed, row.step, place.first_replica * 0, place.id, place.offset + start, BLOCK
        )
    if V.exp_avg == CODES:
        store_codes(
            shared.exp_avg,
            floats(shared.exp_avg_scales),
            floats(shared.tables),
            offsets,
            live,
            exp_avg,
            True,
            BLOCK,
        )
    elif V.exp_avg != NONE:
        store(shared.exp_avg, offsets, live, exp_avg, V.exp_avg)
    if V.exp_avg_sq == BF16 and V.stochastic:
        tl.store(
            shared.exp_avg_sq + offsets,
            to_bf16_stochastic(exp_avg_sq, bits >> 16),
            mask=live,
        )
    elif V.exp_avg_sq == CODES:
        tables = floats(shared.tables) + TABLE_FLOATS
        store_codes(
            shared.exp_avg_sq,
            floats(shared.exp_avg_sq_scales),
            tables,
            offsets,
            live,
            exp_avg_sq,
            False,
            BLOCK,
        )
    elif V.exp_avg_sq != NONE:
        store(shared.exp_avg_sq, offsets, live, exp_avg_sq, V.exp_avg_sq)
    return u, bits


@triton.jit
def store_own(
    place,
    row,
    param,
    master,
    start,
    offsets,
    live,
    x,
    bits,
    k: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A replica keeps its own new parameter."""
    if V.stochastic and V.param == BF16 and V.master == NONE:
        if k > 0 or not V.first:
            bits = rounding_bits(
                place.seed, row.step, place.first_replica + k, place.id, place.offset + start, BLOCK
            )
        tl.store(param + offsets, to_bf16_stochastic(x, bits & 0xFFFF), mask=live)
    else:
        store_parameter(param, master, offsets, live, x, V.param, V.master)


@triton.jit
def update_block(shared, place, row, start, end, V: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK elements from `start` of the chunk on, those before `end`."""
    K: tl.constexpr = V.replicas
    offsets = start + tl.arange(0, BLOCK)
    mask = offsets < end
    live = offsets < tl.where(place.skip == 0, end, 0)
    loaded = load_shared(
        shared, offsets, mask, V
    )  # first: addresses may have to be read before parameters
    old = load_batch(place, offsets, mask, 0, V)
    param = tl.zeros((BLOCK,), tl.float32)
    if K == 1:
        param = old[0]
    u, bits = new_direction(shared, place, row, start, loaded, offsets, live, param, V, BLOCK)

    for batch in tl.static_range(0, K, BATCH):
        if batch > 0:
            old = load_batch(place, offsets, mask, batch, V)
        for k in tl.static_range(batch, min(batch + BATCH, K)):
            p, master = pointers_of(place, k, V)
            new = take_step(
                place.replica_rows[3 * k],
                place.replica_rows[3 * k + 1],
                place.replica_rows[3 * k + 2],
                old[k - batch],
                u,
            )
            store_own(place, row, p, master, start, offsets, live, new, bits, k, V, BLOCK)
    if V.zero_gradients:
        store(shared.gradient, offsets, mask, tl.zeros((BLOCK,), tl.float32), V.gradient)


@triton.jit
def locate(chunk, gradients, addresses, ids, replica_rows, control, random, V: tl.constexpr):
    """The streams of a chunk, and what its blocks must know."""
    K: tl.constexpr = V.replicas
    columns = addresses + chunk.tensor * (SHARED + 2 * K)
    pointers = ()
    if K <= HELD:
        for k in tl.static_range(K):
            pointers = pointers + load_pointers(columns + SHARED, chunk.offset, k, V)
    row_numbers = ()
    for i in tl.static_range(3 * K):
        row_numbers = row_numbers + (tl.load(replica_rows + chunk.tensor * (3 * K) + i),)
    gradient = tl.load(gradients + 2 * chunk.tensor)
    shared = Shared(
        pointer(gradient, chunk.offset, V.gradient, V.vector),
        pointer(tl.load(columns), chunk.offset, V.exp_avg, V.vector),
        pointer(tl.load(columns + 1), chunk.offset, V.exp_avg_sq, V.vector),
        tl.load(columns + 2) + chunk.offset // CODE_BLOCK * 4,
        tl.load(columns + 3) + chunk.offset // CODE_BLOCK * 4,
        tl.load(random + 2),
    )
    place = Place(
        gradient,
        columns + SHARED,
        pointers,
        row_numbers,
        chunk.offset,
        tl.load(random),
        tl.load(random + 1).to(tl.int32),
        tl.load(ids + chunk.tensor),
        tl.load(control),
    )
    return shared, place


@triton.jit
def update(
    chunks,
    gradients,  # [tensor][2] address, type
    addresses,  # [tensor][SHARED + 2 K]
    ids,
    rows,
    replica_rows,
    control,
    random,  # seed, first replica, address of the tables of codes
    V: tl.constexpr,
):
    # what is left of a chunk after its last whole vector, or its last whole block of codes, goes
    # into one block
    UNIT: tl.constexpr = CODE_BLOCK if V.exp_avg == CODES else V.vector
    REST: tl.constexpr = CODE_BLOCK if V.exp_avg == CODES else TAIL
    chunk = load_chunk(chunks)
    shared, place = locate(chunk, gradients, addresses, ids, replica_rows, control, random, V)
    row = load_row(rows + chunk.tensor * HYPER_ROW)
    length = live_length(chunk, place.gradient)
    whole = whole_vectors(length, UNIT)
    for start in range(0, whole, V.block):
        update_block(shared, place, row, start, whole, V, V.block)
    if whole < length:
        update_block(shared, place, row, whole, length, V, REST)
