"""`hdet.find_rate`: the trial of an `AutoLR`, before a run, which it does not touch."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import hdet
from hdet.trial.rule import RateInterval
from tests.distributed import run_ranks
from tests.ensemble.helpers import same
from tests.harness import Run, losses_of, model, one_cycle, taught

from .common import ALL, OPTIMIZERS, auto_run, noisy, sgd

BATCHES = [taught(100 * number) for number in range(ALL)]


def found(lr: float, optimizer: Any = torch.optim.AdamW, **settings: Any) -> RateInterval:
    net = settings.pop("net", None) or model()
    made = optimizer(net.parameters(), lr=lr, weight_decay=0.0)
    return hdet.find_rate(
        net, made, losses_of, settings.pop("batches", BATCHES), **{"total_steps": 1500, **settings}
    )


@pytest.mark.parametrize(("lr", "name"), [(0.03, "AdamW"), *((1e-4, name) for name in OPTIMIZERS)])
def test_it_finds_what_a_run_on_the_same_batches_finds(lr: float, name: str) -> None:
    run = auto_run(lr, optimizer=OPTIMIZERS[name], scheduler=None).steps(ALL)
    assert found(lr, OPTIMIZERS[name]) == run.search.interval


@pytest.mark.parametrize("make", [sgd, hdet.FusedAdamW, hdet.FusedScheduleFreeAdamW])
@pytest.mark.parametrize("begun", [False, True])
def test_model_optimizer_and_random_states_are_as_they_were(begun: bool, make: Any) -> None:
    """``begun``: with moments that are there."""
    net, drawn = noisy(), torch.Generator().manual_seed(0)
    optimizer = make(net.parameters(), lr=1e-3)
    losses_of(net, BATCHES[0]).mean().backward()
    if begun:
        optimizer.step()
    net[0].eval()

    def collated(number: int) -> Any:
        random.random(), torch.rand(1)
        return BATCHES[number]

    loader: Any = DataLoader(
        range(ALL), batch_size=None, shuffle=True, generator=drawn, collate_fn=collated
    )

    def state() -> Any:
        own = {key: value.clone() for key, value in net.state_dict().items()}
        held = [value.clone() for of in optimizer.state.values() for value in of.values()]
        gradients, modes = [p.grad for p in net.parameters()], [m.training for m in net.modules()]
        states = torch.get_rng_state(), drawn.get_state(), random.getstate()
        return own, held, gradients, modes, states

    before, groups = state(), json.dumps(optimizer.state_dict()["param_groups"])
    interval = hdet.find_rate(net, optimizer, losses_of, loader, total_steps=1500)
    assert interval.trial.first_losses and same(state(), before) and bool(optimizer.state) == begun
    assert json.dumps(optimizer.state_dict()["param_groups"]) == groups


def test_what_it_cannot_be_given_is_refused() -> None:
    run = Run(lr=1e-3, controller=None)
    with pytest.raises(ValueError, match="driven by an Ensemble: call find_rate before it is made"):
        hdet.find_rate(run.net, run.optimizer, losses_of, BATCHES, total_steps=1500)
    with pytest.raises(TypeError, match=r"find_rate\(model, optimizer, ...\): got AdamW and Seq"):
        hdet.find_rate(run.optimizer, run.net, losses_of, BATCHES, total_steps=1500)
    with pytest.raises(ValueError, match="each parameter of the optimizer is frozen"):
        found(1e-4, net=model().requires_grad_(False))
    for count in (0, ALL - 1):
        with pytest.raises(ValueError, match=f"batches has {count}, and a trial takes 56"):
            found(1e-4, batches=iter(BATCHES[:count]))


def of_ranks(rank: int, world: int) -> RateInterval:
    net = DistributedDataParallel(model())
    with pytest.raises(ValueError, match="a trial takes 56 on each rank: pass more"):
        found(1e-4, batches=BATCHES[: ALL - rank])
    return found(1e-4, net=net, batches=[taught(100 * number + rank) for number in range(ALL)])


def test_all_ranks_find_the_same_and_each_brings_its_own_batches() -> None:
    one, other = run_ranks(of_ranks, 2)
    pairs = [zip(taught(100 * n), taught(100 * n + 1), strict=True) for n in range(ALL)]
    alone = found(1e-4, batches=[tuple(map(torch.cat, pair)) for pair in pairs])
    assert one == other
    assert (one.low, one.suggestion) == pytest.approx((alone.low, alone.suggestion), rel=1e-3)


class Sharp(torch.optim.SGD):
    """Steps along the gradient of other weights, which it asks for."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        torch._foreach_add_(params, aside := [0.05 * p.grad for p in params])
        torch.enable_grad()(closure)()
        torch._foreach_sub_(params, aside)
        super().step()


def test_an_optimizer_that_asks_for_a_closure_gets_the_arms_own() -> None:
    one, other = (found(0.01, kind).trial for kind in (Sharp, torch.optim.SGD))
    assert one.first_losses == other.first_losses
    for sharp, plain in zip(one.arms[:3], other.arms, strict=False):
        assert sharp.losses != plain.losses == pytest.approx(sharp.losses, rel=0.2)


WARMED = lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda step: min(1.0, step / 100))
CYCLIC = lambda made: torch.optim.lr_scheduler.CyclicLR(made, 1e-3, 0.1, 50, cycle_momentum=False)
SCHEDULES = {
    "OneCycleLR": one_cycle(0.01, 1500), "LambdaLR": WARMED, "CyclicLR": CYCLIC,
    "None": lambda made: None,
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rate_is_a_schedules_peak(name: str) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.0)
    given = {"scheduler": SCHEDULES[name](optimizer), "total_steps": 1500}
    before = optimizer.param_groups[0]["lr"]
    interval = hdet.find_rate(net, optimizer, losses_of, BATCHES, **given)
    peak = 0.1 if name == "CyclicLR" else 0.01
    assert interval.rate == interval.trial.arms[1].rate == pytest.approx(peak)
    assert optimizer.param_groups[0]["lr"] == before
