"""Mistakes of a loop: those that give no error are warned of once, with what to change."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable
from typing import NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from ..core.engine import Engine
from ..knobs.cells import close
from ..optim.snapshot import keeps_weights
from ..schedule import Schedule
from ..simulation import has_begun, last_rates

__all__ = [
    "find_lost_state",
    "refuse_backward",
    "refuse_eval_mode",
    "refuse_join",
    "warn_of_idle_run",
    "warn_of_no_controller",
]


def warn_of_idle_run(optimizer: Optimizer, schedule: Schedule, total_steps: int | None) -> None:
    """Warns of a run in which nothing is trained, or which is not as long as its schedule."""
    scheduler, params = schedule.scheduler, [p for g in optimizer.param_groups for p in g["params"]]
    rates = [
        peak
        for knob, row in zip(schedule.knobs, schedule.peaks(), strict=True)
        for peak in row
        if knob.key == "lr"
    ]
    if not any(p.requires_grad or keeps_weights(optimizer) for p in params):
        _warn("each parameter of the optimizer is frozen (requires_grad=False): nothing is trained")
    if scheduler is not None and rates and not any(rates):
        _warn("the learning rate is 0, and its schedule multiplies it: nothing is trained")
    if total_steps is None:
        return
    if isinstance(scheduler, CosineAnnealingLR) and scheduler.T_max != total_steps:
        then = "rises again" if scheduler.T_max < total_steps else "has not fallen to its end"
        _warn(
            f"total_steps is {total_steps}, but T_max of the CosineAnnealingLR is "
            f"{scheduler.T_max}: after step {min(total_steps, scheduler.T_max)} the rate {then}. "
            "Both count optimizer steps, not epochs"
        )
    elif isinstance(scheduler, OneCycleLR) and scheduler.total_steps != total_steps:
        _warn(
            f"total_steps is {total_steps}, but that of the OneCycleLR is {scheduler.total_steps}: "
            "leave it out"
        )


def find_lost_state(optimizer: Optimizer, scheduler: object, searches: bool) -> str:
    """Says that the states of optimizer, scheduler and Ensemble were not all loaded; "" where they
    seem to be. ``searches``: is the rate going to be searched, for which the run has to be new?"""
    groups = optimizer.param_groups
    rates = [group["lr"] for group in groups]
    for rate, own in zip(rates, last_rates(scheduler), strict=False):
        if not close(rate, own):
            return (
                f"the optimizer's learning rate was {float(rate):g}, its scheduler's "
                f"{float(own):g}. On resuming load the states of both, and ensemble.state_dict(), "
                "without which a correction is lost (docs/checkpoints.md). Of a new run, make the "
                "scheduler after the rate was written; find_rate(...).apply writes to both"
            )
    is_new = scheduler is not None and not has_begun(scheduler)
    if scheduler is None:  # there was one
        is_new = any(
            not close(group.get("initial_lr", group["lr"]), group["lr"]) for group in groups
        )
    steps = (state.get("step", 0) for state in optimizer.state.values() if is_new and searches)
    if any(map(_some, steps)):
        return (
            "the optimizer has made steps, and no scheduler has, so no rate is searched. On "
            "resuming load the state of the scheduler, and ensemble.state_dict()"
        )
    return ""


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


def refuse_join(parameters: Iterable[torch.Tensor]) -> None:
    """Of a DDP that holds these: a rank that has run out of batches goes on with DDP's collectives,
    and comes to none of hdet's. Only the loop knows the model, so all objects are looked at."""
    own = {id(p) for p in parameters}
    for model in [x for x in gc.get_objects() if issubclass(type(x), DistributedDataParallel)]:
        if model._join_config.enable and not own.isdisjoint(map(id, model.parameters())):
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


def _some(steps: object) -> bool:
    return isinstance(steps, (int, float, torch.Tensor)) and bool(steps > 0)


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=5)


def warn_of_no_controller(engine: Engine, saved: str) -> None:
    """A state of a run with the controller ``saved`` was loaded into one without any."""
    names = [knob.name for knob in engine.knobs]
    kept = ", ".join(f"{n} {c:.4g}" for n, c in zip(names, engine.corrections, strict=True))
    spread = ", and replicas stay spread: knobs=[hdet.LearningRate(0)] ends that"
    warnings.warn(
        f"the ensemble's state was saved with controller {saved!r}, and this run has none: the "
        f"corrections {kept} stay as they are, and no other values are tried"
        f"{spread if engine.explores else ''}",
        stacklevel=5,  # past a context manager,
    )
