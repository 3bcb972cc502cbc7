"""The update rules on blocks of elements, with the operations of the C++ in their order.

Printed by csrc/generate.py from hdet/rules: change that, and print again.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .arithmetic import add_weighted, clip, exp, f64, lerp, log, power, sign

GROUP_SETTINGS = tl.constexpr(17)
SCALARS = tl.constexpr(14)
HYPER_ROW = tl.constexpr(16)
"""numbers of 4 bytes in a row"""


class Whole(NamedTuple):
    """What a pass over a tensor has found before a step, in float64."""

    elements: tl.tensor
    sums: tuple


@triton.jit
def put(x, place, live):
    tl.store(place, x.to(tl.float32), mask=live)


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
    gamma: tl.tensor
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
        tl.load(source + 16, mask=live, other=0),
    )


@triton.jit
def adamw_scalars(h, step, rate, whole, s, live):
    put(f64(1.0) - h.beta1, s + 0, live)
    put(h.beta1, s + 1, live)
    put(h.beta2, s + 2, live)
    put(f64(1.0) - h.beta2, s + 3, live)
    put(f64(1.0) / tl.sqrt(f64(1.0) - power(h.beta2, step)), s + 4, live)
    put(h.eps, s + 5, live)


@triton.jit
def adamw(row, g, p, m, v):
    s = row.s
    t0 = lerp(m, g, s[0], s[1])
    t1 = (v * s[2]) + ((g * s[3]) * g)
    return tl.div_rn(t0, (tl.sqrt_rn(t1) * s[4]) + s[5]), t0, t1


@triton.jit
def adam_scalars(h, step, rate, whole, s, live):
    put(h.weight_decay, s + 0, live)
    put(f64(1.0) - h.beta1, s + 1, live)
    put(h.beta1, s + 2, live)
    put(h.beta2, s + 3, live)
    put(f64(1.0) - h.beta2, s + 4, live)
    put(f64(1.0) / tl.sqrt(f64(1.0) - power(h.beta2, step)), s + 5, live)
    put(h.eps, s + 6, live)


@triton.jit
def adam(row, g, p, m, v):
    s = row.s
    t0 = add_weighted(g, s[0], p)
    t1 = lerp(m, t0, s[1], s[2])
    t2 = (v * s[3]) + ((t0 * s[4]) * t0)
    return tl.div_rn(t1, (tl.sqrt_rn(t2) * s[5]) + s[6]), t1, t2


@triton.jit
def adan_scalars(h, step, rate, whole, s, live):
    put(f64(1.0) - h.beta1, s + 0, live)
    put(h.beta1, s + 1, live)
    put(f64(1.0) / (f64(1.0) - power(h.beta1, step)), s + 2, live)
    put(tl.where(step <= f64(1.0), f64(0.0), f64(1.0)), s + 3, live)
    put(f64(1.0) - h.beta2, s + 4, live)
    put(h.beta2, s + 5, live)
    put(h.beta2 / (f64(1.0) - power(h.beta2, step)), s + 6, live)
    put(h.beta3, s + 7, live)
    put(f64(1.0) - h.beta3, s + 8, live)
    put(f64(1.0) / tl.sqrt(f64(1.0) - power(h.beta3, step)), s + 9, live)
    put(h.eps, s + 10, live)
    put(f64(-1.0), s + 11, live)


@triton.jit
def adan(row, g, p, m, d, n, before):
    s = row.s
    t0 = lerp(m, g, s[0], s[1])
    t1 = (g + before) * s[3]
    t2 = lerp(d, t1, s[4], s[5])
    t3 = g + (t1 * s[5])
    t4 = (n * s[7]) + ((t3 * s[8]) * t3)
    u = tl.div_rn((t0 * s[2]) + (t2 * s[6]), (tl.sqrt_rn(t4) * s[9]) + s[10])
    return u, t0, t2, t4, g * s[11]


@triton.jit
def ademamix_scalars(h, step, rate, whole, s, live):
    e0 = log(h.beta1)
    e1 = log(h.beta3)
    e2 = exp((e0 * e1) / (e1 + ((e0 - e1) * (step / h.t_beta3))))
    put(f64(1.0) - h.beta1, s + 0, live)
    put(h.beta1, s + 1, live)
    put(f64(1.0) / (f64(1.0) - power(h.beta1, step)), s + 2, live)
    put(f64(1.0) - tl.where(step <= h.t_beta3, e2, h.beta3), s + 3, live)
    put(tl.where(step <= h.t_beta3, e2, h.beta3), s + 4, live)
    put(h.alpha * tl.where(step <= h.t_alpha, step / h.t_alpha, f64(1.0)), s + 5, live)
    put(h.beta2, s + 6, live)
    put(f64(1.0) - h.beta2, s + 7, live)
    put(f64(1.0) / tl.sqrt(f64(1.0) - power(h.beta2, step)), s + 8, live)
    put(h.eps, s + 9, live)


@triton.jit
def ademamix(row, g, p, m, slow, v):
    s = row.s
    t0 = lerp(m, g, s[0], s[1])
    t1 = lerp(slow, g, s[3], s[4])
    t2 = (v * s[6]) + ((g * s[7]) * g)
    return tl.div_rn((t0 * s[2]) + (t1 * s[5]), (tl.sqrt_rn(t2) * s[8]) + s[9]), t0, t1, t2


@triton.jit
def adopt_scalars(h, step, rate, whole, s, live):
    put(step <= f64(1.0), s + 0, live)
    put(h.eps, s + 1, live)
    put(f64(float("inf")), s + 2, live)
    put(f64(0.0) - tl.sqrt(tl.sqrt(step - f64(1.0))), s + 3, live)
    put(tl.sqrt(tl.sqrt(step - f64(1.0))), s + 4, live)
    put(f64(1.0) - tl.where(step <= f64(1.0), f64(1.0), h.beta1), s + 5, live)
    put(tl.where(step <= f64(1.0), f64(1.0), h.beta1), s + 6, live)
    put(tl.where(step <= f64(1.0), f64(0.0), h.beta2), s + 7, live)
    put(f64(1.0) - tl.where(step <= f64(1.0), f64(0.0), h.beta2), s + 8, live)


@triton.jit
def adopt(row, g, p, m, v):
    s = row.s
    t0 = clip(tl.div_rn(tl.where(s[0] != 0, m, g), clip(tl.sqrt_rn(v), s[1], s[2])), s[3], s[4])
    t1 = lerp(m, t0, s[5], s[6])
    return t1, t1, (v * s[7]) + ((g * s[8]) * g)


@triton.jit
def cautious_adamw_scalars(h, step, rate, whole, s, live):
    e0 = whole.sums[0] / whole.elements
    put(f64(1.0) - h.beta1, s + 0, live)
    put(h.beta1, s + 1, live)
    put(f64(0.0), s + 2, live)
    put(f64(1.0), s + 3, live)
    put(f64(1.0) / tl.where(e0 <= f64(0.001), f64(0.001), e0), s + 4, live)
    put(h.beta2, s + 5, live)
    put(f64(1.0) - h.beta2, s + 6, live)
    put(f64(1.0) / tl.sqrt(f64(1.0) - power(h.beta2, step)), s + 7, live)
    put(h.eps, s + 8, live)


@triton.jit
def cautious_adamw(row, g, p, m, v):
    s = row.s
    t0 = lerp(m, g, s[0], s[1])
    t1 = (v * s[5]) + ((g * s[6]) * g)
    t2 = tl.div_rn(
        (t0 * clip(sign(t0) * sign(g), s[2], s[3])) * s[4], (tl.sqrt_rn(t1) * s[7]) + s[8]
    )
    return t2, t0, t1


@triton.jit
def cautious_adamw_terms(row, g, p, m, v):
    s = row.s
    return (clip(sign(lerp(m, g, s[0], s[1])) * sign(g), s[2], s[3]),)


@triton.jit
def lion_scalars(h, step, rate, whole, s, live):
    put(f64(1.0) - h.beta1, s + 0, live)
    put(h.beta1, s + 1, live)
    put(f64(1.0) - h.beta2, s + 2, live)
    put(h.beta2, s + 3, live)


@triton.jit
def lion(row, g, p, m):
    s = row.s
    return sign(lerp(m, g, s[0], s[1])), lerp(m, g, s[2], s[3])


@triton.jit
def cautious_lion_scalars(h, step, rate, whole, s, live):
    e0 = whole.sums[0] / whole.elements
    put(f64(1.0) - h.beta1, s + 0, live)
    put(h.beta1, s + 1, live)
    put(f64(0.0), s + 2, live)
    put(f64(1.0), s + 3, live)
    put(f64(1.0) / tl.where(e0 <= f64(0.001), f64(0.001), e0), s + 4, live)
    put(f64(1.0) - h.beta2, s + 5, live)
    put(h.beta2, s + 6, live)


@triton.jit
def cautious_lion(row, g, p, m):
    s = row.s
    t0 = sign(lerp(m, g, s[0], s[1]))
    return (t0 * clip(sign(t0) * sign(g), s[2], s[3])) * s[4], lerp(m, g, s[5], s[6])


@triton.jit
def cautious_lion_terms(row, g, p, m):
    s = row.s
    return (clip(sign(sign(lerp(m, g, s[0], s[1]))) * sign(g), s[2], s[3]),)


@triton.jit
def mars_scalars(h, step, rate, whole, s, live):
    put(h.gamma * (h.beta1 / (f64(1.0) - h.beta1)), s + 0, live)
    x = tl.where(whole.sums[0] <= f64(1.0), f64(1.0), f64(1.0) / tl.sqrt(whole.sums[0]))
    put(x, s + 1, live)
    put(f64(1.0) - h.beta1, s + 2, live)
    put(h.beta1, s + 3, live)
    put(h.beta2, s + 4, live)
    put(f64(1.0) - h.beta2, s + 5, live)
    put(f64(1.0) / tl.sqrt(f64(1.0) - power(h.beta2, step)), s + 6, live)
    put(h.eps, s + 7, live)


@triton.jit
def mars(row, g, p, m, v, last):
    s = row.s
    t0 = (g + ((g - last) * s[0])) * s[1]
    t1 = lerp(m, t0, s[2], s[3])
    t2 = (v * s[4]) + ((t0 * s[5]) * t0)
    return tl.div_rn(t1, (tl.sqrt_rn(t2) * s[6]) + s[7]), t1, t2, g


@triton.jit
def mars_terms(row, g, p, m, v, last):
    s = row.s
    t0 = g + ((g - last) * s[0])
    return (t0 * t0,)


@triton.jit
def muon_scalars(h, step, rate, whole, s, live):
    put(f64(1.0) - h.momentum, s + 0, live)
    put(h.momentum, s + 1, live)
    put(f64(1.0) - tl.where(h.nesterov != 0, h.momentum, f64(1.0)), s + 2, live)
    put(tl.where(h.nesterov != 0, h.momentum, f64(1.0)), s + 3, live)


@triton.jit
def muon(row, g, p, m):
    s = row.s
    t0 = lerp(m, g, s[0], s[1])
    return lerp(t0, g, s[2], s[3]), t0


@triton.jit
def nadamw_scalars(h, step, rate, whole, s, live):
    put(f64(1.0) - h.beta1, s + 0, live)
    put(h.beta1, s + 1, live)
    put(h.beta2, s + 2, live)
    put(f64(1.0) - h.beta2, s + 3, live)
    put(f64(1.0) / tl.sqrt(f64(1.0) - power(h.beta2, step)), s + 4, live)
    put(h.eps, s + 5, live)


@triton.jit
def nadamw(row, g, p, m, v):
    s = row.s
    t0 = lerp(m, g, s[0], s[1])
    t1 = (v * s[2]) + ((g * s[3]) * g)
    return tl.div_rn(lerp(t0, g, s[0], s[1]), (tl.sqrt_rn(t1) * s[4]) + s[5]), t0, t1


@triton.jit
def schedule_free_adamw_scalars(h, step, rate, whole, s, live):
    put(f64(1.0) - (f64(1.0) - h.average), s + 0, live)
    put(f64(1.0) - h.average, s + 1, live)
    put(h.beta2, s + 2, live)
    put(f64(1.0) - h.beta2, s + 3, live)
    put(f64(1.0) / tl.sqrt(f64(1.0) - power(h.beta2, step)), s + 4, live)
    put(h.eps, s + 5, live)
    put(h.weight_decay, s + 6, live)
    put(rate * ((h.beta1 * (f64(1.0) - h.average)) - f64(1.0)), s + 7, live)
    put(rate, s + 8, live)


@triton.jit
def schedule_free_adamw(row, g, p, v, z):
    s = row.s
    t0 = (v * s[2]) + ((g * s[3]) * g)
    t1 = add_weighted(tl.div_rn(g, (tl.sqrt_rn(t0) * s[4]) + s[5]), s[6], p)
    return lerp(p, z, s[0], s[1]) + (t1 * s[7]), t0, z - (t1 * s[8])


@triton.jit
def sgd_scalars(h, step, rate, whole, s, live):
    put(h.nesterov, s + 0, live)
    put(h.weight_decay, s + 1, live)
    x = tl.where(
        step <= f64(1.0), f64(1.0), tl.where(h.momentum != 0, f64(1.0) - h.dampening, f64(1.0))
    )
    put(x, s + 2, live)
    put(h.momentum, s + 3, live)


@triton.jit
def sgd(row, g, p, m):
    s = row.s
    t0 = add_weighted(g, s[1], p)
    t1 = add_weighted(t0 * s[2], s[3], m)
    return tl.where(s[0] != 0, t0 + (t1 * s[3]), t1), t1


@triton.jit
def store_scalars(h, step, rate, whole, s, live, RULE: tl.constexpr):
    """What of the settings a rule's elements meet."""
    if RULE == "adamw":
        adamw_scalars(h, step, rate, whole, s, live)
    elif RULE == "adam":
        adam_scalars(h, step, rate, whole, s, live)
    elif RULE == "adan":
        adan_scalars(h, step, rate, whole, s, live)
    elif RULE == "ademamix":
        ademamix_scalars(h, step, rate, whole, s, live)
    elif RULE == "adopt":
        adopt_scalars(h, step, rate, whole, s, live)
    elif RULE == "cautious_adamw":
        cautious_adamw_scalars(h, step, rate, whole, s, live)
    elif RULE == "lion":
        lion_scalars(h, step, rate, whole, s, live)
    elif RULE == "cautious_lion":
        cautious_lion_scalars(h, step, rate, whole, s, live)
    elif RULE == "mars":
        mars_scalars(h, step, rate, whole, s, live)
    elif RULE == "muon":
        muon_scalars(h, step, rate, whole, s, live)
    elif RULE == "nadamw":
        nadamw_scalars(h, step, rate, whole, s, live)
    elif RULE == "schedule_free_adamw":
        schedule_free_adamw_scalars(h, step, rate, whole, s, live)
    elif RULE == "sgd":
        sgd_scalars(h, step, rate, whole, s, live)
    else:
        tl.static_assert(False, "no rule")


@triton.jit
def divisor(h, step, RULE: tl.constexpr):
    """What the rate is divided by."""
    if (
        RULE == "adamw"
        or RULE == "adam"
        or RULE == "cautious_adamw"
        or RULE == "mars"
        or RULE == "nadamw"
    ):
        result = f64(1.0) - power(h.beta1, step)
    elif (
        RULE == "adan"
        or RULE == "ademamix"
        or RULE == "adopt"
        or RULE == "lion"
        or RULE == "cautious_lion"
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
    elif RULE == "adan":
        result = adan(row, g, p, moments[0], moments[1], moments[2], moments[3])
    elif RULE == "ademamix":
        result = ademamix(row, g, p, moments[0], moments[1], moments[2])
    elif RULE == "adopt":
        result = adopt(row, g, p, moments[0], moments[1])
    elif RULE == "cautious_adamw":
        result = cautious_adamw(row, g, p, moments[0], moments[1])
    elif RULE == "lion":
        result = lion(row, g, p, moments[0])
    elif RULE == "cautious_lion":
        result = cautious_lion(row, g, p, moments[0])
    elif RULE == "mars":
        result = mars(row, g, p, moments[0], moments[1], moments[2])
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


@triton.jit
def terms(row, g, p, moments, RULE: tl.constexpr):
    """What a rule asks the sums of."""
    if RULE == "cautious_adamw":
        result = cautious_adamw_terms(row, g, p, moments[0], moments[1])
    elif RULE == "cautious_lion":
        result = cautious_lion_terms(row, g, p, moments[0])
    elif RULE == "mars":
        result = mars_terms(row, g, p, moments[0], moments[1], moments[2])
    else:
        tl.static_assert(False, "no rule")
    return result
