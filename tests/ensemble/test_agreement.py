"""Ranks that are not in the same run: told before the first step, or at the end of the cycle in which they part. On every rank alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torchs

import hdet
from tests.harness import batch, loss_of, model, policies

from ..distributed import run_ranks

Make = Callable[[int], tuple[torch.optim.Optimizer, Any, dict[str, Any]]]


def trained(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def plain(
    rank: int, *, lr: float = 1e-2, kind: Any = torch.optim.AdamW, **settings: Any
) -> tuple[torch.optim.Optimizer, None, dict[str, Any]]:
    return kind(model().parameters(), lr=lr, **settings), None, {}


def scheduled(rank: int, make: Callable[[torch.optim.Optimizer], Any]) -> tuple[torch.optim.Optimizer, Any, dict[str, Any]]:
    optimizer = torch.optim.SGD(model().parameters(), lr=1e-2, momentum=0.9)
    return optimizer, make(optimizer), {}


def two_vectors(rank: int, values: tuple[float, float], *, swapped: bool) -> list[nn.Parameter]:
    vectors = [nn.Parameter(torch.full((3,), value)) for value in values]
    return vectors[::-1] if swapped else vectors


def square(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    return net


def named(rank: int, *, by: str) -> tuple[torch.optim.Optimizer, Any, dict[str, Any]]:
    """Other initial values on each rank, and the two layers in another order on one."""
    net = square(rank)
    layers = list(net)[:: -1 if rank == 1 else 1]
    if by == "param_names":
        names = dict(net.named_parameters())
        listed = [(name, names[name]) for layer in layers for name in names if names[name] in set(layer.parameters())]
        return torch.optim.SGD(listed, lr=0.1), None, {}
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    if by == "buffers":
        return optimizer, None, {"buffers": net}
    return optimizer, None, {"controller": hdet.LineController(net), "total_steps": 100, "every": 10}


DIFFERENT: dict[str, tuple[str, Make]] = {
    "T_max": ("scheduler's class and settings", lambda r: scheduled(r, lambda o: torchs.CosineAnnealingLR(o, 30 + 10 * (r == 1)))),
    "gamma": ("scheduler's class and settings", lambda r: scheduled(r, lambda o: torchs.ExponentialLR(o, 0.9 + 0.01 * (r == 1)))),
    "class of the scheduler": (
        "scheduler's class and settings",
        lambda r: scheduled(r, lambda o: torchs.StepLR(o, 10) if r == 1 else torchs.ExponentialLR(o, 0.9)),
    ),
    "a scheduler on one rank only": (
        "scheduler's class and settings",
        lambda r: scheduled(r, lambda o: None if r == 1 else torchs.StepLR(o, 10)),
    ),
    "pct_start": (
        "scheduler's settings by parameter group",
        lambda r: scheduled(r, lambda o: torchs.OneCycleLR(o, 0.1, 40, pct_start=0.3 + 0.1 * (r == 1))),
    ),
    "inside of a SequentialLR": (
        "scheduler's settings by parameter group",
        lambda r: scheduled(r, lambda o: torchs.SequentialLR(o, [torchs.ConstantLR(o, total_iters=5), torchs.StepLR(o, 10 + r)], [5])),
    ),
    "betas": ("optimizer's class and settings", lambda r: plain(r, betas=(0.9, 0.99 + 0.001 * (r == 1)))),
    "decay": ("optimizer's class and settings", lambda r: plain(r, weight_decay=0.1 * (r == 1))),
    "eps": ("optimizer's class and settings", lambda r: plain(r, eps=1e-8 * (1 + (r == 1)))),
    "momentum": ("optimizer's class and settings", lambda r: plain(r, kind=torch.optim.SGD, momentum=0.9 * (r == 1))),
    "class": (
        "optimizer's class and settings",
        lambda r: plain(r, kind=torch.optim.Adam if r == 1 else torch.optim.AdamW, weight_decay=0.0),
    ),
    "clipping": ("optimizer's class and settings", lambda r: plain(r, kind=hdet.FusedAdamW, max_grad_norm=1.0 + (r == 1))),
    "order": ("order of the parameters", lambda r: (torch.optim.SGD(two_vectors(r, (0.0, 10.0), swapped=r == 1), lr=0.1), None, {})),
    "order, by param_names": ("names of the parameters", lambda r: named(r, by="param_names")),
    "order, by the buffers' module": ("names of the parameters", lambda r: named(r, by="buffers")),
    "order, by the line's model": ("names of the parameters", lambda r: named(r, by="line")),
}


def start(rank: int, world: int, case: str) -> str:
    optimizer, scheduler, settings = DIFFERENT[case][1](rank)
    ensemble = hdet.Ensemble(optimizer, scheduler, **policies(**{"every": 5, **settings}))
    parameters = trained(optimizer)
    for p in parameters:
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in parameters]
    try:
        optimizer.step()
        stepped = [p.detach().clone() for p in parameters]
        ensemble.step(1.0, closure=lambda: torch.ones(4))
    except hdet.ReplicaDisagreement as error:
        assert all(torch.equal(a, b.detach()) for a, b in zip(stepped, parameters, strict=True)), "nothing was averaged"
        assert any(not torch.equal(a, b) for a, b in zip(before, stepped, strict=True))
        return str(error)
    return "no error"


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_differs_is_named_before_anything_is_averaged(case: str) -> None:
    messages = run_ranks(start, 3, case)
    assert len(set(messages)) == 1 and DIFFERENT[case][0] in messages[0]
    if "SequentialLR" not in case:
        assert "ranks 0,2" in messages[0] or "ranks 0 and 2" in messages[0] or "0, 2" in messages[0], messages[0]


class Warm:
    """A schedule that holds what no other process has."""

    def __init__(self, rank: int) -> None:
        self.rank, self.shape = rank, 0.5

    def __call__(self, step: int) -> float:
        return min(1.0, self.shape + step / 10)


def alike(rank: int, world: int, case: str) -> str:
    """What differs legitimately between ranks."""
    torch.manual_seed(rank)
    if case == "closures":
        optimizer = torch.optim.SGD([{"params": [p]} for p in model().parameters()], lr=0.1)
        factors = [Warm(rank), lambda step: 0.5 + step / 10, Warm(rank + 1), lambda step: 0.5]
        ensemble = hdet.Ensemble(optimizer, torchs.LambdaLR(optimizer, factors), sync=hdet.Sync(2))
    elif case == "initial values":
        net = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        ensemble = hdet.Ensemble(optimizer, sync=hdet.Sync(2, buffers=net))
    elif case == "warm noise":
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with torch.no_grad():
            for p in net.parameters():
                p.add_(torch.randn_like(p), alpha=1e-3)
        ensemble = hdet.Ensemble(optimizer, sync=hdet.Sync(2))
    elif case == "equal vectors in another order":
        optimizer = torch.optim.SGD(two_vectors(rank, (1.0, 1.0), swapped=rank == 1), lr=0.1)
        ensemble = hdet.Ensemble(optimizer, sync=hdet.Sync(2))
    else:
        optimizer = torch.optim.AdamW(model().parameters(), lr=0.1, foreach=rank == 1)
        ensemble = hdet.Ensemble(optimizer, sync=hdet.Sync(2))
    try:
        for _ in range(4):
            for p in trained(optimizer):
                p.grad = torch.ones_like(p)
            optimizer.step()
            ensemble.step(1.0)
    except hdet.ReplicaDisagreement as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("case", ["closures", "initial values", "warm noise", "equal vectors in another order", "foreach"])
def test_what_may_differ_is_let_pass(case: str) -> None:
    assert run_ranks(alike, 2, case) == ["no error"] * 2


def stages(rank: int, world: int, broken: bool) -> str:
    """Members 0 and 1 of two replicas hold different parts, with different optimizers and numbers of groups."""
    stage = rank // 2
    torch.manual_seed(stage)
    replicas = hdet.Replicas.from_layout(pp=2)
    nets = [nn.Linear(3, 3) for _ in range(1 + stage)]
    groups = [{"params": list(net.parameters())} for net in nets]
    momentum = 0.5 if broken and rank == 3 else 0.9
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=momentum) if stage else torch.optim.AdamW(groups, lr=0.1)
    ensemble = hdet.Ensemble(optimizer, torchs.StepLR(optimizer, 3), replicas=replicas, sync=hdet.Sync(2))
    try:
        for _ in range(4):
            for p in trained(optimizer):
                p.grad = torch.ones_like(p)
            optimizer.step()
            ensemble.step(1.0 if stage else None)
    except hdet.ReplicaDisagreement as error:
        return str(error)
    return "no error"


def test_stages_of_a_pipeline_have_settings_of_their_own() -> None:
    assert run_ranks(stages, 4, False) == ["no error"] * 4
    messages = run_ranks(stages, 4, True)
    assert len(set(messages)) == 1 and "optimizer's class and settings" in messages[0] and "rank 3" in messages[0]


# -- in the course of a run ----------------------------------------------------------------------------------------------------


def drifting(rank: int, world: int, how: str) -> Any:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    # Two lambdas look alike from outside, and so does a scheduler that the user steps.
    drifts = rank == 1
    scheduler = torchs.LambdaLR(optimizer, lambda step: 1.0 if step < 7 or not drifts else 0.5) if how == "lambda" else None
    own = torchs.ExponentialLR(optimizer, 0.99 if drifts else 0.98) if how == "the user's own" else None
    ensemble = hdet.Ensemble(optimizer, scheduler, sync=hdet.Sync(5, gradients="local", moments="keep"))
    for step in range(1, 21):
        loss_of(net, batch(100 * step + rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if how == "by hand" and drifts and step == 7:
            optimizer.param_groups[0]["lr"] *= 0.5
        before = torch.cat([p.detach().flatten() for p in net.parameters()])
        try:
            ensemble.step(1.0)
        except hdet.ReplicaDisagreement as error:
            assert torch.equal(before, torch.cat([p.detach().flatten() for p in net.parameters()]))
            return step, str(error)
        if own is not None:
            own.step()
    return "no error"


@pytest.mark.parametrize(("how", "at"), [("lambda", 10), ("the user's own", 5), ("by hand", 10)])
def test_values_that_part_are_noticed_at_the_end_of_the_cycle(how: str, at: int) -> None:
    found = run_ranks(drifting, 3, how)
    assert len(set(found)) == 1 and found[0][0] == at, found
    assert "schedule's values of lr differ between replicas" in found[0][1]


def converging(rank: int, world: int) -> str:
    optimizer = torch.optim.SGD(model().parameters(), lr=1e-2)
    ensemble = hdet.Ensemble(optimizer, sync=hdet.Sync(50))
    for step in range(3):
        for p in trained(optimizer):
            p.grad = torch.ones_like(p)
        optimizer.step()
        ensemble.step(1.0)
        if rank == 1 and step == 1:
            optimizer.param_groups[0]["lr"] = 0.5
    try:
        ensemble.converge()
    except hdet.ReplicaDisagreement as error:
        return str(error)
    return "no error"


def test_converge_looks_too() -> None:
    messages = run_ranks(converging, 2)
    assert len(set(messages)) == 1 and "schedule's values of lr differ" in messages[0]
