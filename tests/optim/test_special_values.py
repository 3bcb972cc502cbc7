"""All fused optimizers beside torch's where numbers end: zeros, infinities, NaN, the largest float
and the smallest.

One parameter holds every combination of SPECIAL for itself and for the gradients of two steps, or
for its state and one gradient. What is infinite or NaN has to be so in both, with its sign; what is
finite has to agree. torch's loops run one operation after the other in float32, as the kernels do.
"""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from hdet.rules import RULES as ALL_RULES

from .common import BACKENDS, RULES, TORCH_RULES, Rule, known

LARGEST, NORMAL, SMALLEST = 3.4028234663852886e38, 2.0**-126, 2.0**-149
FINITE = [0.0, -0.0, 1.0, -0.3, LARGEST, -LARGEST, 1e20, -1e20, 1e-25, NORMAL, -SMALLEST]
SPECIAL = [*FINITE, math.inf, -math.inf, math.nan]
MOMENTS = [0.0, 1.0, 1e20, LARGEST, math.inf, math.nan]
"""of a state that is loaded; first moments also with the other sign"""
STEPS = 4


OPTIONS: list[dict[str, Any]] = [
    {"weight_decay": 0.0},
    {"weight_decay": 0.1},
    {"weight_decay": 0.0, "betas": (0.4, 0.6)},
    {"betas": (0.0, 0.0)},
    {"maximize": True},
    {"maximize": True, "weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"momentum": 0.9, "dampening": 0.5},
    {"momentum": 0.9, "dampening": 1.0},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "nesterov": True, "maximize": True, "weight_decay": 0.1},
]
CASES = [
    pytest.param(rule, options, id=f"{rule.name} {options}")
    for rule in RULES
    for options in OPTIONS
    if known(ALL_RULES[rule.fused.rule], options) == options
    and ("momentum" in options) == (rule.moments == ("momentum_buffer",))
]


def peer_of(rule: Rule, param: Parameter, options: dict[str, Any]) -> Optimizer:
    loops = {"foreach": False, "fused": False} if rule in TORCH_RULES else {}
    return rule.peer([param], **{"lr": 1e-2, **loops, **options})


def grid() -> tuple[Tensor, list[Tensor]]:
    """Every (parameter, first gradient, second gradient)."""
    param, *gradients = torch.tensor(list(itertools.product(SPECIAL, repeat=3))).T.contiguous()
    return param, gradients


def assert_alike(rule: Rule, ours: Tensor, theirs: Tensor, what: str, begin: list[Tensor]) -> None:
    """NaN with NaN, infinities by sign, finite numbers up to rounding: SGD, a slow average and
    Adan, whose difference may be to a loaded gradient, are linear in what they began with, Adam's
    and Lion's steps have the size of the rate. `begin`: what each element began with."""
    ours, theirs = ours.detach(), theirs.detach()
    slack = torch.full_like(ours, 1e-20)
    linear = 1e-6 if "sgd" in rule.name or rule.name == "adan" else 1e-10 if "slow" in what else 0.0
    slack += linear * torch.stack(begin).abs().nan_to_num(nan=0, posinf=0).amax(0)
    near = (ours - theirs).abs() <= 1e-5 * theirs.abs() + slack
    right = (
        (ours == theirs)
        | (ours.isnan() & theirs.isnan())
        | (ours.isfinite() & theirs.isfinite() & near)
    )
    if not right.all():
        i = int((~right).nonzero()[0])
        raise AssertionError(
            f"{what}: {int((~right).sum())} of {len(right)} differ from torch's, the first began "
            f"with {[float(x[i]) for x in begin]}: {float(ours[i])} instead of {float(theirs[i])}"
        )


def compare(
    rule: Rule,
    options: dict[str, Any],
    backend: str,
    start: Tensor,
    gradients: list[Tensor],
    state: dict[str, Tensor],
) -> None:
    """Steps both. `state`: the moments to begin with, in the sixth step; none: in the first."""
    one, other = Parameter(start.clone()), Parameter(start.clone())
    a = rule.fused([one], backend=backend, **{"lr": 1e-2, **options})
    b = peer_of(rule, other, options)
    if state:
        b.state[other] = {
            "step": torch.tensor(5.0),
            **{name: moment.clone() for name, moment in state.items()},
        }
        a.load_state_dict(copy.deepcopy({**a.state_dict(), "state": b.state_dict()["state"]}))
    begin = [start, *state.values(), *gradients]
    for step in range(STEPS):
        gradient = gradients[step % len(gradients)]
        one.grad, other.grad = gradient.clone(), gradient.clone()
        a.step()
        b.step()
        assert_alike(rule, one, other, f"parameter after step {step}", begin)
        for name in rule.moments:
            assert_alike(
                rule, a.state[one][name], b.state[other][name], f"{name} after step {step}", begin
            )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rule", "options"), CASES)
def test_every_combination(rule: Rule, options: dict[str, Any], backend: str) -> None:
    compare(rule, options, backend, *grid(), {})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rule", "options"), [case for case in CASES if case.values[0].moments])
def test_every_state(rule: Rule, options: dict[str, Any], backend: str) -> None:
    """Moments that have overflown, or were loaded so.

    Left out are those that no gradients make: a first moment beside a second that is less than its
    square by 30 orders. Their quotient overflows before the rate makes it smaller, and torch
    multiplies by the rate first.
    """
    firsts = [*MOMENTS, *(-x for x in MOMENTS)]
    columns = [SPECIAL, firsts, *([MOMENTS] * (len(rule.moments) - 1)), SPECIAL]
    rows = [
        row
        for row in itertools.product(*columns)
        if len(row) == 3 or not (abs(row[1]) == LARGEST and row[2] < LARGEST)
    ]
    start, *moments, gradient = torch.tensor(rows).T.contiguous()
    compare(
        rule, options, backend, start, [gradient], dict(zip(rule.moments, moments, strict=True))
    )
