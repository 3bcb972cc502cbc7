"""Mistakes of a loop: those that give no error are warned of once, with what to change."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..core.engine import Engine
from ..core.validate import warn
from ..knobs.cells import close
from ..simulation import has_begun

__all__ = [
    "ddp_models",
    "find_lost_state",
    "refuse_backward",
    "refuse_eval_mode",
    "refuse_join",
    "warn_of_less_control",
    "warn_of_lost_state",
    "warn_of_unknown_period",
]


def find_lost_state(optimizer: Optimizer, scheduler: object, searches: bool) -> str:
    """Which states do not belong together; "" where they seem to. ``searches``: is the rate going
    to be searched, for which the run has to be new?"""
    groups = optimizer.param_groups
    for group, own in zip(groups, _last_rates(scheduler), strict=False):
        if not close(rate := group["lr"], own):
            return (
                f"the optimizer's learning rate was {float(rate):g}, its scheduler's {float(own):g}"
            )
    states = optimizer.state.values() if searches and not has_begun(scheduler) else ()
    is_resumed = any(_is_positive(state.get("step")) for state in states)
    return "the optimizer has made steps, and no scheduler has" if is_resumed else ""


def _last_rates(scheduler: Any) -> list[Any]:
    """By group; none of one that does not keep them, such as one with a step() of its own."""
    try:
        return list(scheduler.get_last_lr())
    except AttributeError:
        return []


def warn_of_lost_state(which: str) -> None:
    """``which``: of `find_lost_state`."""
    warn(
        f"{which}. On resuming load the states of both, and ensemble.state_dict(), without which "
        "a correction is lost (docs/checkpoints.md). In a new run make the scheduler after the "
        "rate was written; find_rate(...).apply writes to both"
    )


def refuse_backward(loss: object) -> None:
    """Of a loss whose graph holds weights in whose place a trial trains its arms now."""
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        loss.register_hook(_refuse_backward)


def refuse_eval_mode(optimizer: Optimizer) -> None:
    """Of a schedule-free optimizer, whose parameters are the average then."""
    if not all(group["train_mode"] for group in optimizer.param_groups):
        raise RuntimeError(
            "ensemble.step() was called while the optimizer is in eval mode: call its eval() after "
            "ensemble.step(), and its train() before the next optimizer.step()"
        )


def ddp_models(parameters: Iterable[torch.Tensor]) -> list[DistributedDataParallel]:
    """Those that hold some of these. Only the loop knows them, so all objects are looked at."""
    own = {id(p) for p in parameters}
    # a lookup for each: there may be a million objects
    kinds = set(map(id, _with_subclasses(DistributedDataParallel)))
    found: list[Any] = [x for x in gc.get_objects() if id(type(x)) in kinds]
    return [model for model in found if not own.isdisjoint(map(id, model.parameters()))]


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    return itertools.chain([kind], *map(_with_subclasses, kind.__subclasses__()))


def refuse_join(parameters: Iterable[torch.Tensor]) -> None:
    """Of a DDP that holds these: a rank that has run out of batches goes on with DDP's collectives,
    and comes to none of hdet's."""
    for model in ddp_models(parameters):
        if model._join_config.enable:
            raise ValueError(
                "DistributedDataParallel.join() is for ranks with different numbers of batches, "
                "and an Ensemble needs the same number of steps on each: leave join() out, and end "
                "each epoch after the smallest number (drop_last, itertools.islice)"
            )


def _refuse_backward(_: torch.Tensor) -> NoReturn:
    raise RuntimeError(
        "loss.backward() came after ensemble.step(loss, closure=...), whose trial has trained "
        "copies in the place of the weights: move ensemble.step() behind optimizer.step()"
    )


def _is_positive(steps: object) -> bool:
    return isinstance(steps, (int, float, torch.Tensor)) and bool(steps > 0)


def warn_of_less_control(engine: Engine, state: Mapping[str, Any]) -> None:
    """A state was loaded into a run without the search or the controller of the saved one."""
    lacks = [] if engine.searches or state["search"] is None else ["an AutoLR"]
    if engine.controller is None and state["controller"] is not None:
        lacks.append(f"controller {state['controller']!r}")
    if not lacks:
        return
    kept = ", ".join(f"{value.name} {value.correction:.4g}" for value in engine.values)
    spread = ", and replicas stay spread: knobs=[hdet.LearningRate(0)] ends that"
    warn(
        f"the ensemble's state was saved with {' and '.join(lacks)}, and this run has none: the "
        f"corrections {kept} stay as they are, and no other values are tried"
        f"{spread if engine.explores else ''}"
    )


def warn_of_unknown_period(engine: Engine) -> None:
    """Of one that is to grow, in a run whose schedule is not known."""
    period = engine.clock.period
    if period is not None and engine.coming_rate(engine.step) is None:
        warn(
            f"every is {period!r}, but no schedule of the rate is known, so T stays at "
            f"{period.least}: give the scheduler to the Ensemble"
        )
