"""freeze_after on real tensors: no probes and no spread after it; copies kept till then."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from tests.harness import Run, batch, loss_of, policies, probe, taught


def test_a_frozen_probe_takes_no_more_scores_and_keeps_what_it_learned() -> None:
    scored: set[int] = set()

    def counting(m: torch.nn.Module, data: Any) -> torch.Tensor:
        scored.add(run.ensemble.engine.step)
        return loss_of(m, data)

    def controller(net: torch.nn.Module) -> hdet.Controller:
        batches = [batch(i) for i in range(8)]
        return hdet.ProbeController(counting, batches, model=net, freeze_after=0.5)

    settings = {"optimizer": hdet.FusedSGD, "lr": 1e-4, "scheduler": None}
    run = Run(together=2, total=60, controller=controller, **settings)
    corrections = [run.steps(1).ensemble.corrections["lr"] for _ in range(60)]
    assert sorted(scored) == [5, 10, 15, 20, 25, 30]
    assert corrections[29] != 1.0 and set(corrections[29:]) == {corrections[29]}
    assert run.ensemble.multipliers == {"lr": 1.0} and run.controller.idle


def drop_in(**settings: Any) -> hdet.OneCycleAutoLR:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    settings = {"auto_lr_warmup_steps": 0, "model_sync_interval": 5, **policies(**settings)}
    return hdet.OneCycleAutoLR(optimizer, 0.1, 40, **settings)


@pytest.mark.filterwarnings("ignore:one replica")
def test_the_drop_in_passes_it_on_to_whom_it_makes() -> None:
    controller = drop_in(enable_auto_lr=True, freeze_after=0.25).ensemble.engine.controller
    assert isinstance(controller, hdet.SoftmaxController) and controller.freeze_after == 0.25
    with pytest.raises(ValueError, match=r"freeze_after is 0\.5, but a controller is given"):
        drop_in(controller=hdet.SoftmaxController(decay=None), freeze_after=0.5)
    with pytest.raises(ValueError, match=r"freeze_after is 0\.5, but enable_auto_lr is off"):
        drop_in(freeze_after=0.5)


# -- copies of the parameters ------------------------------------------------------------------

SIZE = 300_000


class Large(nn.Module):
    """Of one weight, of which all but a few numbers are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE // 300, 300))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight[:6, :1]


def in_a_row(net: nn.Module) -> hdet.Controller:
    return hdet.SequentialController(hdet.AutoLR(net), probe(net, interval=1, freeze_after=0.95))


def copies(run: Run) -> int:
    run.optimizer.zero_grad()
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    return len({x.data_ptr() for x in tensors if x.numel() == SIZE})


@pytest.mark.filterwarnings("ignore:one replica")
@pytest.mark.parametrize(("controller", "total", "needed", "over"), [
    (lambda net: probe(net, interval=2, freeze_after=0.5), 200, 3, 200),
    # of a trial: the run and its copy, its beginning and five arms
    (hdet.AutoLR, 1000, 8, 60),
    (in_a_row, 1000, 8, 1000),
])  # fmt: skip
def test_copies_are_kept_while_they_are_needed(
    controller: Callable[[nn.Module], hdet.Controller], total: int, needed: int, over: int
) -> None:
    """The parameters are one, and what has to wait for another has none yet."""

    def run(steps: int) -> Run:
        return Run(
            net=Large(), controller=controller, optimizer=torch.optim.SGD, lr=1e-3, total=total,
            every=2, data=taught, closure=True,
        ).steps(steps)  # fmt: skip

    ran = run(7)
    assert copies(ran) == needed
    ran.ensemble.close()
    assert copies(ran) == 1
    del ran
    ran = run(over)
    assert ran.controller.finished and ran.controller.idle and copies(ran) == 1
    ran.ensemble.close()
    assert copies(ran) == 1
