"""`close()` and `del` free a run at once: its model, its optimizer and what they keep. A refused
one leaves nothing behind."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.integrations.common import Adapter

from ..distributed import run_ranks
from ..freed import left_alive, tensors_of
from ..harness import Run, TwoReplicas, batch, loss_of, losses_of, model, one_cycle, probe


def train(
    controller: Callable[[nn.Module], hdet.Controller] | None = None,
    *,
    search: Callable[[nn.Module], hdet.AutoLR] | None = None,
    make: Any = torch.optim.AdamW,
    lr: float = 1e-5,
    steps: int = 12,
    first: int = 0,
    sync: hdet.Sync | None = None,
    knobs: Callable[[nn.Module], list[Any]] | None = None,
    divergence: hdet.Divergence | None = None,
    replicas: hdet.Replicas | None = None,
    closes: bool = True,
) -> dict[str, Any]:
    """Trains, closes, and returns what is to be freed, by name."""
    net = model()
    optimizer = make(net.parameters(), lr=lr)
    scheduler = one_cycle(lr, 1000)(optimizer)
    ensemble = hdet.Ensemble(
        optimizer,
        scheduler,
        search=search and search(net),
        controller=controller and controller(net),
        knobs=knobs and knobs(net),
        sync=sync or hdet.Sync(5),
        divergence=divergence,
        replicas=replicas,
    )
    for step in range(steps):
        data = batch(first + step)
        with ensemble.explore():
            loss = loss_of(net, data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(loss, closure=_Losses(net, data))
    ensemble.report()
    if closes:
        ensemble.close()
    parts = {"model": net, "optimizer": optimizer, "scheduler": scheduler, "ensemble": ensemble}
    return {**tensors_of(net, optimizer), **parts}


class _Losses:
    def __init__(self, net: nn.Module, data: Any) -> None:
        self.net, self.data = net, data

    def __call__(self) -> torch.Tensor:
        return losses_of(self.net, self.data)


def held_out(net: nn.Module) -> hdet.AutoLR:
    return hdet.AutoLR(net, val_batches=(losses_of, [batch(10_000)]))


CASES: dict[str, dict[str, Any]] = {
    "no controller": {},
    "fused": {"make": hdet.FusedAdamW},
    "before the first step": {"search": hdet.AutoLR, "steps": 0},
    "in a trial": {"search": hdet.AutoLR, "steps": 40},
    "after a trial": {"search": hdet.AutoLR, "steps": 60},
    "after a trial that lowers the rate": {"search": hdet.AutoLR, "lr": 30.0, "steps": 120},
    "best weights": {"search": held_out, "steps": 60},
    "published": {"controller": lambda net: hdet.SoftmaxController(), "replicas": TwoReplicas()},
    "probe": {"controller": lambda net: probe(net), "replicas": TwoReplicas()},
    "many knobs": {"knobs": lambda net: [hdet.LearningRate(0.1), hdet.WeightDecay(0.1)]},
    "snapshots": {"divergence": hdet.Divergence(rollback="device")},
    "local gradients": {"sync": hdet.Sync(5, gradients="local", moments="average")},
}


NOT_CLOSED = ["fused", "in a trial", "probe", "snapshots"]


@pytest.mark.parametrize(
    ("name", "closes"), [*((name, True) for name in CASES), *((name, False) for name in NOT_CLOSED)]
)
def test_a_run_is_freed(name: str, closes: bool) -> None:
    assert left_alive(lambda: train(**CASES[name], closes=closes)) == []


def hooks(*owners: Any) -> list[str]:
    return [name for one in owners for name, held in vars(one).items() if "hooks" in name and held]


def _of_adapter(held: list[Any], net: nn.Module) -> hdet.AutoLR:
    search, adapter = hdet.AutoLR(net), Adapter(print)
    search.framework, adapter.ensembles = adapter, held
    return search


class _Holds:
    """A scheduler that leads to what drives it, as the inside of a OneCycleAutoLR does."""

    def __init__(self, optimizer: torch.optim.Optimizer, held: list[Any]) -> None:
        self.inner, self.held = one_cycle(1e-3, 1500)(optimizer), held
        self.step, self.state_dict = self.inner.step, self.inner.state_dict
        self.load_state_dict = self.inner.load_state_dict


LOCAL = {"replicas": TwoReplicas(), "gradients": "local", "moments": "keep"}
CIRCLES: dict[str, Callable[[list[Any]], dict[str, Any]]] = {
    "log": lambda held: {"log": lambda *_: held},
    "function": lambda held: {"search": lambda net: hdet.AutoLR(net, before_step=lambda: held)},
    "adapter": lambda held: {"search": functools.partial(_of_adapter, held)},
    "scheduler": lambda held: {
        "scheduler": lambda optimizer: _Holds(optimizer, held), "search": hdet.AutoLR,
    },
    "average": lambda held: {
        "log": lambda *_: held, "converge": hdet.converge.Outer(), "every": 50, **LOCAL,
    },
}  # fmt: skip


@pytest.mark.parametrize("circle", CIRCLES)
def test_one_that_its_own_parts_lead_back_to_is_closed_and_freed(
    circle: str,
) -> None:
    held: list[Any] = []
    run = Run(total=1500, closure=True, ddp=False, **CIRCLES[circle](held)).steps(2)
    held.append(run.ensemble)
    run.ensemble.load_state_dict(run.saved()["ensemble"])
    run.step()
    ref, net, optimizer = weakref.ref(run.ensemble), run.net, run.optimizer
    assert ref() is not None and hooks(optimizer, *net.modules())
    del run, held
    gc.collect()
    assert ref() is None and hooks(optimizer, *net.modules()) == []
    hdet.Ensemble(optimizer).close()


class Refusing(hdet.controllers.Measurement):
    """Refuses the first run, in the method ``at``."""

    def __init__(self, at: str) -> None:
        self.at = at

    def watch(self, watched: Any) -> None:
        self.refuse("watch")

    def reset(self) -> None:
        self.refuse("reset")

    def refuse(self, where: str) -> None:
        if where == self.at:
            self.at = ""
            raise ValueError("refused")


class Measuring(hdet.Controller):
    needs_replicas = False

    def __init__(self, at: str) -> None:
        super().__init__()
        self.measurements = {"mine": Refusing(at)}

    def decide(self, evidence: hdet.Evidence) -> list[hdet.Decision]:
        return [hdet.Decision(factor=0.9) for _ in evidence.knobs]


@pytest.mark.parametrize("at", ["watch", "reset", "attach", "build"])
@pytest.mark.filterwarnings("ignore:total_steps is", "ignore:the run has")
def test_a_refused_one_has_changed_nothing(at: str) -> None:
    """Neither in what it was given, nor in what becomes of it in the next one."""
    runs = []
    for is_refused in (True, False):
        net, controller = model(), Measuring(at if is_refused else "")
        search = hdet.AutoLR(net, budget=0, val_batches=(losses_of, [batch(10_000)]))
        if is_refused:
            optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
            scheduler = one_cycle(3e-3, 1500)(optimizer)
            optimizer.step(), scheduler.step()  # which is no first step any more
            given: dict[str, Any] = {"scheduler": scheduler, "total_steps": 1500}
            if at == "attach":
                given = {}  # of unknown length
            if at == "build":
                given["sync"] = hdet.Sync(5, converge=_Refused())
            step = optimizer.step
            with pytest.raises(ValueError, match="refused|of known length"):
                hdet.Ensemble(optimizer, search=search, controller=controller, **given)
            assert optimizer.step == step and hooks(optimizer, *net.modules()) == []
        run = Run(net=net, lr=1e-7, total=1500, search=search, controller=controller).steps(30)
        runs.append((run.weights(), run.search.report().splitlines()[0], run.ensemble.values()))
    (weights, report, values), (expected, *others) = runs
    assert torch.equal(weights, expected) and [report, values] == others and "->" in report


class _Refused(hdet.converge.Plain):
    def build(self, task: Any) -> Any:
        raise ValueError("refused")


def test_co_resident_replicas_are_freed() -> None:
    def trained() -> dict[str, Any]:
        net = model()
        replicas = hdet.CoresidentReplicas(net, 2)
        optimizer = hdet.FusedAdamW(net.parameters(), lr=1e-3)
        ensemble = hdet.Ensemble(optimizer, total_steps=100, replicas=replicas)
        for step in range(20):
            for k in range(2):
                with replicas.use(k):
                    loss = loss_of(net, batch(2 * step + k))
                    loss.backward()
                    ensemble.observe(loss)
            optimizer.step()
            optimizer.zero_grad()
            ensemble.step()
        found = {**tensors_of(net, optimizer), "model": net, "optimizer": optimizer}
        ensemble.close()
        return found

    assert left_alive(trained) == []


WAYS = {
    "plain": hdet.converge.Plain(),
    "exact": hdet.converge.ExactLocal(),
    "outer": hdet.converge.Outer(),
    "compressed": hdet.converge.Compressed("int8"),
}


def _left_on_a_rank(rank: int, world_size: int) -> dict[str, list[str]]:
    return {name: left_alive(functools.partial(_train, name, 1000 * rank)) for name in WAYS}


def _train(name: str, first: int) -> dict[str, Any]:
    if name == "exact":  # equal data, for gradients are shared
        sync, first = hdet.Sync(5, converge=WAYS[name]), 0
    else:
        sync = hdet.Sync(5, converge=WAYS[name], gradients="local", moments="keep")
    return train(make=hdet.FusedLion, sync=sync, first=first, steps=12)


def test_a_run_of_several_processes_is_freed() -> None:
    for left in run_ranks(_left_on_a_rank, 2):
        assert left == {name: [] for name in WAYS}
