"""What people use today: fixed schedules, and optimizers that promise to need no rate.

They run as their READMEs ask.
"""

from __future__ import annotations

import logging
import math

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from .problems import Batch, Problem
from .training import BETAS, WARMUP, Parts, Plain, one_cycle_schedule, scheduled, wsd_schedule


def one_cycle(problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
    optimizer = adamw(problem, model, rate)
    return scheduled(problem, model, optimizer, one_cycle_schedule(optimizer, problem.steps))


def wsd(problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
    optimizer = adamw(problem, model, rate)
    return scheduled(problem, model, optimizer, wsd_schedule(optimizer, problem.steps))


def adamw(problem: Problem, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(problem.groups(model), lr=rate, betas=BETAS, foreach=True)


# -- peers -----------------------------------------------------------------------------------------


def schedule_free(
    problem: Problem,
    model: nn.Module,
    rate: float,
    seed: int,
    betas: tuple[float, float] = BETAS,
    warmup: float = WARMUP,
) -> Parts:
    """Has no schedule; training and evaluation use different weights, which train() and eval()
    exchange."""
    from schedulefree import AdamWScheduleFree

    steps = round(warmup * problem.steps)
    optimizer = AdamWScheduleFree(problem.groups(model), lr=rate, betas=betas, warmup_steps=steps)
    optimizer.train()

    def final() -> nn.Module:
        optimizer.eval()
        return model

    rate = lambda: optimizer.param_groups[0]["scheduled_lr"]
    of = {"rate": rate, "final": final, "resume": optimizer.train}
    return Parts(optimizer, Plain(problem, model), **of)


def prodigy(problem: Problem, model: nn.Module, rate: float, seed: int, d0: float = 1e-6) -> Parts:
    """``rate`` multiplies the rate that it finds; cosine annealing without a warm-up, as its README
    has it."""
    from prodigyopt import Prodigy

    optimizer = Prodigy(problem.groups(model), lr=rate, betas=BETAS, d0=d0)
    schedule = CosineAnnealingLR(optimizer, problem.steps)
    return scheduled(problem, model, optimizer, schedule, found="d")


def prodigy_d0(problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
    """The start is the first estimate of the distance; the multiplier stays at its recommended
    1."""
    return prodigy(problem, model, 1.0, seed, d0=rate)


def dadapt(problem: Problem, model: nn.Module, rate: float, seed: int, d0: float = 1e-6) -> Parts:
    """``rate`` multiplies the rate that it finds; with the schedule that AdamW has."""
    from dadaptation import DAdaptAdam

    optimizer = DAdaptAdam(problem.groups(model), lr=rate, betas=BETAS, decouple=True, d0=d0)
    schedule = one_cycle_schedule(optimizer, problem.steps)
    return scheduled(problem, model, optimizer, schedule, found="d")


def dadapt_d0(problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
    return dadapt(problem, model, 1.0, seed, d0=rate)


def dog(
    problem: Problem, model: nn.Module, rate: float, seed: int, movement: float = 1e-4
) -> Parts:
    """L-DoG: SGD whose step is distance over gradients, tensor by tensor; the averaged weights are
    evaluated.

    The first movement is its README's remedy, a hundred times the default, for steps that do not
    grow early: runs are short here, and from 1e-6 it had not arrived anywhere on digits (1.99,
    against 0.62). No weight decay, its default: there it is added to the gradient, and at steps of
    SGD's size AdamW's numbers would end any run.
    """
    from dog import LDoG, PolynomialDecayAverager

    logging.getLogger("dog").setLevel(logging.ERROR)  # it warns of every lr other than 1
    optimizer = LDoG(list(model.parameters()), lr=rate, reps_rel=movement)
    averager = PolynomialDecayAverager(model)
    trained = Plain(problem, model)

    def backward(batch: Batch) -> float:
        loss, gradients = trained(batch), [p.grad for p in model.parameters() if p.grad is not None]
        # It asserts that gradients are numbers, one step before the loss tells.
        return loss if all(gradient.isfinite().all() for gradient in gradients) else math.nan

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
