"""The update rules on blocks of elements, with the operations of csrc/core/rules.h in their order.

Printed by csrc/generate.py from hdet/rules: change that, and print again.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .arithmetic import add_weighted, exp, f64, lerp, log, power, sign

GROUP_SETTINGS = tl.constexpr(16)


class Settings(NamedTuple):
    """What the host wrote for the groups of some tensors, in float64."""

    lr: tl.tensor
    beta1: tl.tensor
    beta2: tl.tensor
    eps: tl.tensor
    weight_decay: tl.tensor
    momentum: tl.tensor
    dampening: tl.tensor
    nesterov: tl.tensor
    maximize: tl.tensor
    decay_at_base: tl.tensor
    cautious_decay: tl.tensor
    beta3: tl.tensor
    alpha: tl.tensor
    t_alpha: tl.tensor
    t_beta3: tl.tensor
    average: tl.tensor


@triton.jit
def load_settings(source, live):
    """`source`: where the settings of each tensor's group begin."""
    return Settings(
        tl.load(source + 0, mask=live, other=0),
        tl.load(source + 1, mask=live, other=0),
        tl.load(source + 2, mask=live, other=0),
        tl.load(source + 3, mask=live, other=0),
        tl.load(source + 4, mask=live, other=0),
        tl.load(source + 5, mask=live, other=0),
        tl.load(source + 6, mask=live, other=0),
        tl.load(source + 7, mask=live, other=0),
        tl.load(source + 8, mask=live, other=0),
        tl.load(source + 9, mask=live, other=0),
        tl.load(source + 10, mask=live, other=0),
        tl.load(source + 11, mask=live, other=0),
        tl.load(source + 12, mask=live, other=0),
        tl.load(source + 13, mask=live, other=0),
        tl.load(source + 14, mask=live, other=0),
        tl.load(source + 15, mask=live, other=0),
    )


@triton.jit
def adamw_scalars(h, step, rate, s, live):
    s0 = f64(1.0) - h.beta1
    s1 = h.beta1
    s2 = h.beta2
    s3 = f64(1.0) - h.beta2
    s4 = f64(1.0) / tl.sqrt(f64(1.0) - power(h.beta2, step))
    s5 = h.eps
    tl.store(s + 0, s0.to(tl.float32), mask=live)
    tl.store(s + 1, s1.to(tl.float32), mask=live)
    tl.store(s + 2, s2.to(tl.float32), mask=live)
    tl.store(s + 3, s3.to(tl.float32), mask=live)
    tl.store(s + 4, s4.to(tl.float32), mask=live)
    tl.store(s + 5, s5.to(tl.float32), mask=live)


@triton.jit
def adamw(row, g, p, m, v):
    s0 = row.s[0]
    s1 = row.s[1]
    s2 = row.s[2]
    s3 = row.s[3]
    s4 = row.s[4]
    s5 = row.s[5]
    t0 = lerp(m, g, s0, s1)
    t1 = (v * s2) + ((g * s3) * g)
    return tl.div_rn(t0, (tl.sqrt_rn(t1) * s4) + s5), t0, t1


@triton.jit
def adam_scalars(h, step, rate, s, live):
    s0 = h.weight_decay
    s1 = f64(1.0) - h.beta1
    s2 = h.beta1
    s3 = h.beta2
    s4 = f64(1.0) - h.beta2
    s5 = f64(1.0) / tl.sqrt(f64(1.0) - power(h.beta2, step))
    s6 = h.eps
    tl.store(s + 0, s0.to(tl.float32), mask=live)
    tl.store(s + 1, s1.to(tl.float32), mask=live)
    tl.store(s + 2, s2.to(tl.float32), mask=live)
    tl.store(s + 3, s3.to(tl.float32), mask=live)
    tl.store(s + 4, s4.to(tl.float32), mask=live)
    tl.store(s + 5, s5.to(tl.float32), mask=live)
    tl.store(s + 6, s6.to(tl.float32), mask=live)


@triton.jit
def adam(row, g, p, m, v):
    s0 = row.s[0]
    s1 = row.s[1]
    s2 = row.s[2]
    s3 = row.s[3]
    s4 = row.s[4]
    s5 = row.s[5]
    s6 = row.s[6]
    t0 = add_weighted(g, s0, p)
    t1 = lerp(m, t0, s1, s2)
    t2 = (v * s3) + ((t0 * s4) * t0)
    return tl.div_rn(t1, (tl.sqrt_rn(t2) * s5) + s6), t1, t2


@triton.jit
def ademamix_scalars(h, step, rate, s, live):
    e0 = log(h.beta1)
    e1 = log(h.beta3)
    e2 = exp((e0 * e1) / (e1 + ((e0 - e1) * (step / h.t_beta3))))
    s0 = f64(1.0) - h.beta1
    s1 = h.beta1
    s2 = f64(1.0) / (f64(1.0) - power(h.beta1, step))
    s3 = f64(1.0) - tl.where(step <= h.t_beta3, e2, h.beta3)
    s4 = tl.where(step <= h.t_beta3, e2, h.beta3)
    s5 = h.alpha * tl.where(step <= h.t_alpha, step / h.t_alpha, f64(1.0))
    s6 = h.beta2
    s7 = f64(1.0) - h.beta2
    s8 = f64(1.0) / tl.sqrt(f64(1.0) - power(h.beta2, step))
    s9 = h.eps
    tl.store(s + 0, s0.to(tl.float32), mask=live)
    tl.store(s + 1, s1.to(tl.float32), mask=live)
    tl.store(s + 2, s2.to(tl.float32), mask=live)
    tl.store(s + 3, s3.to(tl.float32), mask=live)
    tl.store(s + 4, s4.to(tl.float32), mask=live)
    tl.store(s + 5, s5.to(tl.float32), mask=live)
    tl.store(s + 6, s6.to(tl.float32), mask=live)
    tl.store(s + 7, s7.to(tl.float32), mask=live)
    tl.store(s + 8, s8.to(tl.float32), mask=live)
    tl.store(s + 9, s9.to(tl.float32), mask=live)


@triton.jit
def ademamix(row, g, p, m, slow, v):
    s0 = row.s[0]
    s1 = row.s[1]
    s2 = row.s[2]
    s3 = row.s[3]
    s4 = row.s[4]
    s5 = row.s[5]
    s6 = row.s[6]
    s7 = row.s[7]
    s8 = row.s[8]
    s9 = row.s[9]
    t0 = lerp(m, g, s0, s1)
    t1 = lerp(slow, g, s3, s4)
    t2 = (v * s6) + ((g * s7) * g)
    return tl.div_rn((t0 * s2) + (t1 * s5), (tl.sqrt_rn(t2) * s8) + s9), t0, t1, t2


@triton.jit
def lion_scalars(h, step, rate, s, live):
    s0 = f64(1.0) - h.beta1
    s1 = h.beta1
    s2 = f64(1.0) - h.beta2
    s3 = h.beta2
    tl.store(s + 0, s0.to(tl.float32), mask=live)
    tl.store(s + 1, s1.to(tl.float32), mask=live)
    tl.store(s + 2, s2.to(tl.float32), mask=live)
    tl.store(s + 3, s3.to(tl.float32), mask=live)


@triton.jit
def lion(row, g, p, m):
    s0 = row.s[0]
    s1 = row.s[1]
    s2 = row.s[2]
    s3 = row.s[3]
    return sign(lerp(m, g, s0, s1)), lerp(m, g, s2, s3)


@triton.jit
def muon_scalars(h, step, rate, s, live):
    s0 = f64(1.0) - h.momentum
    s1 = h.momentum
    s2 = f64(1.0) - tl.where(h.nesterov != 0, h.momentum, f64(1.0))
    s3 = tl.where(h.nesterov != 0, h.momentum, f64(1.0))
    tl.store(s + 0, s0.to(tl.float32), mask=live)
    tl.store(s + 1, s1.to(tl.float32), mask=live)
    tl.store(s + 2, s2.to(tl.float32), mask=live)
    tl.store(s + 3, s3.to(tl.float32), mask=live)


@triton.jit
def muon(row, g, p, m):
    s0 = row.s[0]
    s1 = row.s[1]
    s2 = row.s[2]
    s3 = row.s[3]
    t0 = lerp(m, g, s0, s1)
    return lerp(t0, g, s2, s3), t0


@triton.jit
def nadamw_scalars(h, step, rate, s, live):
    s0 = f64(1.0) - h.beta1
    s1 = h.beta1
    s2 = h.beta2
    s3 = f64(1.0) - h.beta2
    s4 = f64(1.0) / tl.sqrt(f64(1.0) - power(h.beta2, step))
    s5 = h.eps
    tl.store(s + 0, s0.to(tl.float32), mask=live)
    tl.store(s + 1, s1.to(tl.float32), mask=live)
    tl.store(s + 2, s2.to(tl.float32), mask=live)
    tl.store(s + 3, s3.to(tl.float32), mask=live)
    tl.store(s + 4, s4.to(tl.float32), mask=live)
    tl.store(s + 5, s5.to(tl.float32), mask=live)


@triton.jit
def nadamw(row, g, p, m, v):
    s0 = row.s[0]
    s1 = row.s[1]
    s2 = row.s[2]
    s3 = row.s[3]
    s4 = row.s[4]
    s5 = row.s[5]
    t0 = lerp(m, g, s0, s1)
    t1 = (v * s2) + ((g * s3) * g)
    return tl.div_rn(lerp(t0, g, s0, s1), (tl.sqrt_rn(t1) * s4) + s5), t0, t1


@triton.jit
def schedule_free_adamw_scalars(h, step, rate, s, live):
    s0 = f64(1.0) - (f64(1.0) - h.average)
    s1 = f64(1.0) - h.average
    s2 = h.beta2
    s3 = f64(1.0) - h.beta2
    s4 = f64(1.0) / tl.sqrt(f64(1.0) - power(h.beta2, step))
    s5 = h.eps
    s6 = h.weight_decay
    s7 = rate * ((h.beta1 * (f64(1.0) - h.average)) - f64(1.0))
    s8 = rate
    tl.store(s + 0, s0.to(tl.float32), mask=live)
    tl.store(s + 1, s1.to(tl.float32), mask=live)
    tl.store(s + 2, s2.to(tl.float32), mask=live)
    tl.store(s + 3, s3.to(tl.float32), mask=live)
    tl.store(s + 4, s4.to(tl.float32), mask=live)
    tl.store(s + 5, s5.to(tl.float32), mask=live)
    tl.store(s + 6, s6.to(tl.float32), mask=live)
    tl.store(s + 7, s7.to(tl.float32), mask=live)
    tl.store(s + 8, s8.to(tl.float32), mask=live)


@triton.jit
def schedule_free_adamw(row, g, p, v, z):
    s0 = row.s[0]
    s1 = row.s[1]
    s2 = row.s[2]
    s3 = row.s[3]
    s4 = row.s[4]
    s5 = row.s[5]
    s6 = row.s[6]
    s7 = row.s[7]
    s8 = row.s[8]
    t0 = (v * s2) + ((g * s3) * g)
    t1 = add_weighted(tl.div_rn(g, (tl.sqrt_rn(t0) * s4) + s5), s6, p)
    return lerp(p, z, s0, s1) + (t1 * s7), t0, z - (t1 * s8)


@triton.jit
def sgd_scalars(h, step, rate, s, live):
    s0 = h.nesterov
    s1 = h.weight_decay
    s2 = tl.where(
        step <= f64(1.0), f64(1.0), tl.where(h.momentum != 0, f64(1.0) - h.dampening, f64(1.0))
    )
    s3 = h.momentum
    tl.store(s + 0, s0.to(tl.float32), mask=live)
    tl.store(s + 1, s1.to(tl.float32), mask=live)
    tl.store(s + 2, s2.to(tl.float32), mask=live)
    tl.store(s + 3, s3.to(tl.float32), mask=live)


@triton.jit
def sgd(row, g, p, m):
    s0 = row.s[0]
    s1 = row.s[1]
    s2 = row.s[2]
    s3 = row.s[3]
    t0 = add_weighted(g, s1, p)
    t1 = add_weighted(t0 * s2, s3, m)
    return tl.where(s0 != 0, t0 + (t1 * s3), t1), t1


@triton.jit
def store_scalars(h, step, rate, s, live, RULE: tl.constexpr):
    """What of the settings a rule's elements meet."""
    if RULE == "adamw":
        adamw_scalars(h, step, rate, s, live)
    elif RULE == "adam":
        adam_scalars(h, step, rate, s, live)
    elif RULE == "ademamix":
        ademamix_scalars(h, step, rate, s, live)
    elif RULE == "lion":
        lion_scalars(h, step, rate, s, live)
    elif RULE == "muon":
        muon_scalars(h, step, rate, s, live)
    elif RULE == "nadamw":
        nadamw_scalars(h, step, rate, s, live)
    elif RULE == "schedule_free_adamw":
        schedule_free_adamw_scalars(h, step, rate, s, live)
    elif RULE == "sgd":
        sgd_scalars(h, step, rate, s, live)
    else:
        tl.static_assert(False, "no rule")


@triton.jit
def divisor(h, step, RULE: tl.constexpr):
    """What the rate is divided by."""
    if RULE == "adamw" or RULE == "adam" or RULE == "nadamw":
        result = f64(1.0) - power(h.beta1, step)
    elif (
        RULE == "ademamix"
        or RULE == "lion"
        or RULE == "muon"
        or RULE == "schedule_free_adamw"
        or RULE == "sgd"
    ):
        result = f64(1.0)
    else:
        tl.static_assert(False, "no rule")
    return result


@triton.jit
def direction(row, g, p, moments, RULE: tl.constexpr):
    """u and the new moments. `g` is scaled; `p` is 0 where replicas share u."""
    if RULE == "adamw":
        result = adamw(row, g, p, moments[0], moments[1])
    elif RULE == "adam":
        result = adam(row, g, p, moments[0], moments[1])
    elif RULE == "ademamix":
        result = ademamix(row, g, p, moments[0], moments[1], moments[2])
    elif RULE == "lion":
        result = lion(row, g, p, moments[0])
    elif RULE == "muon":
        result = muon(row, g, p, moments[0])
    elif RULE == "nadamw":
        result = nadamw(row, g, p, moments[0], moments[1])
    elif RULE == "schedule_free_adamw":
        result = schedule_free_adamw(row, g, p, moments[0], moments[1])
    elif RULE == "sgd":
        result = sgd(row, g, p, moments[0])
    else:
        tl.static_assert(False, "no rule")
    return result
