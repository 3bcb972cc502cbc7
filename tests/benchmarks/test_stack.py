"""The simulator of benchmarks.evidence.stack: its runs are hdet's own, whatever the method."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

import hdet
from benchmarks.evidence import stack
from benchmarks.evidence.stack import Method, Workload
from hdet.converge import Outer, Plain
from hdet.core.spread import Grid

from ..distributed import run_ranks

STEPS, SEED, NET = 30, 3, stack.mlp(6, 5, 3)
POINT = {"lr": 0.05, "weight_decay": 0.1, "label_smoothing": 0.1}


def examples() -> tuple[stack.Examples, stack.Examples]:
    g = torch.Generator().manual_seed(1)
    of = lambda n: (torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g))
    return of(60), of(20)


TINY = Workload("tiny", "", NET, examples, 40, "adamw", 0.1, 3, wrong=0.2, batch=16, steps=STEPS)


class Model(torch.nn.Module):
    def __init__(self, parts: list[torch.Tensor]) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(part[0].clone() for part in parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return NET.forward([p[None] for p in self.parts], x, lambda h: h)


SPREAD = {"lr": Grid(0.3)}
LOCAL: dict[str, Any] = {"gradients": "local", "moments": "keep"}
OPTIMIZERS = {
    "sgd": lambda groups, **more: hdet.FusedSGD(groups, lr=POINT["lr"], momentum=0.9, **more),
    "adamw": lambda groups, **more: hdet.FusedAdamW(
        groups, lr=POINT["lr"], betas=stack.BETAS, **more
    ),
}


def simulated(workload: Workload, method: Method, workers: int = 1) -> torch.Tensor:
    """Among other runs, whose values differ."""
    points = [{**POINT, "lr": 0.01}, POINT, {"lr": 0.02}]
    ends = stack.train(workload, method, workers, points, [SEED - 1, SEED])
    return ends[1, 1]


def trained(
    workload: Workload, make: Any, constant: bool = False, rank: int = 0, world: int = 1, **how: Any
) -> torch.Tensor:
    """The same run with hdet, of which this is one rank."""
    (x, y), _ = workload.data([SEED])
    model: torch.nn.Module = Model(NET.split(NET.draw(workload.name, "weights", SEED)[None]))
    parts = list(model.parameters())
    if how.get("sync") and how["sync"].begin:
        model = torch.nn.parallel.DistributedDataParallel(model)
    groups = [
        {"params": parts[::2], "weight_decay": POINT["weight_decay"]},
        {"params": parts[1::2], "weight_decay": 0.0},
    ]
    optimizer = make(groups)
    shape = lambda t: stack.shape(t, STEPS, constant)
    scheduler = LambdaLR(optimizer, shape)
    shared = how.pop("shared", False)
    ensemble = hdet.Ensemble(optimizer, scheduler, total_steps=STEPS, **how) if how else None
    smoothing = torch.tensor([POINT["label_smoothing"]])
    for chosen in workload.order(SEED):
        own = chosen.view(world, -1)[rank]
        loss = workload.losses(model(x[:, own]), y[:, own], smoothing).sum()
        loss.backward()
        for p in parts if shared else []:
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(loss) if ensemble else scheduler.step()
    if ensemble:
        ensemble.converge()
    with optimizer.averaged() if getattr(optimizer, "ema", ()) else contextlib.nullcontext():
        if isinstance(optimizer, hdet.FusedScheduleFreeAdamW):
            optimizer.eval()
        return torch.cat([p.detach().flatten() for p in parts])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_replica(name: str) -> None:
    workload = replace(TINY, optimizer=name)
    plain = trained(workload, OPTIMIZERS[name])
    torch.testing.assert_close(simulated(workload, Method(replicas=False)), plain)


QUADRATIC = hdet.QuadraticPeriod(2, 2 * POINT["lr"])
ON_RANKS: dict[str, tuple[str, Method, dict[str, Any]]] = {
    "local": ("sgd", Method(every=4), {}),
    "at the end": ("adamw", Method(), {"every": 10**6}),
    "spread": ("adamw", Method(every=4, spread=SPREAD), {}),
    "shared spread": ("sgd", Method(every=4, shared=1.0, spread=SPREAD), {"shared": True}),
    "outer": ("adamw", Method(every=4, outer=True), {"converge": Outer()}),
    "quadratic": ("sgd", Method(every=2, quadratic=2.0), {"every": QUADRATIC}),
    "second half": ("adamw", Method(shared=0.5), {"every": 10**6, "begin": 0.5}),
}


def on_a_rank(rank: int, world: int) -> dict[str, torch.Tensor]:
    ends = {}
    for name, (optimizer, method, said) in ON_RANKS.items():
        shared = said.get("shared", False)
        gradients = {} if shared else {**LOCAL, "begin": said.get("begin", 0)}
        every, average = said.get("every", method.every), said.get("converge", Plain())
        ends[name] = trained(
            replace(TINY, optimizer=optimizer), OPTIMIZERS[optimizer], rank=rank, world=world,
            shared=shared, seed=SEED,
            sync=hdet.Sync(every, converge=average, **gradients),
            knobs=[hdet.LearningRate(0.3 if method.spread else 0.0)],
        )  # fmt: skip
    return ends


def test_several_replicas() -> None:
    first, second = run_ranks(on_a_rank, 2)
    for name, (optimizer, method, _) in ON_RANKS.items():
        assert torch.equal(first[name], second[name])
        own = simulated(replace(TINY, optimizer=optimizer), method, 2)
        torch.testing.assert_close(own, first[name], msg=lambda text, name=name: f"{name}: {text}")


def test_an_outer_step_of_one_replica() -> None:
    sync = hdet.Sync(4, converge=Outer(), **LOCAL)
    end = trained(TINY, OPTIMIZERS["adamw"], sync=sync, knobs=[hdet.LearningRate(0.0)], seed=SEED)
    method = Method(replicas=False, every=4, outer=True)
    torch.testing.assert_close(simulated(TINY, method), end)


@pytest.mark.parametrize("constant", [False, True])
def test_an_average_over_time(constant: bool) -> None:
    make = lambda groups: OPTIMIZERS["adamw"](groups, ema=0.9)
    method = Method(replicas=False, ema=0.9, constant=constant)
    torch.testing.assert_close(simulated(TINY, method), trained(TINY, make, constant))


def test_schedule_free() -> None:
    make = lambda groups: hdet.FusedScheduleFreeAdamW(groups, lr=POINT["lr"], betas=stack.BETAS)
    method = Method(replicas=False, free="free")
    torch.testing.assert_close(simulated(TINY, method), trained(TINY, make, True))
