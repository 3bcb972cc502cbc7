"""The operations in float64. Of hdet it has the rules' trees, and tests/optim compares these with
the rules' peers; all else is written from the equations alone.

Every result is a value together with a bound on what float32 arithmetic may lose on the way to it:
a few units in the last place of each term, carried through the formula. Where terms cancel the
bound is wide, elsewhere it is tight.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hdet.kernels.ema import WeightAverage
from hdet.rules import DECOUPLED, RULES, StepSettings
from hdet.rules.trace import Scalar, Trace, walk
from hdet.rules.trace import Tensor as Traced

EPSILON = 4 * 2.0**-24
"""relative error of one term: its factors and the sum are each rounded to float32, four times at
most"""

ROUNDING, SMALLEST = 2.0**-24, 2.0**-149
"""of one operation: relative, and where results are subnormal"""
LARGEST = torch.finfo(torch.float32).max


@dataclass
class Bounded:
    """A float64 value, and by how much a float32 result may differ from it.

    What float32 cannot hold is infinite, and that is exact.
    """

    value: Tensor
    error: Tensor

    def __post_init__(self) -> None:
        if bool((self.value.abs() <= LARGEST).all()):
            return
        self.value = _in_range(self.value, LARGEST)
        self.error = torch.where(self.value.isfinite(), self.error, 0.0)


def exactly(x: Tensor) -> Bounded:
    return Bounded(x, torch.zeros_like(x))


def _in_range(x: Tensor, largest: float) -> Tensor:
    """What is larger becomes infinite."""
    return torch.where(x.abs() > largest, x.sign() * math.inf, x)


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
    h: StepSettings,
    t: int,
    gradient: Tensor,
    factor: float,
    params: Sequence[Tensor],
    moments: Sequence[Tensor],
) -> Stepped:
    """Step number t (from 1) of all replicas along the direction of one gradient, which is
    multiplied by `factor` first.

    Decoupled decay acts at the replica's rate lr * rho_k, or at lr. Cautious decay: Chen et al.
    2025, Algorithm 1.
    """
    g = (-factor if h.maximize else factor) * gradient.double()
    inputs = [Bounded(g, 3 * ROUNDING * g.abs()), *map(exactly, (params[0], *moments))]
    direction, found = evaluate(rule, h, t, inputs)
    if RULES[rule].gives_parameter:
        return Stepped(found, [direction])
    new = Stepped(found)
    lr = float(h.lr) if t >= RULES[rule].first_step else 0.0
    for theta, rho in zip(params, h.multipliers, strict=True):
        rate = lr * rho
        decay = (lr if h.decay_at_base else rate) * h.weight_decay if rule in DECOUPLED else 0.0
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


Sums = dict[Scalar, float]
"""over a tensor, and the number of its elements"""


def _scalar(node: Scalar, h: StepSettings, t: int, sums: Sums) -> float:
    """In double."""
    if node in sums:
        return sums[node]
    if node.op == "number":
        return float(node.args[0])  # type: ignore[arg-type]
    if node.op == "setting":
        return float(getattr(h, str(node.args[0])))
    if node.op == "step":
        return float(t)
    if node.op == "rate":
        return float(h.lr) * h.multipliers[0]
    args = [_scalar(arg, h, t, sums) for arg in node.args]  # type: ignore[arg-type]
    if node.op == "power":
        return args[0] ** t
    return _SCALARS[node.op](*args)


_SCALARS: dict[str, Callable[..., float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": lambda a, b: a / b if b != 0 else a * math.inf,  # b is never -0
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": lambda x: math.log(x) if x > 0 else -math.inf,
    "le": lambda a, b: float(a <= b),
    "where": lambda condition, a, b: a if condition else b,
}


def _rounded(value: Tensor, error: Tensor) -> Bounded:
    """A result of float32 arithmetic, whose operands were off by as much as makes `error`."""
    return Bounded(value, (error + ROUNDING * value.abs() + SMALLEST).nan_to_num(nan=math.inf))


def _add(x: Bounded, y: Bounded) -> Bounded:
    return _rounded(x.value + y.value, x.error + y.error)


def _sub(x: Bounded, y: Bounded) -> Bounded:
    return _rounded(x.value - y.value, x.error + y.error)


def _mul(x: Bounded, y: Bounded) -> Bounded:
    for one, other in ((x, y), (y, x)):
        if one.value.dim() == 0 and one.value == 1:
            return other  # exact
    error = x.value.abs() * y.error + y.value.abs() * x.error + x.error * y.error
    return _rounded(x.value * y.value, error)


def _div(x: Bounded, y: Bounded) -> Bounded:
    value = x.value / y.value
    return _rounded(value, (x.error + value.abs() * y.error) / (y.value.abs() - y.error).clamp(0))


def _sqrt(x: Bounded) -> Bounded:
    root = x.value.sqrt()
    error = (x.error / (2 * root)).nan_to_num(nan=math.inf)  # of 0
    return _rounded(root, torch.minimum(error, x.error.sqrt()))


def _lerp(old: Bounded, new: Bounded, weight: Bounded, beta: Bounded) -> Bounded:
    """beta * old + weight * new in the form of torch.lerp: an infinite end decides between infinity
    and NaN, and so does the form."""
    a, b, w = old.value, new.value, float(weight.value)
    way = _in_range(b - a, LARGEST)
    value = a + w * way if w < 0.5 else b - (1 - w) * way
    error = 4 * ROUNDING * (a.abs() + 2 * w * b.abs())
    return Bounded(value, error + (1 - w) * old.error + w * new.error)


def _add_weighted(total: Bounded, weight: Bounded, x: Bounded) -> Bounded:
    return _add(total, _mul(weight, x)) if float(weight.value) != 0 else total


def _sign(x: Bounded) -> Bounded:
    undecided = (x.value.abs() <= x.error) & (x.error > 0)  # rounding may turn it
    return Bounded(x.value.sign().nan_to_num(0.0), 2.0 * undecided)


def _choose(condition: Bounded, a: Bounded, b: Bounded) -> Bounded:
    return a if float(condition.value) != 0 else b


def _clip(x: Bounded, low: Bounded, high: Bounded) -> Bounded:
    limits = float(low.value), float(high.value)
    value, least, most = (
        one.clamp(*limits) for one in (x.value, x.value - x.error, x.value + x.error)
    )
    error = torch.maximum(value - least, most - value).nan_to_num(nan=math.inf)
    return Bounded(value, error + max(low.error, high.error.nan_to_num()))


_TENSORS: dict[str, Callable[..., Bounded]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "sqrt": _sqrt,
    "lerp": _lerp,
    "add_weighted": _add_weighted,
    "sign": _sign,
    "where": _choose,
    "clip": _clip,
}


def _bounded_scalar(
    scalar: Scalar, h: StepSettings, t: int, sums: Sequence[Sums] = ({},)
) -> Bounded:
    """As elements meet it. `sums`: as they are, and as they may be."""
    x, *others = (torch.tensor(_scalar(scalar, h, t, one), dtype=torch.float64) for one in sums)
    error = (x - x.float().double()).abs()
    return Bounded(x, error + max([(one - x).abs() for one in others], default=0))


def _sums(
    traced: Trace, h: StepSettings, t: int, inputs: dict[Traced | Scalar, Bounded]
) -> list[Sums]:
    """Over a tensor, before its step: found, the least and the most."""
    elements = {Scalar("elements"): float(next(iter(inputs.values())).value.numel())}
    known = dict(inputs)
    found: list[Sums] = [dict(elements) for _ in range(3)]
    for one in traced.sums:
        for node in walk(one):
            if isinstance(node, Scalar):
                known[node] = _bounded_scalar(node, h, t)
            elif node not in known:
                known[node] = _TENSORS[node.op](*(known[arg] for arg in node.args))
        value, error = float(known[one].value.sum()), float(known[one].error.sum())
        for sums, x in zip(found, (value, value - error, value + error), strict=True):
            sums[Scalar("sum", (one,))] = x
    return found


def evaluate(
    rule: str, h: StepSettings, t: int, inputs: Sequence[Bounded]
) -> tuple[Bounded, list[Bounded]]:
    """The direction and the new moments, of gradient, parameter and moments."""
    traced = RULES[rule].trace
    known: dict[Traced | Scalar, Bounded] = {
        Traced("input", (name,)): value for name, value in zip(traced.inputs, inputs, strict=True)
    }
    sums = _sums(traced, h, t, known)
    for scalar in traced.scalars:
        known[scalar] = _bounded_scalar(scalar, h, t, sums)
    results = (traced.direction, *traced.moments)
    for node in (node for result in results for node in walk(result)):
        if node not in known:
            known[node] = _TENSORS[node.op](*(known[arg] for arg in node.args))
    u, *moments = (known[result] for result in results)
    divisor = _scalar(traced.divisor, h, t, {})
    return Bounded(u.value / divisor, u.error / divisor), moments


def kept_of(average: WeightAverage, t: int) -> float:
    """What step t of an average over time keeps of it."""
    if t <= average.begin:
        return 0.0
    n, rest = divmod(t - average.begin, average.every)
    if rest:
        return 1.0
    if average.decay is None:
        return (1 - 1 / n) ** (average.power + 1)
    warm = (n - 1 + 1) / (n - 1 + 10) if average.warm_up else 1.0
    return min(average.decay, warm) if n > 1 else 0.0


def averaged(average: WeightAverage, t: int, old: Tensor, param: Tensor) -> Bounded:
    kept = kept_of(average, t)
    if kept in (0.0, 1.0):
        return exactly(param if kept == 0 else old)
    numbers = (torch.tensor(x, dtype=torch.float64) for x in (1 - kept, kept))
    return _lerp(exactly(old), exactly(param), *map(exactly, numbers))


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


# int8: the numbers of 24 bits that it completes
_MANTISSA = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10, torch.int8: 15}
_LOWEST = {
    torch.float32: -149,
    torch.bfloat16: -133,
    torch.float16: -24,
    torch.int8: -141,
}  # exponent of the smallest subnormal number


def largest(dtype: torch.dtype) -> float:
    return (2 - 2.0**-15) * 2.0**127 if dtype == torch.int8 else torch.finfo(dtype).max


def spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbouring numbers of the dtype around x."""
    exponent = torch.frexp(x).exponent.double() - 1
    return 2.0 ** torch.clamp(exponent - _MANTISSA[dtype], min=_LOWEST[dtype])


def assert_stored(
    stored: Tensor,
    exact: Bounded,
    name: str,
    stochastic: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """`stored` is the exact value rounded to a dtype, its own by default: to nearest, or
    stochastically to one of its two neighbours. Infinities and NaN are met exactly."""
    found, dtype = stored.cpu().double(), dtype or stored.dtype
    value = _in_range(exact.value, largest(dtype) * (1 + 2.0 ** -(2 + _MANTISSA[dtype])))
    distance = (found - value).abs()
    allowed = (1.0 if stochastic else 0.5) * spacing(value, dtype) + exact.error
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
    """The float32 whose bits are bfloat16 `upper` followed by `lower`, int16 or int8 and zeros,
    where the lower half counts as a signed number."""
    unit = 256 if lower.dtype == torch.int8 else 1
    bits = (upper.cpu().view(torch.int16).int() << 16) + lower.cpu().int() * unit
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
