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
    """The part of timm's CosineLRScheduler that the example uses."""

    def __init__(
        self,
        optimizer: Any,
        t_initial: int,
        warmup_t: int,
        warmup_lr_init: float,
        t_in_epochs: bool,
    ) -> None:
        self.optimizer, self.length, self.warmup, self.low, self.by_epoch = (
            optimizer,
            t_initial,
            warmup_t,
            warmup_lr_init,
            t_in_epochs,
        )
        self.peaks = [group["lr"] for group in optimizer.param_groups]
        self.write(0)

    def write(self, t: int) -> None:
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = (
                self.low + t * (peak - self.low) / self.warmup
                if t < self.warmup
                else peak * (1 + math.cos(math.pi * t / self.length)) / 2
            )

    def step(self, epoch: int, metric: Any = None) -> None:
        if self.by_epoch:
            self.write(epoch)

    def step_update(self, num_updates: int, metric: Any = None) -> None:
        if not self.by_epoch:
            self.write(num_updates)

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


def trained(cosine: Any, knobs: Any) -> tuple[torch.Tensor, list[float]]:
    """None: without hdet."""
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = cosine(optimizer, t_initial=20, warmup_t=4, warmup_lr_init=0.01, t_in_epochs=False)
    ensemble = (
        None
        if knobs is None
        else hdet.Ensemble(optimizer, total_steps=20, knobs=knobs, sync=hdet.Sync(5))
    )
    rates = []
    for step in range(20):
        optimizer.zero_grad()
        loss = net(torch.randn(8, 4)).square().mean()
        loss.backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if ensemble is None:
            scheduler.step_update(step + 1)
        else:
            with ensemble.rescheduling():
                scheduler.step_update(step + 1)
            ensemble.step(loss)
    return torch.cat([p.detach().flatten() for p in net.parameters()]), rates


def test_spread_0_is_the_plain_run_bit_for_bit(cosine: Any) -> None:
    (plain, rates), (ours, same) = trained(cosine, None), trained(cosine, [hdet.LearningRate(0)])
    assert torch.equal(plain, ours) and rates == same and rates[0] == 0.01 and max(rates) > 0.09


def test_one_that_is_handed_to_an_ensemble_is_refused_with_the_way_out(cosine: Any) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = cosine(optimizer, t_initial=20, warmup_t=4, warmup_lr_init=0.01, t_in_epochs=False)
    with pytest.raises(
        ValueError,
        match=(
            "scheduler is Cosine.*, whose step needs 'epoch' .*: leave scheduler out, "
            ".*rescheduling"
        ),
    ):
        hdet.Ensemble(optimizer, scheduler)
    assert not hasattr(optimizer, "_hdet_fan_out")
