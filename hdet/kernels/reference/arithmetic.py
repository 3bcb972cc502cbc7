"""Arithmetic on many tensors at once, the update rules as it computes them, and what parameters
stand for.

Each operation rounds once, as the native kernels do, so the results have their bits wherever
torch's arithmetic on a device is IEEE's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...rules import RULES
from ...rules.trace import Scalar, walk
from ...rules.trace import Tensor as Traced
from ..numbers import value_of

_EMPTY_SUM = -0.0  # the neutral element of addition: -0 + 0 = 0, but -0 + -0 = -0
_COUNTER_BITS = 25  # float32 counts to 2^24


class Many:
    """Float32 tensors that go through the same arithmetic, in one multi-tensor call for each
    operation."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)

    def _apply(self, function: Callable[..., Sequence[Tensor]], other: Many | Tensor) -> Many:
        return Many(function(self.tensors, other.tensors if isinstance(other, Many) else other))

    def __add__(self, other: Many | Tensor) -> Many:
        return self._apply(torch._foreach_add, other)

    def __sub__(self, other: Many) -> Many:
        return self._apply(torch._foreach_sub, other)

    def __mul__(self, other: Many | Tensor) -> Many:
        return self._apply(torch._foreach_mul, other)

    def __truediv__(self, other: Many | Tensor) -> Many:
        return self._apply(torch._foreach_div, other)

    def sqrt(self) -> Many:
        # torch's float32 root is not always the nearest number on a CPU
        if self.tensors[0].device.type == "cpu":
            return Many([x.double().sqrt().float() for x in self.tensors])
        return Many(torch._foreach_sqrt(self.tensors))

    def clip(self, low: Number, high: Number) -> Many:
        count = len(self.tensors)
        lows, highs = (x.tensors if isinstance(x, Many) else [x] * count for x in (low, high))
        return Many(list(map(torch.clamp, self.tensors, lows, highs)))

    def sign(self) -> Many:
        return Many(torch._foreach_sign(self.tensors))


Number = Tensor | Many
"""of all tensors, 0-d, or for each its own"""


def where(condition: Number, a: Many, b: Many) -> Many:
    count = len(a.tensors)
    each = condition.tensors if isinstance(condition, Many) else [condition] * count
    return Many(list(map(torch.where, each, a.tensors, b.tensors)))


def _test(x: Number, function: Callable[[Tensor], Tensor]) -> Number:
    return Many(list(map(function, x.tensors))) if isinstance(x, Many) else function(x)


def lerp(a: Many, b: Many, weight: Number, rest: Number) -> Many:
    """a + weight * (b - a) from the end that is nearer."""
    way = b - a
    return where(_test(weight, lambda w: w < 0.5), a + way * weight, b - way * rest)


def add_weighted(total: Many, weight: Number, x: Many) -> Many:
    """One term of a weighted sum, left out at weight 0, where 0 times NaN or infinity would be
    NaN: a decay or a momentum that is off, a replica that is not in the mean."""
    return where(_test(weight, lambda w: w == 0), total, total + x * weight)


def averaged(average: Many, param: Many, weight: Number, rest: Number) -> Many:
    """An average over time, left alone at weight 0; at weight 1 it becomes the parameter."""
    made = lerp(average, param, weight, rest)
    made = where(_test(weight, lambda w: w == 1), param, made)
    return where(_test(weight, lambda w: w == 0), average, made)


def _choose(condition: Number, a: Many, b: Many) -> Many:
    return where(_test(condition, lambda c: c != 0), a, b)


_OPERATIONS: dict[str, Callable[..., Many]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "sqrt": Many.sqrt,
    "sign": Many.sign,
    "clip": Many.clip,
    "lerp": lerp,
    "add_weighted": add_weighted,
    "where": _choose,
}
Program = tuple[list[tuple[Callable[..., Many], list[int]]], list[int]]
"""operations on earlier values, by their places, and the places of the results"""


@functools.cache
def _program(rule: str, before: bool) -> Program:
    """The places: scalars, inputs, then the operations in turn. `before`: of the pass before a
    step."""
    traced = RULES[rule].trace
    inputs = [Traced("input", (name,)) for name in traced.inputs]
    known: list[Scalar | Traced] = [*traced.scalars, *inputs]
    places = {node: place for place, node in enumerate(known)}
    operations = []
    results = traced.sums if before else (traced.direction, *traced.moments)
    for node in (node for result in results for node in walk(result)):
        if node not in places:
            args = [places[arg] for arg in node.args]  # type: ignore[index]
            operations.append((_OPERATIONS[node.op], args))
            places[node] = len(places)
    return operations, [places[result] for result in results]


def direction(
    rule: str, scalars: Sequence[Number], inputs: Sequence[Many], before: bool = False
) -> list[Many]:
    """u, which all replicas share, and the new moments; or what is summed before a step. `inputs`:
    the scaled gradient, the parameter, which is read where decay is part of the gradient, and the
    moments."""
    operations, results = _program(rule, before)
    values: list[Number] = [*scalars, *inputs]
    for function, places in operations:
        values.append(function(*[values[place] for place in places]))
    return [values[place] for place in results]  # type: ignore[misc]


def in_double(scalar: Scalar, settings: Mapping[str | Scalar, Tensor], step: Tensor) -> Tensor:
    """`step`: of each tensor, wide. What depends on it, or on sums, has a number for each, all else
    is 0-d. `settings`: by name, and sums over tensors."""
    if scalar in settings:
        return settings[scalar]
    if scalar.op == "number":
        number: Any = scalar.args[0]
        return torch.full((), number, dtype=step.dtype, device=step.device)
    if scalar.op == "setting":
        return settings[scalar.args[0]]  # type: ignore[index]
    if scalar.op == "rate":
        return settings["rate"]
    if scalar.op == "step":
        return step
    args = [in_double(arg, settings, step) for arg in scalar.args]  # type: ignore[arg-type]
    if scalar.op == "where":
        return torch.where(args[0] != 0, args[1], args[2])
    if scalar.op == "power":
        return power(args[0] + 0 * step, step)
    if scalar.op in _SCALAR_OPERATIONS:
        return _SCALAR_OPERATIONS[scalar.op](args[0])
    return getattr(torch, scalar.op)(*args)


def weighted_sum(values: Sequence[Many], weights: Tensor) -> Many:
    total = Many([torch.full_like(x, _EMPTY_SUM) for x in values[0].tensors])
    for value, weight in zip(values, weights, strict=True):
        total = add_weighted(total, weight, value)
    return total


def power(base: Tensor, exponent: Tensor) -> Tensor:
    """base^exponent by squaring: multiplications alone, in the order of the native kernels."""
    result, exponent = torch.ones_like(base), exponent.long()
    for bit in range(_COUNTER_BITS):
        result = torch.where((exponent >> bit & 1) == 1, result * base, result)
        base = base * base
    return result


def logarithm(x: Tensor) -> Tensor:
    """csrc/core/hyper.h: logarithm."""
    root, total = x.sqrt().sqrt(), torch.zeros_like(x)
    s = (root - 1.0) / (root + 1.0)
    for n in range(23, 0, -2):
        total = 1.0 / n + s * s * total
    return 8.0 * s * total


def exponential(x: Tensor) -> Tensor:
    """csrc/core/hyper.h: exponential."""
    y, less_one = x.clamp(min=-700.0) * 2.0**-10, torch.zeros_like(x)
    for n in range(10, 0, -1):
        less_one = y * (1.0 / n) * (1.0 + less_one)
    for _ in range(10):
        less_one = less_one * (2.0 + less_one)
    return 1.0 + less_one


_SCALAR_OPERATIONS = {"exp": exponential, "log": logarithm}


def values_of(params: Sequence[Tensor], masters: Sequence[Tensor | None]) -> Many:
    """What the parameters stand for, in float32: the master where there is one."""
    return Many(list(map(value_of, params, masters)))
