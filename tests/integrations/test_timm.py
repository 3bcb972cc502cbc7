"""timm's schedulers, which are told where they are, by a stand-in with their interface: timm asks
for torchvision, whose wheels fit one build of torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import hdet

from .frameworks import correction_in, example


class Cosine:
    """The part of timm's CosineLRScheduler that the example uses, in updates."""

    def __init__(
        self, optimizer: Any, t_initial: int, warmup_t: int, warmup_lr_init: float, **others: Any
    ) -> None:
        self.groups, self.length = optimizer.param_groups, t_initial
        self.warmup, self.low = warmup_t, warmup_lr_init
        for group in self.groups:  # as timm's base class does
            group.setdefault("initial_lr", group["lr"])
        self.peaks = [group["lr"] for group in self.groups]
        self.step_update(0)

    def step(self, epoch: int, metric: Any = None) -> None:
        pass

    def step_update(self, num_updates: int, metric: Any = None) -> None:
        for group, peak in zip(self.groups, self.peaks, strict=True):
            group["lr"] = peak * (1 + math.cos(math.pi * num_updates / self.length)) / 2
            if num_updates < self.warmup:
                group["lr"] = self.low + num_updates * (peak - self.low) / self.warmup

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_the_example_raises_its_rate(capsys: pytest.CaptureFixture[str]) -> None:
    example("timm_scheduler").main(Cosine)
    assert correction_in(capsys.readouterr().out) >= 2


def test_one_that_is_handed_to_an_ensemble_is_refused_with_the_way_out() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    message = "scheduler is Cosine.*, whose step needs 'epoch' .*: leave scheduler out, .*reschedul"
    with pytest.raises(ValueError, match=message):
        hdet.Ensemble(optimizer, Cosine(optimizer, t_initial=20, warmup_t=4, warmup_lr_init=0.01))
    assert not hasattr(optimizer, "_hdet_fan_out")
