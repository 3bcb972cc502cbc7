"""Runs under an `hdet.AutoLR`, of 1 500 steps, whose best peaks for AdamW are 0.01 to 0.1."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import hdet
from hdet.trial.rule import SCORES, STEPS
from tests.harness import Batch, Run, model, taught

ALL = STEPS + SCORES
"""steps of a trial"""


def sgd(parameters: Any, lr: float, weight_decay: float = 0.0) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


WITHOUT = {"closure": False}
OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "FusedAdamW": hdet.FusedAdamW,
    "FusedScheduleFreeAdamW": hdet.FusedScheduleFreeAdamW,
    "SGD with momentum": sgd,
}


def auto_run(
    lr: float = 0.03,
    rank: int = 0,
    *,
    net: nn.Module | None = None,
    controlled: bool = True,
    shadow: bool = False,
    of: dict[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """``of``: settings of the AutoLR; ``controlled`` False: without one."""

    def make(model: nn.Module) -> hdet.AutoLR:
        return hdet.AutoLR(model, report_only=shadow, **(of or {}))

    usual = {"total": 1500, "every": 100, "spread": 0.0, "data": taught, "closure": True}
    net, search = net or model(), make if controlled else None
    return Run(rank, net=net, lr=lr, search=search, **{**usual, **settings})


def not_numbers(key: int) -> Batch:
    x, y = taught(key)
    return x, y * math.nan


def noisy() -> nn.Module:
    """With buffers and random numbers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1)
    )


def searched(run: Run) -> Run:
    """To the end of the search."""
    while not run.search.done:
        run.step()
    return run


def training(
    net: nn.Module,
    losses_at: Callable[[int], torch.Tensor],
    steps: int,
    lr: float = 1e-3,
    *,
    optimizer: Any = None,
    plain: bool = False,
    **settings: Any,
) -> Iterator[Any]:
    """A loop for models that `Run` does not know: yields its Ensemble after each step; ``plain``:
    it has none."""
    optimizer = optimizer or torch.optim.AdamW(net.parameters(), lr=lr)
    settings = {"total_steps": 1500, **settings}
    ensemble = None if plain else hdet.Ensemble(optimizer, **settings)
    for step in range(steps):
        optimizer.zero_grad()
        losses_at(step).mean().backward()
        optimizer.step()
        if ensemble is not None:
            ensemble.step(1.0, closure=lambda step=step: losses_at(step))
        yield ensemble
