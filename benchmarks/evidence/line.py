"""HDET without replicas: the line, one process, the whole batch."""

from __future__ import annotations

import math

import torch
from problems import Batch, Problem
from torch import nn
from training import BETAS, Parts, one_cycle_schedule, plain

import hdet

INTERVALS = 400
"""the same for all starts and problems: cycles in a run; the line's octaves are of several"""


def hdet_line(problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
    probed: list[int] = []
    train = plain(problem, model)
    last = math.nan
    optimizer = hdet.FusedAdamW(problem.groups(model), lr=rate, betas=BETAS)
    ensemble = hdet.Ensemble(
        optimizer,
        one_cycle_schedule(optimizer, rate, problem.steps),
        sync_interval=max(1, problem.steps // INTERVALS),
        controller=hdet.LineController(model),
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

    return Parts(optimizer, backward, after, rate=lambda: optimizer.param_groups[0]["lr"], probed=probed, heals=True)
