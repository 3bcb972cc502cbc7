"""The loop that every method shares: what a method puts around a model, and how a run ends."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

import hdet

from .problems import Batch, Problem

BETAS = (0.9, 0.95)
WARMUP = 0.1
"""Part of a run in which every schedule rises; the peers whose READMEs advise against it have none.
"""
DECAY = 0.2
"""Part of a run in which WSD falls."""
POINTS = 20
"""Of the rate's trajectory."""


@dataclass
class Parts:
    """What a method puts around a model.

    ``backward`` fills the gradients of a batch and returns its mean loss.
    """

    optimizer: Optimizer
    backward: Callable[[Batch], float]
    after: Callable[[Batch], object] = lambda batch: None
    """Follows optimizer.step()."""
    rate: Callable[[], float] = lambda: math.nan
    """The base rate in force, right after optimizer.step()."""
    final: Callable[[], nn.Module] | None = None
    """The model to evaluate, at the end; None: the trained one."""
    resume: Callable[[], object] = lambda: None
    """Follows `final` where the run goes on."""
    probed: list[int] = field(default_factory=list)
    """Examples of each forward pass that trains nothing."""
    heals: bool = False
    """The method may survive a loss that is not finite; without, it ends the run."""
    crashes: tuple[type[Exception], ...] = ()
    """Errors by which the method itself says that the run has diverged."""


Build = Callable[[Problem, nn.Module, float, int], Parts]
"""(problem, fresh model, rate or another start, seed)"""
Watch = Callable[[int, Callable[[], float]], object]
"""Called before each step with its number, and a function that validates."""


def train(
    problem: Problem,
    build: Build,
    start: float,
    seed: int,
    watch: Watch = lambda step, validate: None,
) -> dict[str, Any]:
    """One run, from the first step to the validation.

    The mini-batches depend on the problem, the seed and the step alone. Returns a part of a line:
    ``validation`` (nats; None: a loss or the parameters became NaN or infinite), ``rates`` (at
    `POINTS` even places; fewer where it crashed; each step of a shorter run), ``probe_percent``
    (forward passes that train nothing, as a part of the compute; a step is three forward passes).
    """
    model = problem.build(seed)
    with contextlib.redirect_stdout(io.StringIO()):  # some peers print when they are made
        parts = build(problem, model, start, seed)
    rates: list[float] = []
    validation = math.nan

    def validate() -> float:
        return problem.validate(parts.final() if parts.final else model)

    def in_between() -> float:
        found = validate()
        parts.resume()
        return found

    with contextlib.suppress(_Crashed, *parts.crashes):
        for step in range(problem.steps):
            watch(step, in_between)
            batch = problem.batch(seed, step)
            if not math.isfinite(parts.backward(batch)) and not parts.heals:
                raise _Crashed
            parts.optimizer.step()
            if step * POINTS // problem.steps >= len(rates):
                rates.append(float(parts.rate()))
            parts.optimizer.zero_grad()
            parts.after(batch)
        validation = validate()
    return {
        "validation": validation if math.isfinite(validation) else None,
        "rates": [float(f"{r:.4g}") for r in rates if math.isfinite(r)],
        "probe_percent": 100 * sum(parts.probed) / (3 * problem.steps * problem.batch_size),
    }


class _Crashed(Exception):
    """The loss is not finite."""


@cache
def untrained(problem: Problem, seed: int) -> float:
    """The held-out loss before the first step."""
    return problem.validate(problem.build(seed))


# -- for methods -----------------------------------------------------------------------------------


class Plain:
    """The gradient of the whole batch's mean loss; keeps the last loss."""

    def __init__(self, problem: Problem, model: nn.Module) -> None:
        self.problem, self.model, self.loss = problem, model, math.nan

    def __call__(self, batch: Batch) -> float:
        loss = self.problem.losses(self.model, batch).mean()
        loss.backward()
        self.loss = loss.item()
        return self.loss


def with_ensemble(
    problem: Problem,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    search: hdet.AutoLR | None = None,
    seed: int = 0,
) -> tuple[Parts, hdet.Ensemble]:
    """A training loop whose closure has the losses of the batch."""
    ensemble = hdet.Ensemble(
        optimizer, scheduler, total_steps=problem.steps, search=search, seed=seed
    )
    backward = Plain(problem, model)

    def after(batch: Batch) -> None:
        ensemble.step(backward.loss, closure=lambda: problem.losses(model, batch))

    rate = lambda: float(optimizer.param_groups[0]["lr"])
    parts = Parts(optimizer, backward, after, rate, heals=True, crashes=(hdet.ReplicasDiverged,))
    return parts, ensemble


def search_of(level: str, model: nn.Module) -> hdet.AutoLR | None:
    """``level``: "trial", "free" or "fixed"."""
    if level == "fixed":
        return None
    return hdet.AutoLR(model, budget=0.0 if level == "free" else None)


Schedule = Callable[[Optimizer, int], LRScheduler]
"""(optimizer, steps); its peak is the optimizer's rate"""


OPTIMIZERS: dict[str, Callable[[Any, float], Optimizer]] = {
    "adamw-0.999": lambda groups, rate: hdet.FusedAdamW(groups, lr=rate, betas=(0.9, 0.999)),
    "adamw-0.95": lambda groups, rate: hdet.FusedAdamW(groups, lr=rate, betas=(0.9, 0.95)),
    "sgd": lambda groups, rate: hdet.FusedSGD(groups, lr=rate, momentum=0.9),
    "lion": lambda groups, rate: hdet.FusedLion(groups, lr=rate),
    "muon": lambda groups, rate: torch.optim.Muon(groups, lr=rate),
    "fused-muon": lambda groups, rate: hdet.FusedMuon(
        groups,
        lr=rate,
        adamw_lr=rate,
        adjust_lr_fn="match_rms_adamw",
        ns_dtype=torch.float32,  # the same on any processor
    ),
}
RISE = 0.05
"""Part of a run in which every schedule but one-cycle rises."""


SHAPES = ("cosine", "wsd", "linear", "constant", "tenth", "restarts")


def _shape(name: str, part: float) -> float:
    """The multiple of the peak at a part of the run in [0, 1)."""
    after = (part - RISE) / (1 - RISE)
    cosine = 0.5 * (1 + math.cos(math.pi * after))
    shapes = {
        "constant": 1.0,
        "wsd": min(1.0, (1 - part) / 0.2),
        "linear": 1 - after,
        "cosine": cosine,
        "tenth": 0.1 + 0.9 * cosine,
        "restarts": 0.5 * (1 + math.cos(math.pi * (3 * after % 1))),
    }
    return max(part / RISE if part < RISE else shapes[name], 0.0)


def _schedule(name: str) -> Schedule:
    return lambda optimizer, steps: LambdaLR(
        optimizer, lambda step: _shape(name, (step + 1) / (steps + 1))
    )


SCHEDULES: dict[str, Schedule] = {
    **{name: _schedule(name) for name in SHAPES},
    # Torch's defaults: the momentum, or beta1, falls while the rate rises.
    "one-cycle": lambda optimizer, steps: OneCycleLR(
        optimizer, [group["lr"] for group in optimizer.param_groups], total_steps=steps
    ),
    # As in transformers and Megatron: the first step has rate 0.
    "zero": lambda optimizer, steps: LambdaLR(
        optimizer, lambda step: _shape("cosine", step / steps)
    ),
}


def one_cycle_schedule(optimizer: Optimizer, steps: int) -> OneCycleLR:
    peaks = [group["lr"] for group in optimizer.param_groups]
    return OneCycleLR(optimizer, peaks, total_steps=steps, pct_start=WARMUP, cycle_momentum=False)


def wsd_schedule(optimizer: Optimizer, steps: int) -> LambdaLR:
    """Warm-up, stable, linear decay to 0."""
    rise, fall = WARMUP * steps, DECAY * steps
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / rise, (steps - step) / fall))


def scheduled(
    problem: Problem,
    model: nn.Module,
    optimizer: Optimizer,
    schedule: Any,
    found: str | None = None,
) -> Parts:
    """A schedule that steps after the optimizer.

    ``found``: the key of what the optimizer multiplies the schedule's rate with.
    """

    def rate() -> float:
        group = optimizer.param_groups[0]
        return float(group["lr"] * (group[found] if found else 1.0))

    return Parts(optimizer, Plain(problem, model), lambda batch: schedule.step(), rate)
