"""HDET without replicas: the line, one process, the whole batch."""

from __future__ import annotations

import torch
from problems import Batch, Problem
from torch import nn
from training import BETAS, Parts, one_cycle_schedule, plain

import hdet

INTERVALS = 100
"""the same for all starts and problems: a control interval ends at a hundredth of the run"""


def hdet_line(problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
    probed: list[int] = []
    optimizer = hdet.FusedAdamW(problem.groups(model), lr=rate, betas=BETAS)
    ensemble = hdet.Ensemble(
        optimizer,
        one_cycle_schedule(optimizer, rate, problem.steps),
        sync_interval=max(1, problem.steps // INTERVALS),
        controller=hdet.LineController(model),
        seed=seed,
    )

    def after(batch: Batch) -> None:
        def closure() -> torch.Tensor:
            probed.append(len(batch[0]))
            return problem.losses(model, batch)

        ensemble.step(closure=closure)

    return Parts(optimizer, plain(problem, model), after, rate=lambda: optimizer.param_groups[0]["lr"], probed=probed, heals=True)
