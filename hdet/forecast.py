"""What a user's scheduler is going to do: told by its functions, or by a copy of it that runs ahead. The scheduler is left alone."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import torch
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    StepLR,
)

__all__ = ["highest_factors", "means"]

POINTS = 1000
"""in which a function of the step alone is looked at"""
CLOSED = (CosineAnnealingLR, StepLR, MultiStepLR, ConstantLR, LinearLR, ExponentialLR, PolynomialLR)
"""those of torch's that have a closed form; OneCycleLR asked for its rate has one, too"""


def highest_factors(scheduler: Any, total_steps: int | None) -> list[float] | None:
    """LambdaLR alone multiplies a group's rate by what can lie far from 1 at all times (Noam's): its factors' highest values, by group.

    Looked at in a thousand places of the run and in its first hundred steps; None for other schedulers, whose peak the group has, and
    where the length is not known.
    """
    if type(scheduler) is not LambdaLR or total_steps is None:
        return None
    steps = sorted({*_places(0, total_steps), *range(min(total_steps, 100)), total_steps})
    highest = [max(float(factor(step)) for step in steps) for factor in scheduler.lr_lambdas]
    return [factor if factor > 0 else 1.0 for factor in highest]


def means(scheduler: Any, total_steps: int | None) -> list[float] | None:
    """[parameter group]: the mean of the rates that torch's ``scheduler`` sets, from now on to the end of the run (of a LambdaLR, from its
    beginning).

    None where that cannot be told: no scheduler, none of torch's (ReduceLROnPlateau is one of those), one whose ``step`` is somebody's own,
    one that cannot be copied or run ahead, or no length.
    """
    scheduler = scheduler.torch_alone() if hasattr(scheduler, "torch_alone") else scheduler
    if not isinstance(scheduler, LRScheduler) or total_steps is None or type(scheduler).step.__module__ != LRScheduler.__module__:
        return None
    if type(scheduler) is LambdaLR:
        places = _places(0, total_steps)
        lambdas = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        return [float(base) * math.fsum(float(factor(step)) for step in places) / len(places) for base, factor in lambdas]
    try:
        with torch.random.fork_rng(devices=[]):
            return _run_ahead(scheduler, _done(scheduler), total_steps)
    # Of somebody's own class, which may hold what cannot be copied: if something is wrong with it, it will say so itself.
    except (ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError):
        return None


def _places(first: int, end: int) -> list[int]:
    """Steps from ``first`` to below ``end``, as many as are worth asking for."""
    return sorted({first + round(i * (end - 1 - first) / POINTS) for i in range(POINTS + 1)})


def _done(scheduler: Any) -> int:
    """Steps; a ChainedScheduler has none of its own."""
    return scheduler.last_epoch if hasattr(scheduler, "last_epoch") else max(map(_done, scheduler._schedulers))


def _run_ahead(scheduler: Any, first: int, end: int) -> list[float]:
    """A closed form is asked in a thousand places, all else step by step: 10 to 25 seconds for a million."""
    # One tensor a group, which needs no names; and no copies of a model that a scheduler may hold.
    groups = [
        {"params": [torch.zeros(1)], **{key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}}
        for group in scheduler.optimizer.param_groups
    ]
    shared = {id(value): value for value in vars(scheduler).values() if isinstance(value, torch.nn.Module)}
    ahead = copy.deepcopy(scheduler, {id(scheduler.optimizer): torch.optim.SGD(groups, lr=0.0), **shared})
    ask = ahead.get_lr if type(ahead) is OneCycleLR else ahead._get_closed_form_lr if type(ahead) in CLOSED else None
    places = range(first, end) if ask is None else _places(first, end)
    sums = [0.0] * len(groups)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer steps
        for step in places:
            if ask is not None:
                ahead.last_epoch = step
            elif step > first:
                ahead.step()
            rates = [group["lr"] for group in ahead.optimizer.param_groups] if ask is None else ask()
            sums = [total + float(rate) for total, rate in zip(sums, rates, strict=True)]
    return [total / len(places) for total in sums]
