"""`find_rate`: the trial of `AutoLR`, before a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from ..core.validate import whole
from ..optim.snapshot import forget_states, optimizers_in, without_hooks
from ..replicas import Replicas
from ..simulation import simulate_rates
from ..tensors.eval_mode import random_states_kept
from .auto import AutoLR
from .budget import SHORTEST
from .rule import SCORES, STEPS, RateInterval
from .searched import Searched

__all__ = ["find_rate"]


def find_rate(
    model: nn.Module,
    optimizer: Optimizer,
    losses_of: Callable[[nn.Module, Any], Any],
    batches: Iterable[Any],
    *,
    total_steps: int,
    scheduler: Any = None,
    before_step: Callable[[], object] | None = None,
    scaler: Any = None,
    replicas: Replicas | None = None,
    place: str = "device",
) -> RateInterval:
    """Which peak learning rates are good for a run of ``total_steps``.

    What a learning-rate finder is for, but with copies that train for 28 steps each, with rates
    that fall to zero, and for a run of this length (`hdet.trial.rule`). Model, optimizer and random
    states are bitwise as before. It takes as long as about 155 training steps.

    Args:
        model: as the training loop will call it, with its first weights.
        optimizer: with the peak rate that you would use. Without a rate of your own leave torch's
            default, and take `RateInterval.best`.
        losses_of: ``losses_of(model, batch)`` -> losses, shape (examples,), or their mean.
        batches: training batches; 56 are taken. On several ranks, each rank's own.
        total_steps: length of the run in optimizer steps.
        scheduler: of this optimizer, if one was made already: its highest rates are the peaks.
        before_step: called between an arm's backward pass and its step, such as clipping.
        scaler: a GradScaler, under float16.
        replicas: who averages gradients; default as of `hdet.Ensemble`.
        place: "device" or "host", where copies live.

    Raises:
        TypeError: no model, or no optimizer.
        ValueError: fewer than 56 batches, a run whose copies could not be trained, or a scheduler
            whose copy cannot be stepped.

    Example::

        interval = hdet.find_rate(
            model, optimizer, losses_of, loader, total_steps=10_000
        )
        print(interval)  # learning rate: 1e-05 -> 0.0012 (...) ...
        interval.apply(optimizer)  # or apply(optimizer, scheduler)
    """
    whole(total_steps, "total_steps", of="steps")
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        kinds = f"{type(model).__name__} and {type(optimizer).__name__}"
        raise TypeError(f"find_rate(model, optimizer, ...): got {kinds}")
    if getattr(optimizer, "_hdet_fan_out", None) is not None:
        raise ValueError(
            "this optimizer is driven by an Ensemble: call find_rate before it is made"
        )
    if any(getattr(one, "release", None) is not None for one in optimizers_in(optimizer)):
        raise ValueError("this optimizer releases gradients: call find_rate before that")
    own = simulate_rates(optimizer, scheduler, total_steps).highest
    if scheduler is None:
        groups = optimizer.param_groups
        own = [float(g.get("max_lr", g.get("initial_lr", g["lr"]))) for g in groups]
    if not max(own):
        raise ValueError(
            "every parameter group has learning rate 0: set the rate that you would use"
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    factor, replicas = 1.0, replicas or Replicas.of_shards(parameters) or Replicas.default()
    with random_states_kept(model, _generators_of(batches)):
        taken = list(islice(batches, STEPS + SCORES))
    if isinstance(batches, DataLoader):
        batches._iterator = None  # of workers that stay: a new one draws their seed
    missing = torch.tensor([float(STEPS + SCORES - len(taken))])
    if replicas.sum_rows(missing, purpose="batches of find_rate").sum():
        raise ValueError(
            f"batches has {len(taken)}, and a trial takes {STEPS + SCORES} on each rank: pass more"
        )
    states = {id(one): {*one.state} for one in optimizers_in(optimizer)}
    peaks = lambda: [(number, factor * peak) for number, peak in enumerate(own)]
    run = Searched(model, optimizer, replicas, peaks, aside=partial(without_hooks, optimizer))
    search = AutoLR(model, before_step=before_step, scaler=scaler, place=place, spread_arms=False)
    search.total_steps = max(total_steps, SHORTEST)  # a trial, however short the run is
    search.attach(run)
    try:
        while not search.done:  # again at a far lower rate, if every arm breaks
            search.before_first_step()
            closures = (partial(losses_of, model, batch) for batch in taken)
            factor *= next(found for found in map(search.after_step, closures) if found)
    finally:
        search.close()
        forget_states(optimizer, states)
    found = search.interval
    assert found is not None
    interval = replace(found.trial, rate=found.rate).interval(total_steps)
    return replace(interval, groups=found.groups)


def _generators_of(batches: object) -> list[Any]:
    """Of random numbers, that a loader, its samplers and its data set draw from."""
    found, looked_at = [], [batches]
    for one in looked_at:  # it grows
        for value in getattr(one, "__dict__", {}).values():
            if any(hasattr(value, name) for name in ("get_state", "getstate", "bit_generator")):
                found.append(value)
            elif isinstance(value, (Sampler, Dataset)) and all(value is not x for x in looked_at):
                looked_at.append(value)
    return found
