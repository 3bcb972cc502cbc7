"""What an update rule computes, as a tree of operations, found by calling the rule's function once.

*Scalars* (hyperparameters and what follows from them) are computed once for a tensor and a step, in
double, and rounded to float32 where *tensors* (gradient, parameter, moments) meet them. Tensors are
float32, and every operation on them rounds once. So all backends get the same bits:
kernels/reference/arithmetic.py evaluates the tree, csrc/generate.py prints it in C++ and in Triton.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, overload


@dataclass(frozen=True)
class Scalar:
    """A number of a step, in double. `args`: scalars; of "number" its value, of "setting" its
    name, of "sum" a tensor."""

    op: str
    args: tuple[Scalar | Tensor | float | str, ...] = ()

    def __add__(self, other: Scalar | float) -> Scalar:
        return _scalar("add", self, other)

    def __sub__(self, other: Scalar | float) -> Scalar:
        return _scalar("sub", self, other)

    def __rsub__(self, other: float) -> Scalar:
        return _scalar("sub", other, self)

    @overload
    def __mul__(self, other: Scalar) -> Scalar: ...

    @overload
    def __mul__(self, other: Tensor) -> Tensor: ...

    def __mul__(self, other: Scalar | Tensor) -> Scalar | Tensor:
        return other * self if isinstance(other, Tensor) else _scalar("mul", self, other)

    def __truediv__(self, other: Scalar | float) -> Scalar:
        return _scalar("div", self, other)

    def __rtruediv__(self, other: float) -> Scalar:
        return _scalar("div", other, self)

    def __pow__(self, other: Scalar) -> Scalar:
        """To the number of the step, by multiplications alone."""
        assert other.op == "step"
        return Scalar("power", (self,))

    def __le__(self, other: Scalar | float) -> Scalar:
        return _scalar("le", self, other)


@dataclass(frozen=True)
class Tensor:
    """Float32 elements. `args`: tensors and scalars; of "input" its name."""

    op: str
    args: tuple[Tensor | Scalar | str, ...] = ()

    def __neg__(self) -> Tensor:
        return self * _number(-1)

    def __add__(self, other: Tensor | Scalar) -> Tensor:
        return Tensor("add", (self, other))

    def __sub__(self, other: Tensor) -> Tensor:
        return Tensor("sub", (self, other))

    def __mul__(self, other: Tensor | Scalar) -> Tensor:
        return Tensor("mul", (self, other))

    def __truediv__(self, other: Tensor | Scalar) -> Tensor:
        return Tensor("div", (self, other))


def _scalar(op: str, *args: Scalar | float) -> Scalar:
    return Scalar(op, tuple(map(_number, args)))


def _number(x: Scalar | float) -> Scalar:
    return x if isinstance(x, Scalar) else Scalar("number", (float(x),))


class Settings:
    """`h` of a rule: `h.beta1` is that field of StepSettings, and `h.step` counts from 1."""

    step = Scalar("step")
    rate = Scalar("rate")
    """of replica 0, lr * multiplier"""

    def __getattr__(self, name: str) -> Scalar:
        return Scalar("setting", (name,))


# What rules are written with, beside + - * /. The order of operands does not matter to the bits.


def sqrt(x: Scalar) -> Scalar:
    return Scalar("sqrt", (x,))


def exp(x: Scalar) -> Scalar:
    """Of a number that is not positive, by operations alone that round once."""
    return Scalar("exp", (x,))


def log(x: Scalar) -> Scalar:
    """The same of a number from 0 to 1; of 0 a number near -18."""
    return Scalar("log", (x,))


def root(x: Tensor) -> Tensor:
    """The square root of each element, rounded to nearest."""
    return Tensor("sqrt", (x,))


def average(old: Tensor, new: Tensor, beta: Scalar) -> Tensor:
    """beta * old + (1 - beta) * new, from the end that is nearer, as torch.lerp: exact at beta 0
    and at beta 1."""
    return Tensor("lerp", (old, new, 1 - beta, beta))


def add_weighted(total: Tensor, weight: Scalar, x: Tensor) -> Tensor:
    """total + weight * x; total at weight 0, where 0 times NaN or infinity would be NaN: a decay or
    a momentum that is off."""
    return Tensor("add_weighted", (total, weight, x))


def sign(x: Tensor) -> Tensor:
    """-1, 0 or 1; 0 for NaN."""
    return Tensor("sign", (x,))


def clip(x: Tensor, low: Scalar | float, high: Scalar | float = math.inf) -> Tensor:
    """Each element within these limits; NaN stays NaN."""
    return Tensor("clip", (x, _number(low), _number(high)))


def sum_of(x: Tensor) -> Scalar:
    """Of all elements of a tensor, in double, found by a pass before the step. It may not depend on
    another sum."""
    return Scalar("sum", (x,))


def mean_of(x: Tensor) -> Scalar:
    """The same, divided by their number."""
    return sum_of(x) / Scalar("elements")


def choose(condition: Scalar, a: Tensor, b: Tensor) -> Tensor:
    """a if the condition is not 0, else b. Of inputs, not of long results: of those a CPU's
    compiler would make a branch, and no vectors."""
    return Tensor("where", (condition, a, b))


def where(condition: Scalar, a: Scalar | float, b: Scalar | float) -> Scalar:
    """The same of scalars."""
    return _scalar("where", condition, a, b)


Function = Callable[..., tuple[Tensor, ...]]
"""(h, g, p, *moments) -> (u, *moments): settings, gradient, parameter and moments; the direction,
which a step goes against, or the new parameter; and the new moments"""
MAX_MOMENTS = 12
"""of which csrc/core/numbers.h says how they are stored, in what a word of 64 bits has left"""


class Trace(NamedTuple):
    """A rule's function, called once."""

    inputs: tuple[str, ...]
    """what the function calls the gradient, the parameter and the moments"""
    direction: Tensor
    moments: tuple[Tensor, ...]
    divisor: Scalar
    """what the direction is divided by at its end: done in the rate, in double"""
    scalars: tuple[Scalar, ...]
    """those that meet a tensor"""
    sums: tuple[Tensor, ...]
    """what is summed over the whole tensor before a step, which scalars depend on"""
    couples: bool
    """the parameter is part of the direction or of the moments"""

    @property
    def counts(self) -> bool:
        """Steps are counted: the rule is another one in its first."""
        return any(_has(scalar, "step", "power") for scalar in (self.divisor, *self.scalars))


def _has(scalar: Scalar, *ops: str) -> bool:
    return any(part.op in ops for part in parts(scalar))


def trace(function: Function, num_moments: int) -> Trace:
    names = tuple(inspect.signature(function).parameters)[1:]
    assert len(names) == 2 + num_moments and num_moments <= MAX_MOMENTS, function.__name__
    inputs = [Tensor("input", (name,)) for name in names]
    u, *moments = function(Settings(), *inputs)
    divisor = Scalar("number", (1.0,))
    if u.op == "div":
        divided, by = u.args
        if isinstance(divided, Tensor) and isinstance(by, Scalar) and not _has(by, "sum"):
            u, divisor = divided, by
    met = _scalars_of(u, *moments)
    sums = tuple(dict.fromkeys(_summed(met)))
    for scalar in (before := _scalars_of(*sums)):
        if _has(scalar, "sum"):
            raise ValueError(
                f"a sum of {function.__name__} depends on another one: there is one "
                "pass before a step"
            )
    scalars = tuple(dict.fromkeys((*met, *before)))
    nodes = {node for tree in (u, *moments, *sums) for node in walk(tree)}
    return Trace(names, u, tuple(moments), divisor, scalars, sums, inputs[1] in nodes)


def _scalars_of(*trees: Tensor) -> list[Scalar]:
    """That meet these, in turn."""
    return [node for tree in trees for node in walk(tree) if isinstance(node, Scalar)]


def _summed(scalars: list[Scalar]) -> Iterator[Tensor]:
    for part in (part for scalar in scalars for part in parts(scalar)):
        if part.op == "sum" and isinstance(part.args[0], Tensor):
            yield part.args[0]


def parts(scalar: Scalar) -> list[Scalar]:
    """All scalars of a tree, arguments first."""
    own = [part for arg in scalar.args if isinstance(arg, Scalar) for part in parts(arg)]
    return [*own, scalar]


def walk(node: Tensor) -> Iterator[Tensor | Scalar]:
    """All tensors of a tree, arguments first, and the scalars that they meet."""
    for arg in node.args:
        if isinstance(arg, Tensor):
            yield from walk(arg)
        elif isinstance(arg, Scalar):
            yield arg
    yield node
