"""HDET without replicas: the line, one process, the whole batch."""

from __future__ import annotations

import math

import torch
from torch import nn

import hdet

from .problems import Batch, Problem
from .training import BETAS, Parts, Schedule, fine_interval, one_cycle_schedule, plain, wsd_schedule


def hdet_line_onecycle(problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
    return hdet_line(problem, model, rate, seed, one_cycle_schedule)


def hdet_line(
    problem: Problem, model: nn.Module, rate: float, seed: int, schedule: Schedule = wsd_schedule, rule: hdet.LineRule | None = None
) -> Parts:
    probed: list[int] = []
    train = plain(problem, model)
    last = math.nan
    optimizer = hdet.FusedAdamW(problem.groups(model), lr=rate, betas=BETAS)
    ensemble = hdet.Ensemble(
        optimizer,
        schedule(optimizer, problem.steps),
        total_steps=problem.steps,
        sync=hdet.Sync(fine_interval(problem)),
        controller=hdet.LineController(model, rule=rule),
        seed=seed,
    )

    def backward(batch: Batch) -> float:
        nonlocal last
        last = train(batch)
        return last

    def after(batch: Batch) -> None:
        def closure() -> torch.Tensor:
            probed.append(len(batch[0]))
            return problem.losses(model, batch)

        ensemble.step(last, closure=closure)

    return Parts(
        optimizer,
        backward,
        after,
        rate=lambda: optimizer.param_groups[0]["lr"],
        probed=probed,
        heals=True,
        crashes=(hdet.ReplicasDiverged,),
    )
