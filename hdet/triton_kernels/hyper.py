"""From settings in float64 to the float32 rows that the update reads: csrc/core/hyper.h in Triton. One program of one launch.

`settings` is one array of doubles: max_norm, average_weight; nine for each row; rho[rows][K] (Eq. 1); weights[K].
"""

import triton
import triton.language as tl

from .rules import HYPER_ROW

STEP_SETTINGS = tl.constexpr(2)
ROW_SETTINGS = tl.constexpr(9)
ROWS = tl.constexpr(128)
"""rows derived at a time, one a thread"""


@triton.jit
def power(base, exponent):
    """base^exponent by squaring: multiplications alone, so that every backend gives the same bits. `exponent`: uint32."""
    result = tl.full(base.shape, 1.0, tl.float64)
    for _ in range(32):
        result = tl.where((exponent & 1) != 0, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result


@triton.jit
def total(partials, count, BLOCK: tl.constexpr):
    """The sum of `count` doubles."""
    offsets = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, count, BLOCK):
        sums += tl.load(partials + start + offsets, mask=start + offsets < count, other=0.0)
    return tl.sum(sums, 0)


@triton.jit
def derive_control(settings, partials, num_partials, grad_scale, found_inf, control, BLOCK: tl.constexpr):
    """Writes skip, norm, gradient_scale, average_weight; returns skip and the gradients' factor."""
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
    tl.store(control + 3, tl.load(settings + 1).to(tl.float32))
    return skip, gradient_scale


@triton.jit
def derive_rows(settings, gradient_scale, leaders, rates, rows, replica_rows, num_rows, num_replicas, RULE: tl.constexpr):
    """HyperRow of every row, and (step_size, decay) of every [row][replica]; leaders and rates hold addresses."""
    rho_settings = settings + STEP_SETTINGS + num_rows * ROW_SETTINGS
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        live = row < num_rows
        counter = tl.load(leaders + row, mask=live, other=0).to(tl.pointer_type(tl.float32))
        step = tl.load(counter, mask=live, other=0).to(tl.uint32) + 1
        source = settings + STEP_SETTINGS + row * ROW_SETTINGS
        beta1 = tl.load(source + 1, mask=live, other=0)
        beta2 = tl.load(source + 2, mask=live, other=0)
        weight_decay = tl.load(source + 4, mask=live, other=0)
        maximize = tl.load(source + 7, mask=live, other=0) != 0
        nesterov = tl.load(source + 6, mask=live, other=0) != 0
        one = tl.full((ROWS,), 1.0, tl.float64)
        lerp1 = one - beta1
        correction1 = one
        inv_sqrt_correction2 = one
        coupled_decay = one * 0
        if RULE == "adamw" or RULE == "adam":
            correction1 = one - power(beta1, step)
            inv_sqrt_correction2 = one / tl.sqrt(one - power(beta2, step))
        if RULE == "adam" or RULE == "sgd":
            coupled_decay = weight_decay
        if RULE == "sgd":
            # torch fills the momentum buffer with the first gradient as it is, and without momentum has no buffer to dampen
            dampening = tl.load(source + 5, mask=live, other=0)
            lerp1 = tl.where((step <= 1) | (beta1 == 0), one, one - dampening)

        target = rows + row * HYPER_ROW
        tl.store(target, tl.where(maximize, -gradient_scale, gradient_scale), mask=live)
        tl.store(target + 1, beta1.to(tl.float32), mask=live)
        tl.store(target + 2, lerp1.to(tl.float32), mask=live)
        tl.store(target + 3, beta2.to(tl.float32), mask=live)
        tl.store(target + 4, (one - beta2).to(tl.float32), mask=live)
        tl.store(target + 5, inv_sqrt_correction2.to(tl.float32), mask=live)
        tl.store(target + 6, tl.load(source + 3, mask=live, other=0).to(tl.float32), mask=live)
        tl.store(target + 7, coupled_decay.to(tl.float32), mask=live)
        tl.store(target + 8, nesterov.to(tl.float32), mask=live)
        tl.store(target + 9, step.to(tl.float32, bitcast=True), mask=live)

        rate_address = tl.load(rates + row, mask=live, other=0)
        rate_live = live & (rate_address != 0)
        rate = tl.load(rate_address.to(tl.pointer_type(tl.float32)), mask=rate_live, other=0).to(tl.float64)
        lr = tl.where(rate_live, rate, tl.load(source, mask=live, other=0))
        decay_at_base = tl.load(source + 8, mask=live, other=0) != 0
        for k in range(num_replicas):
            rho = tl.load(rho_settings + row * num_replicas + k, mask=live, other=0)
            decay = one
            if RULE == "adamw" or RULE == "lion":
                decay = one - tl.where(decay_at_base, lr, lr * rho) * weight_decay
            tl.store(replica_rows + (row * num_replicas + k) * 2, (lr * rho / correction1).to(tl.float32), mask=live)
            tl.store(replica_rows + (row * num_replicas + k) * 2 + 1, decay.to(tl.float32), mask=live)


@triton.jit
def count_steps(counters, num_tensors, skip, BLOCK: tl.constexpr):
    """Every tensor's counter += 1, unless the step is skipped."""
    for first in range(0, num_tensors, BLOCK):
        i = first + tl.arange(0, BLOCK)
        live = (i < num_tensors) & (skip == 0)
        counter = tl.load(counters + i, mask=live, other=0).to(tl.pointer_type(tl.float32))
        tl.store(counter, tl.load(counter, mask=live, other=0) + 1, mask=live)


@triton.jit(
    do_not_specialize=["num_partials", "num_tensors", "num_rows", "num_replicas"],
    do_not_specialize_on_alignment=["grad_scale", "found_inf"],
)
def derive(
    settings,
    partials,
    grad_scale,
    found_inf,
    counters,  # [tensor] addresses
    leaders,  # [row] addresses
    rates,  # [row] addresses, or 0: the rate is in the settings
    rows,
    replica_rows,
    weights,
    control,
    num_partials,
    num_tensors,
    num_rows,
    num_replicas,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    skip, gradient_scale = derive_control(settings, partials, num_partials, grad_scale, found_inf, control, BLOCK)
    derive_rows(settings, gradient_scale, leaders, rates, rows, replica_rows, num_rows, num_replicas, RULE)
    for k in range(num_replicas):
        weight = tl.load(settings + STEP_SETTINGS + num_rows * (ROW_SETTINGS + num_replicas) + k)
        tl.store(weights + k, weight.to(tl.float32))
    tl.debug_barrier()  # all rows have read their leader's counter
    count_steps(counters, num_tensors, skip, BLOCK)
