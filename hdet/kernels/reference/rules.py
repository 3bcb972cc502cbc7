"""csrc/core/rules.h and numbers.h in torch: arithmetic on many tensors at once, the update rules,
and what parameters stand for.

Each operation rounds once, as the native kernels do, so the results have their bits wherever
torch's arithmetic on a device is IEEE's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import numbers
from ..checks import wide_dtype
from ..interface import COUPLED

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

    def __truediv__(self, other: Many) -> Many:
        return self._apply(torch._foreach_div, other)

    def sqrt(self) -> Many:
        if (
            self.tensors[0].device.type == "cpu"
        ):  # torch's float32 root is not always the nearest number there
            return Many([x.double().sqrt().float() for x in self.tensors])
        return Many(torch._foreach_sqrt(self.tensors))

    def sign(self) -> Many:
        return Many(torch._foreach_sign(self.tensors))


def where(condition: Tensor, a: Many, b: Many) -> Many:
    return Many([torch.where(condition, x, y) for x, y in zip(a.tensors, b.tensors, strict=True)])


def lerp(a: Many, b: Many, weight: Tensor, rest: Tensor) -> Many:
    """a + weight * (b - a) from the end that is nearer."""
    way = b - a
    return where(weight < 0.5, a + way * weight, b - way * rest)


def add_weighted(total: Many, weight: Tensor, x: Many) -> Many:
    """One term of a weighted sum, left out at weight 0, where 0 times NaN or infinity would be
    NaN: a decay or a momentum that is off, a replica that is not in the mean."""
    return where(weight == 0, total, total + x * weight)


class Row(NamedTuple):
    """HyperRow of csrc/core/hyper.h for some tensors of a group: a number of the group, or a Many
    of numbers, one for each tensor."""

    gradient_scale: Tensor
    beta1: Tensor
    lerp1: Tensor
    share1: Many  # what SGD's buffer takes of a gradient: HyperRow::lerp1 there
    beta2: Tensor
    lerp2: Tensor
    inv_sqrt_correction2: Many
    eps: Tensor
    coupled_decay: Tensor
    nesterov: Tensor
    step: Tensor  # [tensor]
    step_size: list[Many]  # [replica]
    decay: Tensor  # [replica], wide


def _adamw(row: Row, g: Many, m: Many, v: Many) -> tuple[Many, Many, Many]:
    m = lerp(m, g, row.lerp1, row.beta1)
    v = v * row.beta2 + g * row.lerp2 * g
    return m / (v.sqrt() * row.inv_sqrt_correction2 + row.eps), m, v


def _sgd(row: Row, g: Many, m: Many, v: Many) -> tuple[Many, Many, Many]:
    m = add_weighted(g * row.share1, row.beta1, m)
    return where(row.nesterov != 0, g + m * row.beta1, m), m, v


def _lion(row: Row, g: Many, m: Many, v: Many) -> tuple[Many, Many, Many]:
    return lerp(m, g, row.lerp1, row.beta1).sign(), lerp(m, g, row.lerp2, row.beta2), v


def direction(rule: str, row: Row, g: Many, p: Many, m: Many, v: Many) -> tuple[Many, Many, Many]:
    """u, which all replicas share, and the new moments.

    `p` is read where decay is part of the gradient.
    """
    if rule in COUPLED:
        g = add_weighted(g, row.coupled_decay, p)
    return {"adamw": _adamw, "adam": _adamw, "sgd": _sgd, "lion": _lion}[rule](row, g, m, v)


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


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The global norm, wide.

    A tensor's norm and the norm of the norms: no copy in a wider type is made.
    """
    wide = wide_dtype(tensors[0].device)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors), 2, dtype=wide)))


def values_of(params: Sequence[Tensor], masters: Sequence[Tensor | None]) -> Many:
    """What the parameters stand for, in float32: the master where there is one."""
    return Many([value_of(param, master) for param, master in zip(params, masters, strict=True)])


def value_of(param: Tensor, master: Tensor | None) -> Tensor:
    if master is None:
        return param.float()
    return master if master.dtype == torch.float32 else numbers.join(param, master)


def store(value: Tensor, param: Tensor, master: Tensor | None) -> None:
    if master is not None and master.dtype == torch.int16:
        upper, lower = numbers.split(value.float())
        param.copy_(upper)
        master.copy_(lower)
        return
    param.copy_(value)
    if master is not None:
        master.copy_(value)
