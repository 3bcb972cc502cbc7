"""What a user's scheduler is going to do, told by a copy of it that runs ahead."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

__all__ = ["trajectory"]

POINTS = 1000
"""in which a function of the step alone is looked at, beside the first hundred steps"""


def trajectory(scheduler: Any, total_steps: int | None) -> list[list[float]] | None:
    """[parameter group]: the rates that torch's ``scheduler`` will set, from now to the end of the run, at even places of it.

    None where that cannot be told: no scheduler or none of torch's, one that reacts to the run (ReduceLROnPlateau), or no length. The
    scheduler and its optimizer are left alone.
    """
    scheduler = scheduler.plain() if hasattr(scheduler, "plain") else scheduler
    if not isinstance(scheduler, LRScheduler) or total_steps is None:
        return None
    if type(scheduler) is LambdaLR:  # of a long run not every step has to be asked for
        steps = sorted({round(i * (total_steps - 1) / POINTS) for i in range(POINTS + 1)})
        return [
            [float(base) * float(factor(step)) for step in steps]
            for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
    try:
        return _run_ahead(scheduler, total_steps - scheduler.last_epoch)
    except (TypeError, ValueError, AttributeError, RuntimeError, NotImplementedError):
        return None


def _run_ahead(scheduler: Any, steps: int) -> list[list[float]]:
    """One call of ``step`` for each; about a second for 100 000."""
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
