"""freeze_after on real tensors: no probes and no spread after it, in the probe and in the drop-in; what is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from tests.harness import Run, batch, loss_of, model, policies, probe, taught


def test_a_frozen_probe_takes_no_more_scores_and_keeps_what_it_learned() -> None:
    scored: list[int] = []

    def counting(m: torch.nn.Module, data: Any) -> torch.Tensor:
        scored.append(run.ensemble.engine.step)
        return loss_of(m, data)

    def controller(net: torch.nn.Module) -> hdet.Controller:
        return hdet.ProbeController(
            counting, [batch(i) for i in range(8)], model=net, freeze_after=0.5
        )

    run = Run(
        together=2,
        optimizer=hdet.FusedSGD,
        lr=1e-4,
        total=60,
        scheduler=None,
        controller=controller,
    )
    corrections = [run.ensemble.corrections["lr"] for _ in range(60) if run.steps(1)]
    assert sorted(set(scored)) == [5, 10, 15, 20, 25, 30]
    assert corrections[29] != 1.0 and set(corrections[29:]) == {corrections[29]}
    assert run.ensemble.multipliers == {"lr": 1.0} and run.controller.idle


def drop_in(**settings: Any) -> tuple[torch.optim.Optimizer, hdet.OneCycleAutoLR]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    return optimizer, hdet.OneCycleAutoLR(
        optimizer, 0.1, 40, auto_lr_warmup_steps=0, model_sync_interval=5, **policies(**settings)
    )


def test_the_drop_in_passes_it_on() -> None:
    with pytest.warns(UserWarning, match="one replica"):
        _, scheduler = drop_in(enable_auto_lr=True, freeze_after=0.25)
    controller = scheduler.ensemble.engine.controller
    assert isinstance(controller, hdet.SoftmaxController) and controller.freeze_after == 0.25


def test_freeze_after_without_somebody_to_freeze_is_refused() -> None:
    with pytest.raises(ValueError, match=r"freeze_after is 0\.5, but a controller is given"):
        drop_in(controller=hdet.SoftmaxController(decay=None), freeze_after=0.5)
    with pytest.raises(ValueError, match=r"freeze_after is 0\.5, but enable_auto_lr is off"):
        drop_in(freeze_after=0.5)


@pytest.mark.parametrize(
    "controller",
    [
        hdet.SoftmaxController(decay=None, freeze_after=0.5),
        hdet.ProbeController(loss_of, [batch(i) for i in range(8)], model=model(), freeze_after=0.5),
    ],
)  # fmt: skip
def test_a_part_of_a_run_of_unknown_length_is_refused_before_anything_is_touched(
    controller: Any,
) -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"freeze_after=0\.5.*total_steps"):
        hdet.Ensemble(optimizer, controller=controller)
    hdet.Ensemble(optimizer)  # nobody drives it


# -- copies of the parameters: kept while they are needed, and no longer -----------------------------------------------------


SIZE = 300_000


class Large(nn.Module):
    """Of one weight, of which all but a few numbers are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE // 300, 300))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight[:6, :1]


CONTROLLERS: dict[str, Callable[[nn.Module], hdet.Controller]] = {
    "auto": lambda net: hdet.AutoLR(net),
    "probe": lambda net: probe(net, interval=2, freeze_after=0.5),
    "auto, then probe": lambda net: hdet.SequentialController(hdet.AutoLR(net), probe(net, interval=1, freeze_after=0.95)),
}  # fmt: skip


def run(name: str, optimizer: Any = torch.optim.SGD) -> Run:
    total = 1000 if "auto" in name else 200
    return Run(
        net=Large(),
        controller=CONTROLLERS[name],
        optimizer=optimizer,
        lr=1e-3,
        total=total,
        every=2,
        data=taught,
        closure=True,
    )


def copies(run: Run) -> int:
    run.optimizer.zero_grad()
    gc.collect()
    return len(
        {
            x.data_ptr()
            for x in gc.get_objects()
            if issubclass(type(x), torch.Tensor) and x.numel() == SIZE
        }
    )


@pytest.mark.filterwarnings("ignore:one replica")
@pytest.mark.parametrize("name", CONTROLLERS)
def test_copies_are_kept_while_they_are_needed(name: str) -> None:
    ran = run(name).steps(7)
    needed = copies(ran)
    expected = {"probe": 3}.get(
        name, 8
    )  # of a trial: the run and its copy, its beginning and five arms
    assert needed == expected, "the parameters are one; what has to wait for another has none yet"
    ran.ensemble.close()
    assert copies(ran) == 1
    del ran
    ran = run(name).steps(60 if name == "auto" else None)
    assert ran.controller.finished and ran.controller.idle and copies(ran) == 1
    ran.ensemble.close()
    assert copies(ran) == 1
