"""The operations in float64, written from the equations alone. Shares nothing with hdet.

Every result is a value together with a bound on what float32 arithmetic may lose on the way to it:
a few units in the last place of each term, carried through the formula. Where terms cancel the
bound is wide, elsewhere it is tight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

EPSILON = 4 * 2.0**-24
"""relative error of one term: its factors and the sum are each rounded to float32, four times at
most"""

LARGEST = torch.finfo(torch.float32).max


@dataclass
class Bounded:
    """A float64 value, and by how much a float32 result may differ from it.

    What float32 cannot hold is infinite, and that is exact.
    """

    value: Tensor
    error: Tensor

    def __post_init__(self) -> None:
        self.value = _in_range(self.value, LARGEST)
        self.error = torch.where(self.value.isfinite(), self.error, 0.0)


def exactly(x: Tensor) -> Bounded:
    return Bounded(x, torch.zeros_like(x))


def _in_range(x: Tensor, largest: float) -> Tensor:
    """What is larger becomes infinite."""
    return torch.where(x.abs() > largest, x.sign() * math.inf, x)


@dataclass
class Hyper:
    """Hyperparameters of a step in the papers' terms."""

    lr: float
    multipliers: Sequence[float] = (1.0,)
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    decay_at_base: bool = False
    cautious_decay: bool = False


@dataclass
class Stepped:
    moments: list[Bounded]
    params: list[Bounded] = field(default_factory=list)  # of each replica


def clip_coefficient(
    gradients: Sequence[Tensor], scale: float, max_norm: float
) -> tuple[float, float]:
    """Norm of all gradients divided by the scaler's factor, and what clipping to max_norm
    multiplies them by."""
    norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients)) / scale
    return norm, min(1.0, max_norm / (norm + 1e-6))


def step(
    rule: str,
    h: Hyper,
    t: int,
    gradient: Tensor,
    factor: float,
    params: Sequence[Tensor],
    moments: Sequence[Tensor],
) -> Stepped:
    """Step number t (from 1) of all replicas along the direction of one gradient, which is
    multiplied by `factor` first.

    adamw: Loshchilov and Hutter 2019, Algorithm 2. adam: Kingma and Ba 2015, with the decay in the
    gradient. sgd: Polyak momentum as in Sutskever et al. 2013, with dampening. lion: Chen et al.
    2023, Algorithm 2. nadamw: Choi et al. 2019, Table 1. Decoupled decay acts at the replica's rate
    lr * rho_k, or at lr. Cautious decay: Chen et al. 2025, Algorithm 1.
    """
    direction, new = _direction(rule, h, t, gradient, factor, params[0], moments)
    for theta, rho in zip(params, h.multipliers, strict=True):
        rate = h.lr * rho
        decay = (
            (h.lr if h.decay_at_base else rate) * h.weight_decay if rule not in _COUPLED else 0.0
        )
        error = EPSILON * ((1 + decay) * theta.abs() + rate * direction.value.abs())
        error = error + rate * direction.error
        acts: Tensor | bool = True
        if h.cautious_decay:  # where they have one sign; rounding may turn that of the direction
            acts = direction.value * theta >= 0
            undecided = (direction.value.abs() <= direction.error) & (direction.error > 0)
            error = error + torch.where(undecided, decay * theta.abs(), 0.0)
        value = torch.where(torch.as_tensor(acts), (1 - decay) * theta, theta)
        new.params.append(Bounded(value - rate * direction.value, error))
    return new


def _direction(
    rule: str,
    h: Hyper,
    t: int,
    gradient: Tensor,
    factor: float,
    theta: Tensor,
    moments: Sequence[Tensor],
) -> tuple[Bounded, Stepped]:
    """The direction u and the new moments."""
    g = (-factor if h.maximize else factor) * gradient.double()
    error = EPSILON * g.abs()
    if (
        rule in _COUPLED and h.weight_decay != 0
    ):  # a decay that is off does not look at the parameter, which may be infinite
        g = g + h.weight_decay * theta
        error = error + EPSILON * (h.weight_decay * theta).abs()
    return _DIRECTIONS[rule](h, t, Bounded(g, error), *moments)


def _lerp(a: Tensor, b: Tensor, weight: float) -> Tensor:
    """(1 - weight) * a + weight * b, in the form of torch.lerp: an infinite end decides between
    infinity and NaN, and so does the form."""
    way = _in_range(b - a, LARGEST)
    return a + weight * way if weight < 0.5 else b - (1 - weight) * way


def _mixed(old: Tensor, g: Bounded, beta: float) -> Bounded:
    """beta * old + (1 - beta) * g"""
    return Bounded(
        _lerp(old, g.value, 1 - beta),
        EPSILON * (old.abs() + 2 * (1 - beta) * g.value.abs()) + (1 - beta) * g.error,
    )


def _adam(h: Hyper, t: int, g: Bounded, first: Tensor, second: Tensor) -> tuple[Bounded, Stepped]:
    m = _mixed(first, g, h.beta1)
    exact = h.beta2 * second + (1 - h.beta2) * g.value**2
    v = Bounded(exact, EPSILON * exact + 2 * (1 - h.beta2) * g.value.abs() * g.error)
    correction1, correction2 = 1 - h.beta1**t, 1 - h.beta2**t
    root = (v.value / correction2).sqrt()
    root_error = EPSILON * root + v.error / correction2 / (2 * root)
    root_error = torch.where((root > 0) & root.isfinite(), root_error, torch.zeros_like(root))
    u = m.value / correction1 / (root + h.eps)
    error = m.error / correction1 / (root + h.eps) + u.abs() * (
        EPSILON + root_error / (root + h.eps)
    )
    return Bounded(u, error), Stepped([m, v])


def _nadamw(h: Hyper, t: int, g: Bounded, first: Tensor, second: Tensor) -> tuple[Bounded, Stepped]:
    """Adam's direction, with beta1 * m + (1 - beta1) * g in the place of m."""
    plain, new = _adam(h, t, g, first, second)
    m, v = new.moments
    ahead = _mixed(m.value, g, h.beta1)
    root = (v.value / (1 - h.beta2**t)).sqrt() + h.eps
    value = ahead.value / (1 - h.beta1**t) / root
    from_m = (ahead.error + h.beta1 * m.error) / (1 - h.beta1**t) / root
    ratio = (plain.error / plain.value.abs()).where(plain.value != 0, torch.zeros_like(root))
    return Bounded(value, from_m + value.abs() * (EPSILON + ratio)), new


def _sgd(h: Hyper, t: int, g: Bounded, first: Tensor) -> tuple[Bounded, Stepped]:
    if h.momentum == 0:
        return g, Stepped([g])
    share = 1.0 if t == 1 else 1 - h.dampening
    buffer = h.momentum * first + share * g.value
    error = EPSILON * ((h.momentum * first).abs() + (share * g.value).abs()) + abs(share) * g.error
    momentum = Bounded(buffer, error)
    if not h.nesterov:
        return momentum, Stepped([momentum])
    ahead = g.value + h.momentum * momentum.value
    return Bounded(
        ahead,
        EPSILON * (g.value.abs() + (h.momentum * buffer).abs()) + g.error + h.momentum * error,
    ), Stepped([momentum])


def _lion(h: Hyper, t: int, g: Bounded, first: Tensor) -> tuple[Bounded, Stepped]:
    c = _mixed(first, g, h.beta1)
    undecided = (c.value.abs() <= c.error) & (c.error > 0)  # rounding may turn the sign
    return Bounded(c.value.sign(), 2.0 * undecided), Stepped([_mixed(first, g, h.beta2)])


_DIRECTIONS = {"adamw": _adam, "adam": _adam, "sgd": _sgd, "lion": _lion, "nadamw": _nadamw}
_COUPLED = ("adam", "sgd")
"""their decay is part of the gradient"""


def weighted_mean(rows: Sequence[Bounded], weights: Sequence[float]) -> Bounded:
    """sum w_k row_k / sum w_k over the rows whose weight is not 0 (Eq. 3)."""
    kept = [(row, w / sum(weights)) for row, w in zip(rows, weights, strict=True) if w != 0]
    value = sum((w * row.value for row, w in kept), torch.zeros_like(rows[0].value))
    error = sum(
        (w * (row.error + len(kept) * EPSILON * row.value.abs()) for row, w in kept),
        torch.zeros_like(value),
    )
    return Bounded(value, error)


def scaled(x: Bounded, weight: float) -> Bounded:
    """weight * x, and zero at weight 0 whatever x is."""
    if weight == 0:
        return exactly(torch.zeros_like(x.value))
    return Bounded(weight * x.value, weight * (x.error + EPSILON * x.value.abs()))


_MANTISSA = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
_LOWEST = {
    torch.float32: -149,
    torch.bfloat16: -133,
    torch.float16: -24,
}  # exponent of the smallest subnormal number


def spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbouring numbers of the dtype around x."""
    exponent = torch.frexp(x).exponent.double() - 1
    return 2.0 ** torch.clamp(exponent - _MANTISSA[dtype], min=_LOWEST[dtype])


def assert_stored(stored: Tensor, exact: Bounded, name: str, stochastic: bool = False) -> None:
    """`stored` is the exact value rounded to stored.dtype: to nearest, or stochastically to one
    of its two neighbours. Infinities and NaN are met exactly."""
    found = stored.cpu().double()
    value = _in_range(
        exact.value, torch.finfo(stored.dtype).max * (1 + 2.0 ** -(2 + _MANTISSA[stored.dtype]))
    )
    distance = (found - value).abs()
    allowed = (1.0 if stochastic else 0.5) * spacing(value, stored.dtype) + exact.error
    near = value.isfinite() & found.isfinite() & (distance <= allowed)
    wrong = ~(near | (found == value) | (found.isnan() & value.isnan()))
    if wrong.any():
        i = int(wrong.flatten().nonzero()[0])
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, the first is "
            f"[{i}]: {stored.flatten()[i]} instead of {value.flatten()[i]}, off by "
            f"{distance.flatten()[i]:.3g}, allowed {allowed.flatten()[i]:.3g}"
        )


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """The float32 whose bits are bfloat16 `upper` followed by int16 `lower`, where the lower half
    counts as a signed number."""
    bits = (upper.cpu().view(torch.int16).int() << 16) + lower.cpu().int()
    return bits.view(torch.float32)


# Moments in 8 bits. The table as the paper has it (Dettmers et al. 2021, Section 1.3 and Appendix
# F), by codes.


def tree(signed: bool) -> Tensor:
    """What the bits of a code after the sign stand for, ascending: after the first one they number
    the parts of a decade."""
    bits = 7 if signed else 8
    values = [0.0, 1.0]
    for code in range(2, 2**bits):
        rest = code.bit_length() - 1
        edges = torch.linspace(0.1, 1, 2**rest + 1, dtype=torch.float64)
        part = code - 2**rest
        values.append(float(edges[part] + edges[part + 1]) / 2 * 10.0 ** -(bits - 1 - rest))
    return torch.tensor(sorted(values), dtype=torch.float64)


_TREES = {signed: tree(signed) for signed in (True, False)}


def decoded(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """In float64: where codes are signed their highest bit is the sign."""
    code, table = codes.cpu().long(), _TREES[signed]
    values = (
        table[code % 128] * torch.where(code >= 128, -1.0, 1.0).double() if signed else table[code]
    )
    return values * scales.cpu().double().repeat_interleave(256)[: len(code)]


def assert_coded(codes: Tensor, scales: Tensor, exact: Bounded, name: str, signed: bool) -> None:
    """Each block of 256 has its largest magnitude for a scale, and each number the code that is
    nearest, up to errors. A block with a number that is not finite is NaN; a second moment that
    is not 0 does not become 0."""
    found = decoded(codes, scales, signed)
    for start in range(0, len(found), 256):
        block = slice(start, start + 256)
        value, error, got, scale = (
            exact.value[block],
            exact.error[block],
            found[block],
            float(scales[start // 256]),
        )
        if not value.isfinite().all():
            assert math.isnan(scale) and not codes[block].any(), (
                f"{name}: a block that is not finite has the scale {scale}"
            )
            continue
        largest = max(float(value.abs().max()), 2.0**-104)
        assert abs(scale - largest) <= float(error.max()) + 2.0**-24 * largest, (
            f"{name}: the scale is {scale} instead of {largest}"
        )
        table = _TREES[signed]
        share = value.abs() / scale
        above = torch.searchsorted(table, share).clamp(1, len(table) - 1)
        gap = table[above] - table[above - 1]
        never_zero = torch.tensor(not signed) & (above == 1) & (value > error)
        wrong = (got - value).abs() > torch.where(
            never_zero, gap, gap / 2
        ) * scale + error + 2.0**-22 * value.abs()
        wrong |= never_zero & (got == 0)
        assert not wrong.any(), (
            f"{name}: element {start + int(wrong.nonzero()[0])} has another code than the nearest"
        )
