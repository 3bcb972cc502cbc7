"""The update rules on blocks of elements: csrc/core/rules.h in Triton, the same operations in the
same order."""

from typing import NamedTuple

import triton
import triton.language as tl


class HyperRow(NamedTuple):
    """What all replicas share, as hyper.h has it: float32 scalars of one row."""

    gradient_scale: tl.tensor
    beta1: tl.tensor
    lerp1: tl.tensor
    beta2: tl.tensor
    lerp2: tl.tensor
    inv_sqrt_correction2: tl.tensor
    eps: tl.tensor
    coupled_decay: tl.tensor
    nesterov: tl.tensor
    step: tl.tensor  # uint32


HYPER_ROW = tl.constexpr(12)
"""numbers of 4 bytes in a row, the last two unused"""


@triton.jit
def load_row(row):
    return HyperRow(
        tl.load(row),
        tl.load(row + 1),
        tl.load(row + 2),
        tl.load(row + 3),
        tl.load(row + 4),
        tl.load(row + 5),
        tl.load(row + 6),
        tl.load(row + 7),
        tl.load(row + 8),
        tl.load(row + 9).to(tl.uint32, bitcast=True),
    )


@triton.jit
def lerp(a, b, weight, rest):
    """a + weight * (b - a) from the end that is nearer, as torch.lerp does: exact at weight 0 and
    at weight 1. rest: 1 - weight."""
    near = weight < 0.5
    return tl.where(near, a, b) + tl.where(near, weight, -rest) * (b - a)


@triton.jit
def add_weighted(total, weight, x):
    """One term of a weighted sum, left out at weight 0, where 0 times NaN or infinity would be
    NaN: a decay or a momentum that is off, a replica that is not in the mean."""
    return tl.where(weight == 0, total, total + weight * x)


@triton.jit
def adamw(row, gradient, exp_avg, exp_avg_sq):
    exp_avg = lerp(exp_avg, gradient, row.lerp1, row.beta1)
    exp_avg_sq = row.beta2 * exp_avg_sq + row.lerp2 * gradient * gradient
    u = tl.div_rn(exp_avg, tl.sqrt_rn(exp_avg_sq) * row.inv_sqrt_correction2 + row.eps)
    return u, exp_avg, exp_avg_sq


@triton.jit
def sgd(row, gradient, momentum_buffer):
    """lerp1 is 1 - dampening, and 1 in the first step."""
    momentum_buffer = add_weighted(row.lerp1 * gradient, row.beta1, momentum_buffer)
    return tl.where(
        row.nesterov != 0, gradient + row.beta1 * momentum_buffer, momentum_buffer
    ), momentum_buffer


@triton.jit
def lion(row, gradient, exp_avg):
    c = lerp(exp_avg, gradient, row.lerp1, row.beta1)
    return (c > 0).to(tl.float32) - (c < 0).to(tl.float32), lerp(
        exp_avg, gradient, row.lerp2, row.beta2
    )


@triton.jit
def direction(row, gradient, param, exp_avg, exp_avg_sq, RULE: tl.constexpr):
    """u and the new moments.

    `gradient` is scaled; `param` is read by coupled rules, and 0 where replicas differ.
    """
    if RULE == "adam" or RULE == "sgd":
        gradient = add_weighted(gradient, row.coupled_decay, param)
    if RULE == "sgd":
        u, exp_avg = sgd(row, gradient, exp_avg)
    elif RULE == "lion":
        u, exp_avg = lion(row, gradient, exp_avg)
    else:
        tl.static_assert(RULE == "adamw" or RULE == "adam", "unknown rule")
        u, exp_avg, exp_avg_sq = adamw(row, gradient, exp_avg, exp_avg_sq)
    return u, exp_avg, exp_avg_sq


@triton.jit
def take_step(step_size, decay, param, u):
    """Eq. 2 with decoupled decay: theta_r <- theta_r - eta rho_r (u + decay)."""
    return param * decay - step_size * u


@triton.jit
def empty_sum(BLOCK: tl.constexpr):
    """Where a weighted sum starts: -0, the neutral element of addition, by its bits.

    (As a number Triton takes it for +0.)
    """
    return tl.full((BLOCK,), 0x80000000, tl.uint32).to(tl.float32, bitcast=True)
