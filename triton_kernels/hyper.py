"""From settings in float64 to the float32 rows that the update reads: csrc/core/hyper.h and
prepare.h in Triton, which have the layout of all tables.

It is here a second time because these kernels are for builds without nvcc, whose steps may not read
counters, rates, scaler and norm on the host either.
"""

import triton
import triton.language as tl

from .arithmetic import exp, f64, log
from .rules import GROUP_SETTINGS, HYPER_ROW, Whole, divisor, load_settings, store_scalars

CALL_SETTINGS, EMA_SETTINGS = tl.constexpr(1), tl.constexpr(5)


@triton.jit
def total(partials, count, BLOCK: tl.constexpr):
    """The sum of `count` doubles."""
    offsets = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, count, BLOCK):
        sums += tl.load(partials + start + offsets, mask=start + offsets < count, other=0.0)
    return tl.sum(sums, 0)


@triton.jit
def derive_control(
    settings, partials, num_partials, grad_scale, found_inf, control, BLOCK: tl.constexpr
):
    """Writes skip, norm, gradient_scale, unscaling; returns skip and the gradients' factor."""
    one = tl.full((), 1.0, tl.float64)
    inverse = one / tl.load(grad_scale).to(tl.float64)
    max_norm = tl.load(settings)
    norm = tl.sqrt(total(partials, num_partials, BLOCK)) * inverse
    norm = tl.where(max_norm == 0, one * 0, norm)
    skip = (tl.load(found_inf) != 0) | ((norm - norm) != 0)  # NaN or infinite
    clip = max_norm / (norm + tl.full((), 1e-6, tl.float64))  # as torch.nn.utils.clip_grad_norm_
    clip = tl.where((clip < 1) & (max_norm != 0), clip, one)
    gradient_scale = (inverse * clip).to(tl.float32)
    tl.store(control, skip.to(tl.float32))
    tl.store(control + 1, norm.to(tl.float32))
    tl.store(control + 2, gradient_scale)
    tl.store(control + 3, inverse.to(tl.float32))
    return skip, gradient_scale


@triton.jit
def rate_of(rates, group, lr, step, live, FIRST: tl.constexpr):
    """Of each tensor; 0 before the step with number FIRST. `rates` holds addresses; a rate of
    address 0 is in the settings."""
    address = tl.load(rates + group, mask=live, other=0)
    rate = tl.load(address.to(tl.pointer_type(tl.float32)), mask=address != 0, other=0)
    rate = tl.where(address != 0, rate.to(tl.float64), lr)
    return tl.where(step < FIRST, f64(0.0), rate)


@triton.jit
def derive_ema(settings, step, row, live):
    """Of one average over time; `step`: of those it has seen, from 1."""
    decay = tl.load(settings)
    power = tl.load(settings + 1)
    every = tl.load(settings + 3).to(tl.int64)
    since = step.to(tl.int64) - tl.load(settings + 4).to(tl.int64)
    n = (since // every).to(tl.float64)
    warm = n / (n + f64(9.0))
    kept = tl.where(tl.load(settings + 2) != 0, tl.minimum(warm, decay), decay)
    kept = tl.where(decay < 0, exp((power + f64(1.0)) * log((n - f64(1.0)) / n)), kept)
    kept = tl.where(since % every != 0, f64(1.0), tl.where(n == 1, f64(0.0), kept))
    kept = tl.where(since <= 0, f64(0.0), kept)
    tl.store(row, (f64(1.0) - kept).to(tl.float32), mask=live)
    tl.store(row + 1, kept.to(tl.float32), mask=live)


@triton.jit(
    do_not_specialize=["columns", "num_partials", "num_tensors", "num_groups", "num_replicas"],
    do_not_specialize_on_alignment=[
        "grad_scale",
        "found_inf",
        "settings",
        "rates",
        "groups",
    ],
)
def derive(
    gradients,  # [tensor] addresses
    settings,
    rates,  # [group] addresses, or 0: the rate is in the settings
    partials,
    grad_scale,
    found_inf,
    addresses,  # [tensor][columns], of which the last is the step counter
    columns,
    groups,  # [tensor]
    rows,
    replica_rows,
    control,
    num_partials,
    num_tensors,
    num_groups,
    num_replicas,
    emas,  # [tensor][average][replica], and a counter; of none any table
    ema_settings,
    ema_rows,
    EMAS: tl.constexpr,
    RULE: tl.constexpr,
    COUPLED: tl.constexpr,
    FIRST: tl.constexpr,
    SUMS: tl.constexpr,
    TENSORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """TENSORS tensors, one a thread, with their counters.

    Every program adds up all partials: none waits for another.
    """
    skip, gradient_scale = derive_control(
        settings, partials, num_partials, grad_scale, found_inf, control, BLOCK
    )
    tensor = tl.program_id(0) * TENSORS + tl.arange(0, TENSORS)
    live = tensor < num_tensors
    live = live & (tl.load(gradients + tensor, mask=live, other=0) != 0)
    counter = tl.load(addresses + (tensor + 1) * columns - 1, mask=live, other=0).to(
        tl.pointer_type(tl.float32)
    )
    count = tl.load(counter, mask=live, other=0)
    group = tl.load(groups + tensor, mask=live, other=0)
    step = count.to(tl.uint32) + 1
    h = load_settings(settings + CALL_SETTINGS + group * GROUP_SETTINGS, live)
    lr = rate_of(rates, group, h.lr, step, live, FIRST)
    row = rows + tensor * HYPER_ROW
    tl.store(row, tl.where(h.maximize != 0, -gradient_scale, gradient_scale), mask=live)
    tl.store(row + 1, step.to(tl.float32, bitcast=True), mask=live)
    rho = settings + CALL_SETTINGS + num_groups * GROUP_SETTINGS + group * num_replicas
    rate = lr * tl.load(rho, mask=live, other=0)
    nothing = ()  # the sums come later, and all this again: see derive_again
    for _ in tl.static_range(SUMS):
        nothing = nothing + (f64(0.0),)
    store_scalars(h, step, rate, Whole(f64(1.0), nothing), row + 2, live, RULE)
    divided_by = divisor(h, step, RULE)
    for k in range(num_replicas):
        target = replica_rows + (tensor * num_replicas + k) * 2
        rho_k = tl.load(rho + k, mask=live, other=0)
        rate = lr * rho_k  # Eq. 2
        decay = h.weight_decay * 0 if COUPLED else h.weight_decay
        decay = 1 - tl.where(h.decay_at_base != 0, lr, rate) * decay
        step_size = (rate / divided_by).to(tl.float32)
        tl.store(target, tl.where(h.cautious_decay != 0, -step_size, step_size), mask=live)
        tl.store(target + 1, decay.to(tl.float32), mask=live)
    tl.store(counter, count + 1, mask=live & (tensor < tl.where(skip, 0, num_tensors)))
    if EMAS > 0:
        seen = tl.load(emas + (tensor + 1) * (EMAS * num_replicas + 1) - 1, mask=live, other=0)
        seen = seen.to(tl.pointer_type(tl.float32))
        count = tl.load(seen, mask=live, other=0)
        for j in tl.static_range(EMAS):
            row = ema_rows + (tensor * EMAS + j) * 2
            derive_ema(ema_settings + j * EMA_SETTINGS, count.to(tl.uint32) + 1, row, live)
        tl.store(seen, count + 1, mask=live & (tensor < tl.where(skip, 0, num_tensors)))


@triton.jit(do_not_specialize=["longest", "num_groups", "num_replicas"])
def derive_again(
    gradients,
    settings,
    rates,
    spans,  # [tensor]: the number of its first chunk, and its elements
    sums,  # [chunk][SUMS]
    longest,  # elements of a chunk
    groups,
    rows,
    num_groups,
    num_replicas,
    RULE: tl.constexpr,
    FIRST: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What of a tensor's row depends on sums over it; a program for each."""
    first = tl.load(spans + 2 * tl.program_id(0))
    elements = tl.load(spans + 2 * tl.program_id(0) + 1)
    count = (elements + longest - 1) // longest
    if elements > 0:
        found = ()
        for j in tl.static_range(SUMS):
            total = tl.zeros((BLOCK,), tl.float64)
            for start in range(0, count, BLOCK):
                i = start + tl.arange(0, BLOCK)
                total += tl.load(sums + (first + i) * SUMS + j, mask=i < count, other=0.0)
            found = found + (tl.sum(total, 0),)
        tensor = tl.program_id(0) + tl.arange(0, 1)
        live = tl.load(gradients + tensor) != 0
        group = tl.load(groups + tensor)
        row = rows + tensor * HYPER_ROW
        step = tl.load(row + 1).to(tl.uint32, bitcast=True)
        h = load_settings(settings + CALL_SETTINGS + group * GROUP_SETTINGS, live)
        rho = tl.load(settings + CALL_SETTINGS + num_groups * GROUP_SETTINGS + group * num_replicas)
        rate = rate_of(rates, group, h.lr, step, live, FIRST) * rho
        store_scalars(h, step, rate, Whole(elements.to(tl.float64), found), row + 2, live, RULE)
