"""From settings in float64 to the float32 rows that the update reads: csrc/core/hyper.h and
prepare.h in Triton, where each formula is explained.

It is here a second time because these kernels are for builds without nvcc, whose steps may not read
counters, rates, scaler and norm on the host either. `settings` is one array of doubles: max_norm;
nine for each group; rho[groups][K] (Eq. 1).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .rules import HYPER_ROW

CALL_SETTINGS = tl.constexpr(1)
GROUP_SETTINGS = tl.constexpr(9)


@triton.jit
def power(base, exponent):
    """base^exponent by squaring: multiplications alone, so that every backend gives the same bits.

    `exponent`: uint32.
    """
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
def derive_control(
    settings, partials, num_partials, grad_scale, found_inf, control, BLOCK: tl.constexpr
):
    """Writes skip, norm, gradient_scale; returns skip and the gradients' factor."""
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
    return skip, gradient_scale


class Settings(NamedTuple):
    """What the host wrote for some tensors, in float64, and what counts for all their replicas."""

    lr: tl.tensor
    beta1: tl.tensor
    beta2: tl.tensor
    eps: tl.tensor
    weight_decay: tl.tensor
    dampening: tl.tensor
    nesterov: tl.tensor
    maximize: tl.tensor
    decay_at_base: tl.tensor
    step: tl.tensor  # uint32, from 1


@triton.jit
def load_settings(settings, rates, group, step, live):
    """`rates` holds addresses; a rate of address 0 is in the settings."""
    source = settings + CALL_SETTINGS + group * GROUP_SETTINGS
    address = tl.load(rates + group, mask=live, other=0)
    rate = tl.load(address.to(tl.pointer_type(tl.float32)), mask=address != 0, other=0).to(
        tl.float64
    )
    return Settings(
        tl.where(address != 0, rate, tl.load(source, mask=live, other=0)),
        tl.load(source + 1, mask=live, other=0),
        tl.load(source + 2, mask=live, other=0),
        tl.load(source + 3, mask=live, other=0),
        tl.load(source + 4, mask=live, other=0),
        tl.load(source + 5, mask=live, other=0),
        tl.load(source + 6, mask=live, other=0),
        tl.load(source + 7, mask=live, other=0),
        tl.load(source + 8, mask=live, other=0),
        step,
    )


@triton.jit
def store_rows(target, s, gradient_scale, live, RULE: tl.constexpr):
    """The HyperRow of each tensor."""
    one = s.beta1 * 0 + 1
    lerp1 = one - s.beta1
    inv_sqrt_correction2 = one
    coupled_decay = one * 0
    if RULE == "adamw" or RULE == "adam":
        inv_sqrt_correction2 = one / tl.sqrt(one - power(s.beta2, s.step))
    if RULE == "adam" or RULE == "sgd":
        coupled_decay = s.weight_decay
    if RULE == "sgd":
        # torch fills the momentum buffer with the first gradient as it is, and without momentum has
        # no buffer to dampen
        lerp1 = tl.where((s.step <= 1) | (s.beta1 == 0), one, one - s.dampening)
    tl.store(target, tl.where(s.maximize != 0, -gradient_scale, gradient_scale), mask=live)
    tl.store(target + 1, s.beta1.to(tl.float32), mask=live)
    tl.store(target + 2, lerp1.to(tl.float32), mask=live)
    tl.store(target + 3, s.beta2.to(tl.float32), mask=live)
    tl.store(target + 4, (one - s.beta2).to(tl.float32), mask=live)
    tl.store(target + 5, inv_sqrt_correction2.to(tl.float32), mask=live)
    tl.store(target + 6, s.eps.to(tl.float32), mask=live)
    tl.store(target + 7, coupled_decay.to(tl.float32), mask=live)
    tl.store(target + 8, (s.nesterov != 0).to(tl.float32), mask=live)
    tl.store(target + 9, s.step.to(tl.float32, bitcast=True), mask=live)


@triton.jit
def derive_decay(s, rate, RULE: tl.constexpr):
    """1 - rate * weight_decay for decoupled rules; 1 for coupled ones."""
    if RULE == "adam" or RULE == "sgd":
        return rate * 0 + 1
    else:
        return 1 - rate * s.weight_decay


@triton.jit
def correction1(s, RULE: tl.constexpr):
    """What the step size is divided by: 1 - beta1^step for Adam's rules."""
    if RULE == "adamw" or RULE == "adam":
        return 1 - power(s.beta1, s.step)
    else:
        return s.beta1 * 0 + 1


@triton.jit
def store_pair(target, first, second, live):
    """A ReplicaRow of each tensor."""
    tl.store(target, first.to(tl.float32), mask=live)
    tl.store(target + 1, second.to(tl.float32), mask=live)


@triton.jit(
    do_not_specialize=["num_partials", "num_tensors", "num_groups", "num_replicas"],
    do_not_specialize_on_alignment=["grad_scale", "found_inf", "settings", "rates"],
)
def derive(
    gradients,  # [tensor][2] address, type
    settings,
    rates,  # [group] addresses, or 0: the rate is in the settings
    partials,
    grad_scale,
    found_inf,
    counters,  # [tensor] addresses
    groups,  # [tensor]
    rows,
    replica_rows,
    control,
    num_partials,
    num_tensors,
    num_groups,
    num_replicas,
    RULE: tl.constexpr,
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
    live = live & (tl.load(gradients + 2 * tensor, mask=live, other=0) != 0)
    counter = tl.load(counters + tensor, mask=live, other=0).to(tl.pointer_type(tl.float32))
    count = tl.load(counter, mask=live, other=0)
    group = tl.load(groups + tensor, mask=live, other=0)
    s = load_settings(settings, rates, group, count.to(tl.uint32) + 1, live)
    store_rows(rows + tensor * HYPER_ROW, s, gradient_scale, live, RULE)
    correction = correction1(s, RULE)
    rho = settings + CALL_SETTINGS + num_groups * GROUP_SETTINGS + group * num_replicas
    for k in range(num_replicas):
        target = replica_rows + (tensor * num_replicas + k) * 2
        rho_k = tl.load(rho + k, mask=live, other=0)
        rate = s.lr * rho_k  # Eq. 2
        store_pair(
            target,
            rate / correction,
            derive_decay(s, tl.where(s.decay_at_base != 0, s.lr, rate), RULE),
            live,
        )
    tl.store(counter, count + 1, mask=live & (tensor < tl.where(skip, 0, num_tensors)))
