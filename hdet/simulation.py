"""What a schedule is going to do: a copy of it runs once, with a stand-in for the optimizer."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR
from torch.utils.data import DataLoader, Dataset

from .core.validate import warn
from .knobs.cells import put
from .tensors.eval_mode import random_states_kept

__all__ = ["Course", "apply_factor", "has_begun", "simulate", "simulate_rates"]

UNKNOWN = 10_000
"""Steps that are simulated where the length of the run is not known."""
ROUNDING = 1e-6
"""Values that differ by this part of them are one peak, with other roundings."""
COMPARED = 1000
"""First steps whose values are kept, to be compared with those of the run."""
_NOT_COPIED = (type, torch.Tensor, nn.Module, Optimizer, Dataset, DataLoader)
_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
_RATES_OF_SCHEDULERS = ("base_lrs", "max_lrs", "min_lrs", "_last_lr", "eta_min")


@dataclass(frozen=True)
class Course:
    """The values of a schedule; each list has one for each place."""

    highest: list[float]
    lowest: list[float]
    peak_steps: list[int]
    """Steps done when each is at its highest value first."""
    rows: dict[int, list[float]]
    """By ``last_epoch`` of the first scheduler, of the first steps."""


def simulate(
    schedulers: Sequence[tuple[Any, int]],
    optimizer: Optimizer,
    length: int | None,
    places: Sequence[tuple[int, str, int | None]],
    factor: float = 1.0,
) -> Course:
    """Run copies of the schedulers over the whole run, its past included. Optimizer, schedulers and
    random states stay as they are. One that reads a metric only lowers rates: it is left out.

    Args:
        schedulers: each with the number of optimizer steps from one of its steps to the next.
        length: of the run, in optimizer steps.
        places: (parameter group, key, entry of a tuple there or None).
        factor: of all rates.

    Raises:
        ValueError: one that cannot be copied, or whose copy cannot be stepped.
    """
    moving = [(one, n) for one, n in schedulers if not isinstance(one, ReduceLROnPlateau)]
    before = [dict(group) for group in optimizer.param_groups]
    with warnings.catch_warnings(), random_states_kept(nn.Identity()):
        warnings.simplefilter("ignore")
        try:
            copies, groups = _copy([one for one, _ in moving], optimizer)
            if factor != 1:
                _scale(groups, copies, factor)
            _rewind(copies, groups)
            return _run(copies, [n for _, n in moving], groups, length or UNKNOWN, places)
        except Exception as error:
            names = ", ".join(type(one).__name__ for one, _ in moving)
            raise ValueError(
                f"the peak of {names} is not known, because a copy of it cannot be stepped "
                f"({type(error).__name__}: {error}): leave it out, step it inside `with "
                "ensemble.rescheduling():`, and set group['max_lr'] to its peak in each group"
            ) from error
        finally:  # a function of the user's may hold the optimizer
            for group, own in zip(optimizer.param_groups, before, strict=True):
                group.update(own)


def has_begun(scheduler: Any) -> bool:
    """Was a step made, by it or by one inside of it?"""
    return any(getattr(one, "last_epoch", 0) > 0 for one in _parts([scheduler]))


def apply_factor(optimizer: Optimizer, scheduler: Any, factor: float, length: int) -> None:
    """Multiply all rates, now and in the whole schedule. See `RateInterval.apply`."""
    courses = (simulate_rates(optimizer, scheduler, length, by) for by in (1.0, factor))
    before, after = (list(chain(one.highest, *one.rows.values())) for one in courses)
    if not all(map(partial(math.isclose, rel_tol=1e-4), [factor * x for x in before], after)):
        raise ValueError(
            f"{type(scheduler).__name__} keeps its rates in a place of its own: call "
            "apply(optimizer), and make it afterwards"
        )
    _scale(optimizer.param_groups, [scheduler], factor)


def simulate_rates(
    optimizer: Optimizer, scheduler: Any, length: int, factor: float = 1.0
) -> Course:
    """Of all groups. Warns where no scheduler is given, and torch has made one."""
    if scheduler is None and hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        warn(
            "a scheduler was made for this optimizer: pass it too, find_rate(..., scheduler=...) "
            "and apply(optimizer, scheduler), or its rates stay as they are"
        )
    given = [] if scheduler is None else [(scheduler, 1)]
    places = [(number, "lr", None) for number in range(len(optimizer.param_groups))]
    return simulate(given, optimizer, length, places, factor)


def _scale(groups: Sequence[dict[str, Any]], schedulers: Sequence[Any], factor: float) -> None:
    """Multiply what torch's schedulers compute rates from, in the groups and in themselves."""
    tensors = dict[int, Any]()  # groups may share one
    for group in groups:
        for key in _RATES:
            rate = group.get(key)
            if rate is not None and id(rate) not in tensors:
                group[key] = put(rate, rate * factor)
                tensors |= {id(rate): rate} if isinstance(rate, torch.Tensor) else {}
    for one in _parts(schedulers):
        for name in vars(one).keys() & _RATES_OF_SCHEDULERS:
            value = getattr(one, name)
            is_list = isinstance(value, (list, tuple))
            setattr(one, name, [x * factor for x in value] if is_list else value * factor)


def _copy(schedulers: list[Any], optimizer: Optimizer) -> tuple[list[Any], list[dict[str, Any]]]:
    """The copies, and the groups of their optimizer, with numbers for tensors. What is a model's or
    another optimizer's is not copied."""
    stand_in = torch.optim.SGD([torch.zeros(1)], lr=0.0)
    own, stand_in.defaults = optimizer.param_groups, optimizer.defaults
    groups = stand_in.param_groups = [
        {**{key: _number(value) for key, value in group.items()}, "params": [torch.zeros(1)]}
        for group in own
    ]
    memo: dict[int, Any] = {id(optimizer): stand_in, id(own): groups}
    parts = _parts(schedulers)
    memo |= {id(p): p for group in own for p in group["params"]}
    for x in chain(*map(_held, parts)):
        # of a method, also of a partial one: a schedule may ask whoever trains
        owner = getattr(getattr(x, "func", x), "__self__", None)
        is_own = owner is None or isinstance(owner, LRScheduler) or id(owner) in map(id, parts)
        if id(x) not in memo and (not is_own or isinstance(x, _NOT_COPIED)):
            memo[id(x)] = _number(x)
    memo |= zip(map(id, own), groups, strict=True)
    copies = copy.deepcopy(schedulers, memo)
    for one in _parts(copies):  # transformers has one function for all groups
        once = {id(f): lru_cache(1)(f) for f in getattr(one, "lr_lambdas", ()) if f}
        vars(one).update({"lr_lambdas": [once.get(id(f)) for f in one.lr_lambdas]} if once else {})
    return copies, groups


def _number(value: Any) -> Any:
    is_one = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.requires_grad
    return value.item() if is_one else value


def _held(one: Any) -> Iterator[Any]:
    """Its attributes, and what is in lists and dicts of them."""
    for value in list(vars(one).values()):
        inner = value.values() if isinstance(value, dict) else value
        yield from inner if isinstance(value, (dict, list, tuple)) else (value,)


def _parts(schedulers: Iterable[Any], found: dict[int, Any] | None = None) -> list[Any]:
    """With the schedulers inside of them, which come first."""
    found = {} if found is None else found
    for one in schedulers:
        if hasattr(one, "step") and not isinstance(one, _NOT_COPIED) and id(one) not in found:
            found[id(one)] = one
            _parts(_held(one), found)
            found[id(one)] = found.pop(id(one))
    return list(found.values())


def _rewind(schedulers: Sequence[Any], groups: Sequence[dict[str, Any]]) -> None:
    """Torch's schedulers to their first step, as their constructors make it."""
    if not any(map(has_begun, schedulers)):
        return
    for group in groups:
        group["lr"] = group.get("initial_lr", group["lr"])
    for one in _parts(schedulers):
        if isinstance(one, SequentialLR):
            one.__init__(one.optimizer, one._schedulers, one._milestones)  # type: ignore[misc]
        elif isinstance(one, LRScheduler) and "last_epoch" in vars(one):
            one.last_epoch = -1
            one._initial_step()


def _run(
    schedulers: Sequence[Any],
    periods: Sequence[int],
    groups: Sequence[dict[str, Any]],
    length: int,
    places: Sequence[tuple[int, str, int | None]],
) -> Course:
    cells = [(groups[number], key, entry) for number, key, entry in places]
    read = lambda: [float(g[key] if entry is None else g[key][entry]) for g, key, entry in cells]
    highest, lowest, rows = read(), read(), dict[int, list[float]]()
    peak_steps = [0] * len(cells)
    for step in range(length if schedulers else 0):
        for one, period in zip(schedulers, periods, strict=True) if step else ():
            if step % period == 0:
                try:
                    one.step()
                except Exception:
                    if step == period:
                        raise
                    # the schedule is shorter than the run
                    return Course(highest, lowest, peak_steps, rows)
        row = read()
        for i, value in enumerate(row):
            if value > highest[i] + ROUNDING * abs(highest[i]):
                peak_steps[i] = step
        highest, lowest = list(map(max, highest, row)), list(map(min, lowest, row))
        if step < COMPARED:
            rows[getattr(schedulers[0], "last_epoch", -1)] = row
    return Course(highest, lowest, peak_steps, rows)
