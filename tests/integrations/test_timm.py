"""timm's schedulers, which are told where they are. timm itself is no part of the extra: it asks
for torchvision, whose wheels fit one build of torch. So its schedulers are loaded by themselves
where it is installed, and a stand-in with its interface is tested everywhere."""

from __future__ import annotations

import importlib.util
import math
import sys
import types
from pathlib import Path
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


def timms(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its CosineLRScheduler, without the models, for which timm needs a torchvision of the same
    build as torch."""
    spec = importlib.util.find_spec("timm")
    if spec is None or spec.origin is None:
        pytest.skip("timm is not installed: pip install --no-deps timm")
    package = types.ModuleType("timm")
    package.__path__ = [str(Path(spec.origin).parent)]
    monkeypatch.setitem(sys.modules, "timm", package)
    return importlib.import_module("timm.scheduler.cosine_lr").CosineLRScheduler


@pytest.fixture(params=["stand-in", "timm"])
def cosine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return Cosine if request.param == "stand-in" else timms(monkeypatch)


def test_the_example_raises_its_rate(cosine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example("timm_scheduler").main(cosine)
    assert correction_in(capsys.readouterr().out) >= 2


SETTINGS = {"t_initial": 20, "warmup_t": 4, "warmup_lr_init": 0.01, "t_in_epochs": False}


def test_one_that_is_handed_to_an_ensemble_is_refused_with_the_way_out(cosine: Any) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    message = "scheduler is Cosine.*, whose step needs 'epoch' .*: leave scheduler out, .*reschedul"
    with pytest.raises(ValueError, match=message):
        hdet.Ensemble(optimizer, cosine(optimizer, **SETTINGS))
    assert not hasattr(optimizer, "_hdet_fan_out")
