"""What a user's scheduler is going to do: told by its functions, or by a copy of it that runs ahead. The scheduler is left alone."""

from __future__ import annotations

import copy
import warnings
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from ..core.schema import Number
from .torch_schedulers import StandIn, twin_on

__all__ = ["RATE", "highest_factors", "rehearse"]

POINTS = 1000
"""in which a function of the step alone is looked at"""
RATE = Number(-1e-9, 1e30)
"""Rounding may leave a little less than 0 at a schedule's end; float32 has no number for what a step makes of much larger ones."""
REHEARSED = 10
"""steps of a schedule that a loaded state is tried for"""
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


def _rates_at(scheduler: Any, step: int) -> list[float]:
    """[group], ``step`` steps after the beginning. ``scheduler``: a twin, which is moved. Raises TypeError for one that knows no step but the next."""
    kind = type(scheduler)
    if kind is SequentialLR:
        part = bisect_right(scheduler._milestones, step)
        return _rates_at(scheduler._schedulers[part], step - [0, *scheduler._milestones][part])
    if kind is ChainedScheduler:  # each multiplies what the others leave
        found, bases = [_rates_at(part, step) for part in scheduler._schedulers], scheduler._schedulers[0].base_lrs
        return [base * prod(rate / base for rate in rates) for base, *rates in zip(bases, *found, strict=True)]
    if kind is CosineAnnealingWarmRestarts:
        scheduler.step(step)
        return [float(group["lr"]) for group in scheduler.optimizer.param_groups]
    scheduler.last_epoch = step
    if kind in (LambdaLR, OneCycleLR):
        return [float(rate) for rate in scheduler.get_lr()]
    if kind in CLOSED:
        return [float(rate) for rate in scheduler._get_closed_form_lr()]
    raise TypeError(f"{kind.__name__} has no closed form")


def rehearse(scheduler: Any, state: Mapping[str, Any], rates: Mapping[int, float], total_steps: int | None) -> None:
    """Loads ``state`` into a copy of torch's ``scheduler``, with ``rates`` in these groups and its own last ones in the others, and goes on from
    there: some steps, and to the end in a thousand places where a schedule can be asked for them. Raises ValueError if the copy raises, or sets
    what is no `RATE`. Nothing is done with one that runs somebody's functions."""
    scheduler = _torch_in(scheduler)
    if not _torchs_own(scheduler):
        return
    try:
        ahead: Any = twin_on(scheduler, StandIn(scheduler.optimizer))
    except Exception:  # noqa: BLE001 - it holds what cannot be copied, and the state is not to blame
        return
    try:
        ahead.load_state_dict(copy.deepcopy(dict(state)))
        groups, done, end = ahead.optimizer.param_groups, _done(ahead), getattr(ahead, "total_steps", total_steps)
        for index, rate in {**dict(enumerate(getattr(ahead, "_last_lr", ()))), **rates}.items():
            groups[index]["lr"] = rate
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no optimizer steps
            # After its last step a linear OneCycleLR is below 0.
            for _ in range(REHEARSED if end is None else min(REHEARSED, end - 1 - done)):
                ahead.step()
                _check([group["lr"] for group in groups])
            asked = type(ahead) in (OneCycleLR, *CLOSED) and type(ahead) is not MultiStepLR  # plain data breaks that one's
            if asked and end is not None and done < end:
                for step in _places(done, end):
                    _check(_rates_at(ahead, step))
    except Exception as error:
        raise ValueError(f"the scheduler's state does not go on ({type(error).__name__}: {error}): it is damaged") from error


def _check(rates: Sequence[Any]) -> None:
    for rate in rates:
        RATE.read(float(rate), "a rate of the schedule", {})


def _torch_in(scheduler: Any) -> Any:
    """Torch's scheduler that hdet's own is."""
    return scheduler.torch_alone() if hasattr(scheduler, "torch_alone") else scheduler


def _torchs_own(scheduler: Any) -> bool:
    if type(scheduler) in (SequentialLR, ChainedScheduler):
        return all(map(_torchs_own, scheduler._schedulers))
    return type(scheduler) in (*CLOSED, OneCycleLR, CosineAnnealingWarmRestarts)


def _places(first: int, end: int, number: int = POINTS) -> list[int]:
    """Steps from ``first`` to below ``end``, as many as are worth asking for."""
    return sorted({first + round(i * (end - 1 - first) / number) for i in range(number + 1)})


def _done(scheduler: Any) -> int:
    """Steps; a ChainedScheduler has none of its own."""
    return scheduler.last_epoch if hasattr(scheduler, "last_epoch") else max(map(_done, scheduler._schedulers))
