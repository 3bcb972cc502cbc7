"""What is compared: each method trains a problem from a starting rate, on the same mini-batches, and says how it ended.

A method is a function that puts its `Parts` around a fresh model; `train` is the loop, the same for all. What a method's rate means, and
where the search for its best one begins, is in `METHODS`. Peers run as their READMEs ask; betas are (0.9, 0.95) everywhere.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

import torch
from problems import Batch, Problem
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

import hdet

__all__ = ["METHODS", "Method", "Outcome", "Parts", "train"]

BETAS = (0.9, 0.95)
WARMUP = 0.1
"""part of a run in which every schedule rises; the peers whose READMEs advise against it have none"""
DECAY = 0.2
"""part of a run in which WSD falls"""
POINTS = 20
"""of the rate's trajectory"""

REPLICAS, SPREAD, INTERVALS = 4, 0.3, 20
"""HDET's settings, the same for all starts and problems: N, alpha, cycles in a run"""


@dataclass(frozen=True)
class Outcome:
    """How a run ended. Plain data: it becomes a line of the results."""

    validation: float | None
    """Held-out loss in nats; None if the run crashed."""
    crashed: bool
    """A loss or the parameters became NaN or infinite."""
    rates: list[float]
    """The base rate in force, at `POINTS` even places of the run (fewer where it crashed)."""
    probe_percent: float
    """Forward passes of the probe, as a part of the run's compute; a step is three forward passes."""
    copies: float
    """Peak memory beyond AdamW's parameters, gradients and two moments, in copies of the parameters on a device."""
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Parts:
    """What a method puts around a model. ``backward`` fills the gradients of a batch and returns its mean loss."""

    optimizer: Optimizer
    backward: Callable[[Batch], float]
    after: Callable[[Batch], object] = lambda batch: None
    """Follows optimizer.step()."""
    rate: Callable[[], float] = lambda: math.nan
    """The base rate in force, right after optimizer.step()."""
    final: Callable[[], nn.Module] | None = None
    """The model to evaluate, at the end; None: the trained one."""
    probed: list[int] = field(default_factory=list)
    """Examples of each forward pass that trains nothing."""
    heals: bool = False
    """The method may survive a loss that is not finite; without, it ends the run."""
    crashes: tuple[type[Exception], ...] = ()
    """Errors by which the method itself says that the run has diverged."""


@dataclass(frozen=True)
class Method:
    """A way of training, and how to look for its best rate."""

    name: str
    build: Callable[[Problem, nn.Module, float, int], Parts]
    """(problem, fresh model, rate, seed)"""
    start: float
    """A rate near which the best one is looked for, in powers of 2."""
    search: tuple[int, int] | None
    """Exponents between which every second one is tried; None: ``start`` is the best rate by definition."""
    copies: float = 0.0
    borrows: str | None = None
    """The method whose best rate this one starts from."""
    package: str | None = None

    def version(self) -> str | None:
        return None if self.package is None else f"{self.package} {version(self.package)}"


def train(problem: Problem, method: Method, rate: float, seed: int) -> Outcome:
    """One run, from the first step to the validation. The mini-batches depend on the problem, the seed and the step alone."""
    began = time.perf_counter()
    model = problem.build(seed)
    with contextlib.redirect_stdout(io.StringIO()):  # some peers print when they are made
        parts = method.build(problem, model, rate, seed)
    rates: list[float] = []
    validation = math.nan
    with contextlib.suppress(_Crashed, *parts.crashes):
        for step in range(problem.steps):
            batch = problem.batch(seed, step)
            if not math.isfinite(parts.backward(batch)) and not parts.heals:
                raise _Crashed
            parts.optimizer.step()
            if step * POINTS // problem.steps == len(rates):
                rates.append(float(parts.rate()))
            parts.optimizer.zero_grad()
            parts.after(batch)
        validation = problem.validate(parts.final() if parts.final else model)
    crashed = not math.isfinite(validation)
    compute = 3 * problem.steps * problem.batch_size
    return Outcome(
        validation=None if crashed else validation,
        crashed=crashed,
        rates=[float(f"{r:.4g}") for r in rates if math.isfinite(r)],
        probe_percent=100 * sum(parts.probed) / compute,
        copies=method.copies,
        seconds=time.perf_counter() - began,
    )


class _Crashed(Exception):
    """The loss is not finite."""


# -- fixed schedules -----------------------------------------------------------------------------------------------------


def one_cycle(problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
    optimizer = torch.optim.AdamW(problem.groups(model), lr=rate, betas=BETAS, foreach=True)
    return _scheduled(problem, model, optimizer, _one_cycle(optimizer, rate, problem.steps))


def wsd(problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
    """Warm-up, stable, linear decay to 0."""
    optimizer = torch.optim.AdamW(problem.groups(model), lr=rate, betas=BETAS, foreach=True)
    rise, fall = WARMUP * problem.steps, DECAY * problem.steps
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / rise, (problem.steps - step) / fall))
    return _scheduled(problem, model, optimizer, schedule)


# -- peers ---------------------------------------------------------------------------------------------------------------


def schedule_free(problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
    """Has no schedule; training and evaluation use different weights, which train() and eval() exchange."""
    from schedulefree import AdamWScheduleFree

    warmup = round(WARMUP * problem.steps)
    optimizer = AdamWScheduleFree(problem.groups(model), lr=rate, betas=BETAS, warmup_steps=warmup)
    optimizer.train()

    def final() -> nn.Module:
        optimizer.eval()
        return model

    return Parts(optimizer, _plain(problem, model), rate=lambda: optimizer.param_groups[0]["scheduled_lr"], final=final)


def prodigy(problem: Problem, model: nn.Module, rate: float, seed: int, d0: float = 1e-6) -> Parts:
    """``rate`` multiplies the rate that it finds; cosine annealing without a warm-up, as its README has it."""
    from prodigyopt import Prodigy

    optimizer = Prodigy(problem.groups(model), lr=rate, betas=BETAS, d0=d0)
    return _scheduled(problem, model, optimizer, CosineAnnealingLR(optimizer, problem.steps), found="d")


def prodigy_d0(problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
    """The start is the first estimate of the distance; the multiplier stays at its recommended 1."""
    return prodigy(problem, model, 1.0, seed, d0=rate)


def dadapt(problem: Problem, model: nn.Module, rate: float, seed: int, d0: float = 1e-6) -> Parts:
    """``rate`` multiplies the rate that it finds; with the schedule that AdamW has."""
    from dadaptation import DAdaptAdam

    optimizer = DAdaptAdam(problem.groups(model), lr=rate, betas=BETAS, decouple=True, d0=d0)
    return _scheduled(problem, model, optimizer, _one_cycle(optimizer, rate, problem.steps), found="d")


def dadapt_d0(problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
    return dadapt(problem, model, 1.0, seed, d0=rate)


def dog(problem: Problem, model: nn.Module, rate: float, seed: int, movement: float = 1e-4) -> Parts:
    """L-DoG: SGD whose step is distance over gradients, tensor by tensor; the averaged weights are evaluated.

    The first movement is its README's remedy, a hundred times the default, for steps that do not grow early: runs are short here, and from
    1e-6 it had not arrived anywhere on digits (1.99, against 0.62).
    No weight decay, its default: there it is added to the gradient, and at steps of SGD's size AdamW's numbers would end any run.
    """
    from dog import LDoG, PolynomialDecayAverager

    logging.getLogger("dog").setLevel(logging.ERROR)  # it warns of every lr other than 1
    optimizer = LDoG(list(model.parameters()), lr=rate, reps_rel=movement)
    averager = PolynomialDecayAverager(model)
    plain = _plain(problem, model)

    def backward(batch: Batch) -> float:
        loss = plain(batch)
        # It asserts that gradients are numbers, one step before the loss tells.
        return loss if all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None) else math.nan

    return Parts(
        optimizer,
        backward,
        after=lambda batch: averager.step(),
        rate=lambda: torch.stack(optimizer.param_groups[0]["eta"]).mean().item(),
        final=lambda: averager.averaged_model,
    )


def dog_movement(problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
    """The start is the length of the first step."""
    return dog(problem, model, 1.0, seed, movement=rate)


# -- HDET: co-resident replicas, each on its quarter of the batch ------------------------------------------------------------


def hdet_softmax(problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
    return _hdet(problem, model, rate, seed, lambda probed: hdet.SoftmaxController(decay=None), warmup=WARMUP)


def hdet_probe(problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
    def controller(probed: list[int]) -> hdet.ProbeController:
        def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
            losses = problem.losses(model, batch)
            probed.append(len(losses))
            return losses.mean()

        def batches(cycle: int) -> list[Batch]:
            """Eight of a replica's size, of training data that no step uses."""
            return [part for i in range(2) for part in _parts(problem.batch(seed, problem.steps + 2 * cycle + i))]

        return hdet.ProbeController(loss_fn, batches, chunks=8, model=model)

    return _hdet(problem, model, rate, seed, controller)


def _hdet(problem: Problem, model: nn.Module, rate: float, seed: int, controller: Callable[[list[int]], Any], warmup: float = 0.0) -> Parts:
    """``controller`` is given the list in which it counts the examples it scores; ``warmup``: part of the run in which it may not act."""
    probed: list[int] = []
    optimizer = hdet.FusedAdamW(problem.groups(model), lr=rate, betas=BETAS)
    replicas = hdet.CoresidentReplicas(model, REPLICAS)
    ensemble = hdet.Ensemble(
        optimizer,
        _one_cycle(optimizer, rate, problem.steps),
        knobs=[hdet.LearningRate(SPREAD)],
        replicas=replicas,
        sync_interval=max(1, problem.steps // INTERVALS),
        warmup_steps=round(warmup * problem.steps),
        controller=controller(probed),
        seed=seed,
    )

    def backward(batch: Batch) -> float:
        total = 0.0
        for k, part in enumerate(_parts(batch)):
            with replicas.use(k):
                loss = problem.losses(model, part).mean()
                ensemble.observe(loss)
            (loss / REPLICAS).backward()
            total += loss.item() / REPLICAS
        return total

    return Parts(
        optimizer,
        backward,
        after=lambda batch: ensemble.step(),
        rate=lambda: optimizer.param_groups[0]["lr"],
        probed=probed,
        heals=True,
        crashes=(hdet.ReplicasDiverged,),
    )


# -- what they share -------------------------------------------------------------------------------------------------------


def _plain(problem: Problem, model: nn.Module) -> Callable[[Batch], float]:
    def backward(batch: Batch) -> float:
        loss = problem.losses(model, batch).mean()
        loss.backward()
        return loss.item()

    return backward


def _parts(batch: Batch) -> list[Batch]:
    """One for each replica."""
    return list(zip(*(tensor.chunk(REPLICAS) for tensor in batch), strict=True))


def _one_cycle(optimizer: Optimizer, rate: float, steps: int) -> OneCycleLR:
    return OneCycleLR(optimizer, rate, total_steps=steps, pct_start=WARMUP, cycle_momentum=False)


def _scheduled(problem: Problem, model: nn.Module, optimizer: Optimizer, schedule: Any, found: str | None = None) -> Parts:
    """``found``: the key of what the optimizer multiplies the schedule with."""

    def rate() -> float:
        group = optimizer.param_groups[0]
        return float(group["lr"] * (group[found] if found else 1.0))

    return Parts(optimizer, _plain(problem, model), after=lambda batch: schedule.step(), rate=rate)


_ADAM, _FREE = (-4, 4), (-8, 6)
"""where to search: around 1e-2 for a rate, wider for what should not need any"""

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("onecycle", one_cycle, 1e-2, _ADAM),
        Method("wsd", wsd, 1e-2, _ADAM),
        Method("schedulefree", schedule_free, 1e-2, _ADAM, package="schedulefree"),
        Method("prodigy", prodigy, 1.0, _FREE, copies=2, package="prodigyopt"),
        Method("prodigy-d0", prodigy_d0, 1e-6, None, copies=2, package="prodigyopt"),
        Method("dadapt", dadapt, 1.0, _FREE, copies=1, package="dadaptation"),
        Method("dadapt-d0", dadapt_d0, 1e-6, None, copies=1, package="dadaptation"),
        Method("dog", dog, 1.0, _FREE, package="dog-optimizer"),
        Method("dog-movement", dog_movement, 1e-4, (-6, 8), package="dog-optimizer"),
        Method("hdet-softmax", hdet_softmax, 1e-2, None, borrows="onecycle"),
        Method("hdet-probe", hdet_probe, 1e-2, None, copies=1, borrows="onecycle"),
    )
}
