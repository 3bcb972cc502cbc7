"""What a user's scheduler is going to do: told by its functions, or by a copy of it that runs ahead. The scheduler is left alone."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

__all__ = ["highest_factors", "trajectory"]

POINTS = 1000
"""in which a function of the step alone is looked at"""


def highest_factors(scheduler: Any, total_steps: int | None) -> list[float] | None:
    """LambdaLR alone multiplies a group's rate by what can lie far from 1 at all times (Noam's): its factors' highest values, by group.

    Looked at in a thousand places of the run and in its first hundred steps; None for other schedulers, whose peak the group has, and
    where the length is not known.
    """
    if type(scheduler) is not LambdaLR or total_steps is None:
        return None
    steps = sorted({*_places(total_steps), *range(min(total_steps, 100)), total_steps})
    highest = [max(float(factor(step)) for step in steps) for factor in scheduler.lr_lambdas]
    return [factor if factor > 0 else 1.0 for factor in highest]


def trajectory(scheduler: Any, total_steps: int | None) -> list[list[float]] | None:
    """[parameter group]: the rates that torch's ``scheduler`` sets from now on to the end of the run, at even places (of a LambdaLR, from
    its beginning).

    None where that cannot be told: no scheduler, none of torch's (ReduceLROnPlateau is one of those), one that cannot be copied or run ahead,
    or no length.
    """
    scheduler = scheduler.torch_alone() if hasattr(scheduler, "torch_alone") else scheduler
    if not isinstance(scheduler, LRScheduler) or total_steps is None:
        return None
    if type(scheduler) is LambdaLR:  # of a long run not every step has to be asked for
        lambdas = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        return [[float(base) * float(factor(step)) for step in _places(total_steps)] for base, factor in lambdas]
    try:
        return _run_ahead(scheduler, total_steps - scheduler.last_epoch)
    # Of somebody's own class, which may hold what cannot be copied: if something is wrong with it, it will say so itself.
    except (ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError):
        return None


def _places(total_steps: int) -> list[int]:
    return sorted({round(i * (total_steps - 1) / POINTS) for i in range(POINTS + 1)})


def _run_ahead(scheduler: Any, steps: int) -> list[list[float]]:
    """One call of ``step`` for each; about a second for 100 000."""
    # One tensor a group, which needs no names.
    groups = [
        {"params": [torch.zeros(1)], **{key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}}
        for group in scheduler.optimizer.param_groups
    ]
    ahead = copy.deepcopy(scheduler, {id(scheduler.optimizer): torch.optim.SGD(groups, lr=0.0)})
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer steps
        for step in range(steps):
            rows.append([float(group["lr"]) for group in ahead.optimizer.param_groups])
            if step < steps - 1:
                ahead.step()
    return [list(column) for column in zip(*rows, strict=True)]
