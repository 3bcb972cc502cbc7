"""What update rules and sums are made of, on blocks of elements: csrc/core/arithmetic.h in Triton,
the same operations in the same order; and a tensor's row of hyperparameters."""

from typing import NamedTuple

import triton
import triton.language as tl


class HyperRow(NamedTuple):
    """What all replicas share, as rules.h has it: numbers of 32 bits."""

    gradient_scale: tl.tensor
    step: tl.tensor  # uint32
    s: tuple  # what the rule's elements meet


@triton.jit
def load_row(row, SCALARS: tl.constexpr):
    s = ()
    for i in tl.static_range(2, 2 + SCALARS):
        s = s + (tl.load(row + i),)
    return HyperRow(tl.load(row), tl.load(row + 1).to(tl.uint32, bitcast=True), s)


@triton.jit
def f64(x: tl.constexpr):
    return tl.full((), x, tl.float64)


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
def log(x):
    """csrc/core/hyper.h: logarithm."""
    root = tl.sqrt(tl.sqrt(x))
    s = (root - f64(1.0)) / (root + f64(1.0))
    total = tl.full(x.shape, 0.0, tl.float64)
    for i in tl.static_range(12):
        total = f64(1.0 / (23 - 2 * i)) + s * s * total
    return f64(8.0) * s * total


@triton.jit
def exp(x):
    """csrc/core/hyper.h: exponential."""
    y = tl.where(x > -700, x, f64(-700.0)) * f64(0.0009765625)
    less_one = tl.full(x.shape, 0.0, tl.float64)
    for i in tl.static_range(10):
        less_one = y * f64(1.0 / (10 - i)) * (f64(1.0) + less_one)
    for _ in range(10):
        less_one = less_one * (f64(2.0) + less_one)
    return f64(1.0) + less_one


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
def sign(x):
    """-1, 0 or 1; 0 for NaN."""
    return (x > 0).to(tl.float32) - (x < 0).to(tl.float32)


@triton.jit
def clip(x, low, high):
    """Within limits; NaN stays NaN."""
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def take_step(step_size, decay, against, param, u):
    """Eq. 2 with decoupled decay: theta_r <- theta_r - eta rho_r (u + decay). Cautious decay acts
    where u theta >= 0."""
    return param * tl.where(u * param < 0, against, decay) - step_size * u


@triton.jit
def averaged(average, param, weight, rest):
    """An average of the weights over time, which takes in what a step has made of the
    parameter."""
    return tl.where(weight == 1, param, lerp(average, param, weight, rest))


@triton.jit
def empty_sum(BLOCK: tl.constexpr):
    """Where a weighted sum starts: -0, the neutral element of addition, by its bits.

    (As a number Triton takes it for +0.)
    """
    return tl.full((BLOCK,), 0x80000000, tl.uint32).to(tl.float32, bitcast=True)
