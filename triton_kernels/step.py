"""The update phase of an optimizer step: one program for each chunk, all replicas in it
(csrc/core/plan.h, StepPlan)."""

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl

from .arithmetic import averaged, load_row, take_step
from .chunks import BATCH, TAIL, live_length, load_chunk, whole_vectors
from .codes import TABLE_FLOATS, load_codes, store_codes
from .numbers import (
    BF16,
    CODE_BLOCK,
    CODES,
    F32,
    NONE,
    SPLIT24,
    bits_of,
    from_bf16,
    half_of_24,
    load,
    load_parameter,
    pointer,
    rounded,
    rounding_bits,
    store,
    store_parameter,
    to_24,
    to_bf16_stochastic,
)
from .rules import HYPER_ROW, SCALARS, direction, terms

HELD = tl.constexpr(4)
"""up to so many replicas' addresses are held in registers; of more they are read again in each
block"""


@dataclass(frozen=True)
class StepVariant:
    """All that a step is compiled for. Formats are those of numbers.py."""

    rule: str
    replicas: int
    gradient: int
    param: int
    master: int
    moments: tuple[int, ...]
    signed: tuple[bool, ...]
    gives_parameter: bool
    stochastic: bool
    # the plan's first replica is replica 0, so that it can share random bits with the second moment
    first: bool
    block: int
    emas: int
    vector: int = 1
    zero_gradients: bool = False

    @property
    def coded(self) -> bool:
        return self.moments[0] == CODES.value

    @property
    def draws_params(self) -> bool:
        """Are parameters rounded stochastically?"""
        masters = (NONE.value, SPLIT24.value)
        return self.stochastic and self.param == BF16.value and self.master in masters

    @property
    def rounds_moments(self) -> bool:
        """Stochastically: averages of squares in bfloat16."""
        kinds = zip(self.moments, self.signed, strict=True)
        return self.stochastic and (BF16.value, False) in kinds


class Shared(NamedTuple):
    """Where the streams of a chunk begin that all replicas share."""

    gradient: tl.tensor
    moments: tuple
    scales: tuple  # as numbers: addresses of the chunk's first block of codes
    tables: tl.tensor  # of moments with a sign, and of those without


class Place(NamedTuple):
    """What a block must know of its chunk.

    Stores may hit any address, so what is not loaded here is loaded again in each block.
    """

    gradient: tl.tensor  # its address; 0: there is nothing to do
    addresses: tl.tensor  # of this tensor: params[K], masters[K]
    pointers: (
        tuple  # the parameter's and the master's, of each replica; of more than HELD replicas none
    )
    replica_rows: tuple  # step size, decay, and that where u leads away from 0, of each replica
    offset: tl.tensor
    seed: tl.tensor
    first_replica: tl.tensor
    id: tl.tensor
    skip: tl.tensor
    emas: tl.tensor  # of this tensor: [average][replica]
    ema_rows: tuple  # weight and rest of each average


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
def table_of(shared, SIGNED: tl.constexpr):
    return floats(shared.tables) + (0 if SIGNED else TABLE_FLOATS)


@triton.jit
def load_moment(shared, gradient, offsets, mask, j: tl.constexpr, V: tl.constexpr):
    FORMAT: tl.constexpr = V.moments[j]
    if FORMAT == NONE:
        return tl.zeros_like(gradient)  # 0 times an infinite gradient would be NaN
    elif FORMAT == CODES:
        table = table_of(shared, V.signed[j])
        return load_codes(shared.moments[j], floats(shared.scales[j]), table, offsets, mask)
    else:
        return load(shared.moments[j], offsets, mask, FORMAT)


@triton.jit
def load_shared(shared, offsets, mask, V: tl.constexpr):
    """Gradient and moments."""
    gradient = load(shared.gradient, offsets, mask, V.gradient)
    moments = ()
    for j in tl.static_range(len(V.moments)):
        moments = moments + (load_moment(shared, gradient, offsets, mask, j, V),)
    return gradient, moments


@triton.jit
def store_moment(
    shared, offsets, live, x, bits, j: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr
):
    """`bits`: random ones, of replica 0."""
    FORMAT: tl.constexpr = V.moments[j]
    SIGNED: tl.constexpr = V.signed[j]
    p = shared.moments[j]
    if FORMAT == CODES:
        table = table_of(shared, SIGNED)
        store_codes(p, floats(shared.scales[j]), table, offsets, live, x, SIGNED, BLOCK)
    elif FORMAT == BF16 and V.stochastic and not SIGNED:
        tl.store(p + offsets, to_bf16_stochastic(x, bits >> 16), mask=live)
    elif FORMAT != NONE:
        store(p, offsets, live, x, FORMAT)


@triton.jit
def new_direction(
    shared, place, row, start, loaded, offsets, live, param, V: tl.constexpr, BLOCK: tl.constexpr
):
    """Moves the moments along what load_shared has read, returns u and the random bits of replica
    0."""
    RULE: tl.constexpr = V.rule
    gradient, moments = loaded
    made = direction(row, gradient * row.gradient_scale, param, moments, RULE)
    bits = tl.zeros((BLOCK,), tl.uint32)
    if V.rounds_moments or (V.first and V.draws_params):
        bits = rounding_bits(
            place.seed, row.step, place.first_replica * 0, place.id, place.offset + start, BLOCK
        )
    for j in tl.static_range(len(V.moments)):
        store_moment(shared, offsets, live, made[1 + j], bits, j, V, BLOCK)
    return made[0], bits


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
    """A replica keeps its own new parameter. Returns it as it is stored."""
    if V.draws_params and (k > 0 or not V.first):
        bits = rounding_bits(
            place.seed, row.step, place.first_replica + k, place.id, place.offset + start, BLOCK
        )
    if V.master == SPLIT24:
        x = to_24(x, (bits & 0xFF) if V.draws_params else half_of_24(x))
    if V.draws_params and V.master == NONE:
        kept = to_bf16_stochastic(x, bits & 0xFFFF)
        tl.store(param + offsets, kept, mask=live)
        x = from_bf16(kept)
    else:
        store_parameter(param, master, offsets, live, x, V.param, V.master)
        if V.master == NONE:
            x = rounded(x, V.param)
    return x


@triton.jit
def ema_pointer(place, k: tl.constexpr, j: tl.constexpr, V: tl.constexpr):
    return pointer(tl.load(place.emas + j * V.replicas + k), place.offset, F32, V.vector)


@triton.jit
def moving(live, weight):
    """An average of weight 0 is left alone."""
    return tl.where(weight != 0, live, tl.zeros_like(live))


@triton.jit
def load_emas(place, offsets, live, k: tl.constexpr, V: tl.constexpr):
    """The averages over time of replica k, as far as this step moves them."""
    EMAS: tl.constexpr = V.emas
    values = ()
    for j in tl.static_range(EMAS):
        moves = moving(live, place.ema_rows[2 * j])
        values = values + (load(ema_pointer(place, k, j, V), offsets, moves, F32),)
    return values


@triton.jit
def store_emas(place, old, offsets, live, x, k: tl.constexpr, V: tl.constexpr):
    """They take in what the replica has become."""
    EMAS: tl.constexpr = V.emas
    for j in tl.static_range(EMAS):
        weight = place.ema_rows[2 * j]
        new = averaged(old[j], x, weight, place.ema_rows[2 * j + 1])
        tl.store(ema_pointer(place, k, j, V) + offsets, new, mask=moving(live, weight))


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
    emas = ()
    if K == 1:  # of several replicas they would not fit
        emas = load_emas(place, offsets, live, 0, V)
    u, bits = new_direction(shared, place, row, start, loaded, offsets, live, param, V, BLOCK)

    for batch in tl.static_range(0, K, BATCH):
        if batch > 0:
            old = load_batch(place, offsets, mask, batch, V)
        for k in tl.static_range(batch, min(batch + BATCH, K)):
            p, master = pointers_of(place, k, V)
            new = u
            if not V.gives_parameter:
                new = take_step(
                    place.replica_rows[3 * k],
                    place.replica_rows[3 * k + 1],
                    place.replica_rows[3 * k + 2],
                    old[k - batch],
                    u,
                )
            new = store_own(place, row, p, master, start, offsets, live, new, bits, k, V, BLOCK)
            if K > 1:
                emas = load_emas(place, offsets, live, k, V)
            store_emas(place, emas, offsets, live, new, k, V)
    if V.zero_gradients:
        store(shared.gradient, offsets, mask, tl.zeros((BLOCK,), tl.float32), V.gradient)


@triton.jit
def load_replica(row):
    """A ReplicaRow of csrc/core/hyper.h: step size, decay, and the decay of an element that u leads
    away from 0 (cautious decay)."""
    step_size = tl.load(row)
    decay = tl.load(row + 1)
    cautious = bits_of(step_size) >> 31 != 0
    return tl.abs(step_size), decay, tl.where(cautious, 1.0, decay)


@triton.jit
def locate(
    chunk,
    gradients,
    addresses,
    ids,
    replica_rows,
    control,
    random,
    emas,
    ema_rows,
    V: tl.constexpr,
):
    """The streams of a chunk, and what its blocks must know."""
    K: tl.constexpr = V.replicas
    M: tl.constexpr = len(V.moments)
    columns = addresses + chunk.tensor * (2 * K + 2 * M + 1)
    shared_columns = columns + 2 * K
    pointers = ()
    if K <= HELD:
        for k in tl.static_range(K):
            pointers = pointers + load_pointers(columns, chunk.offset, k, V)
    row_numbers = ()
    for k in tl.static_range(K):
        row_numbers = row_numbers + load_replica(replica_rows + (chunk.tensor * K + k) * 2)
    WEIGHTS: tl.constexpr = 2 * V.emas
    weights = ()
    for i in tl.static_range(WEIGHTS):
        weights = weights + (tl.load(ema_rows + chunk.tensor * WEIGHTS + i),)
    gradient = tl.load(gradients + chunk.tensor)
    moments = ()
    scales = ()
    for j in tl.static_range(M):
        moment = tl.load(shared_columns + j)
        moments = moments + (pointer(moment, chunk.offset, V.moments[j], V.vector),)
        scale = tl.load(shared_columns + M + j)
        scales = scales + (scale + chunk.offset // CODE_BLOCK * 4,)
    shared = Shared(
        pointer(gradient, chunk.offset, V.gradient, V.vector), moments, scales, tl.load(random + 2)
    )
    place = Place(
        gradient,
        columns,
        pointers,
        row_numbers,
        chunk.offset,
        tl.load(random),
        tl.load(random + 1).to(tl.int32),
        tl.load(ids + chunk.tensor),
        tl.load(control),
        emas + chunk.tensor * (V.emas * K + 1),
        weights,
    )
    return shared, place


@triton.jit(do_not_specialize=["slices"])
def update(
    chunks,
    gradients,  # [tensor] addresses
    addresses,  # [tensor][params[K], masters[K], moments, their scales, step counter]
    ids,
    rows,
    replica_rows,
    control,
    random,  # seed, first replica, address of the tables of codes
    emas,  # [tensor][average][replica], and a counter; of none any table
    ema_rows,
    slices,
    V: tl.constexpr,
):
    # what is left of a chunk after its last whole vector, or its last whole block of codes, goes
    # into one block
    UNIT: tl.constexpr = CODE_BLOCK if V.coded else V.vector
    REST: tl.constexpr = CODE_BLOCK if V.coded else TAIL
    chunk = load_chunk(chunks, slices)
    shared, place = locate(
        chunk, gradients, addresses, ids, replica_rows, control, random, emas, ema_rows, V
    )
    row = load_row(rows + chunk.tensor * HYPER_ROW, SCALARS)
    length = live_length(chunk, place.gradient)
    whole = whole_vectors(length, UNIT)
    for start in range(0, whole, V.block):
        update_block(shared, place, row, start, whole, V, V.block)
    if whole < length:
        update_block(shared, place, row, whole, length, V, REST)


@triton.jit
def sum_block(shared, place, row, start, end, j: tl.constexpr, V: tl.constexpr):
    """Sum j of the rule, over a block's elements from `start` of the chunk on, those before
    `end`."""
    RULE: tl.constexpr = V.rule
    offsets = start + tl.arange(0, V.block)
    mask = offsets < end
    gradient, moments = load_shared(shared, offsets, mask, V)
    param = tl.zeros((V.block,), tl.float32)
    if V.replicas == 1:
        param = load_batch(place, offsets, mask, 0, V)[0]
    made = terms(row, gradient * row.gradient_scale, param, moments, RULE)
    return tl.sum(tl.where(mask, made[j], 0.0).to(tl.float64), 0)


@triton.jit(do_not_specialize=["longest"])
def sum_terms(
    chunks,
    gradients,
    addresses,
    ids,
    rows,
    replica_rows,
    control,
    random,
    emas,
    ema_rows,
    spans,  # [tensor]: the number of its first chunk, and its elements
    sums,  # [chunk][SUMS], of all chunks in the order of tensors
    longest,  # elements of a chunk
    SUMS: tl.constexpr,
    V: tl.constexpr,
):
    """What a rule sums over tensors, before `update`: a program for each chunk."""
    chunk = load_chunk(chunks, 1)
    shared, place = locate(
        chunk, gradients, addresses, ids, replica_rows, control, random, emas, ema_rows, V
    )
    row = load_row(rows + chunk.tensor * HYPER_ROW, SCALARS)
    length = live_length(chunk, place.gradient)
    for j in tl.static_range(SUMS):
        total = tl.full((), 0.0, tl.float64)
        for start in range(0, length, V.block):
            total += sum_block(shared, place, row, start, length, j, V)
        number = tl.load(spans + 2 * chunk.tensor) + chunk.offset // longest
        tl.store(sums + number * SUMS + j, total)
