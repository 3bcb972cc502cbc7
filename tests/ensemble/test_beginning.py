"""What a cycle that is taken back goes back to: all that the run had at its first step. And buffers, which forward passes change."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.tensors.buffers import ReplicaTensors
from tests.harness import Run, losses_of, model, taught

from ..adversary.common import bits
from ..distributed import run_ranks
from .helpers import STOCK, flat, on_all_ranks, same, state_of, told, trained


def batch_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


class Short(Run):
    """The first cycle, of four steps, is taken back, because its losses are NaN."""

    def step(self, report: Any = None) -> torch.Tensor:
        return super().step(math.nan if self.index < 4 else report)


def short(net: nn.Module, **settings: Any) -> Run:
    buffers = {"buffers": net} if any(True for _ in net.buffers()) else {}
    defaults = {
        "lr": 1e-2,
        "total": 400,
        "every": 4,
        "spread": 0.0,
        "ddp": False,
        "data": lambda key: taught(key // 100),
        **buffers,
    }
    return Short(net=net, divergence=hdet.Divergence(rollback="device"), **{**defaults, **settings})


# -- weights and buffers -------------------------------------------------------------------------------------------------


class Normaliser(nn.Module):
    """As reinforcement learning has them: a new tensor for the statistics in every pass; one of them is made in the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 1)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("late", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count = self.count + len(x)
            self.mean = self.mean + (x.mean(0) - self.mean) * (len(x) / self.count).to(x.dtype)
            self.late = torch.ones(3) if self.late is None else self.late + 1
        return self.layer(x - self.mean)


class Counting(nn.Module):
    """In eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x)


def load(net: nn.Module) -> None:
    other = batch_norm()
    trained(other, torch.optim.SGD(other.parameters(), lr=0.01), range(20))
    net.load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    ("make", "before"),
    [
        (batch_norm, []),
        (batch_norm, [load]),
        (batch_norm, [nn.Module.double]),
        (Counting, []),
        (Normaliser, []),
    ],
)
def test_a_restart_goes_back_to_what_its_first_step_found(
    make: Callable[[], nn.Module], before: list[Any]
) -> None:
    """Buffers are those after the first forward pass, which comes before that step."""
    net = make()
    run = short(net)
    for act in before:
        act(net)
    begun = copy.deepcopy(net)
    losses_of(begun, taught(0))
    run.steps(3)
    assert not same(state_of(net), state_of(begun))
    assert same(state_of(run.steps(1).net), state_of(begun))


@pytest.mark.parametrize("make", [model, batch_norm])
def test_weights_that_are_nan_are_taken_back(make: Callable[[], nn.Module]) -> None:
    """And the run goes on from the beginning."""
    net = make()
    run = short(net)
    begin = run.weights()
    run.steps(2)
    with torch.no_grad():
        next(net.parameters()).fill_(math.nan)
    run.steps(2)
    assert torch.equal(run.weights(), begin)
    assert all(value.isfinite().all() for value in run.steps(100).net.state_dict().values())


def test_copies_of_the_parameters_in_an_optimizer_are_followed() -> None:
    net = model()
    copied = nn.ParameterList([p.detach().clone() for p in net.parameters()])

    def refresh() -> None:
        with torch.no_grad():
            for p, q in zip(net.parameters(), copied, strict=True):
                p.copy_(q)

    def gradients(*_: Any) -> None:
        for p, q in zip(net.parameters(), copied, strict=True):
            q.grad, p.grad = p.grad, None

    run = short(
        net,
        optimizer=lambda *_, **settings: torch.optim.AdamW(copied.parameters(), **settings),
        refresh=refresh,
    )
    run.optimizer.register_step_pre_hook(gradients)
    run.optimizer.register_step_post_hook(lambda *_: refresh())
    begin = state_of(net)
    run.steps(3)
    assert not same(state_of(net), begin)
    assert same(state_of(run.steps(1).net), begin)


# -- the optimizer's state -------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Any] = {
    **{name: getattr(torch.optim, name) for name in STOCK},
    "SGD": functools.partial(torch.optim.SGD, momentum=0.9),
    "FusedSGD": functools.partial(hdet.FusedSGD, momentum=0.9),
    "FusedAdamW": hdet.FusedAdamW,
    "FusedLion": hdet.FusedLion,
    "fp32": functools.partial(hdet.FusedAdamW, master_weights="fp32"),
    "split": functools.partial(hdet.FusedAdamW, master_weights="split"),
}


def moments(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """By parameter."""
    return [
        copy.deepcopy(dict(optimizer.state.get(p, {})))
        for group in optimizer.param_groups
        for p in group["params"]
    ]


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restart_begins_as_a_new_run_would(name: str, loaded: bool) -> None:
    """With the moments that were loaded after construction, as everything that is loaded; and a parameter that had none then has none again."""

    def build(net: nn.Module) -> Any:
        optimizer = OPTIMIZERS[name](net.parameters(), lr=1e-2)
        if loaded:
            optimizer.load_state_dict(
                copy.deepcopy({**state, "param_groups": optimizer.state_dict()["param_groups"]})
            )
        return optimizer

    dtype = torch.bfloat16 if name in ("fp32", "split") else torch.float32
    net, other = model().to(dtype), model().to(dtype)
    before = OPTIMIZERS[name](net.parameters(), lr=1e-2)
    trained(net, before, range(7))
    state = before.state_dict()
    if name == "AdamW":
        del state["state"][3]
    run = short(net, optimizer=lambda *_, **__: build(net))
    begin, held = state_of(net), moments(run.optimizer)
    assert any(held) is loaded or name == "Adagrad"
    run.steps(4)
    assert same(state_of(net), begin) and (same(moments(run.optimizer), held) or not loaded)
    other.load_state_dict(begin)
    optimizer = build(other)
    for _ in range(3):
        optimizer.param_groups[0]["lr"] = run.rate
        optimizer.zero_grad()
        losses_of(other, taught(run.index)).mean().backward()
        optimizer.step()
        run.steps(1)
        assert torch.equal(run.weights(), flat(other))


# -- buffers in the average ------------------------------------------------------------------------------------------------


def averaged(rank: int, **settings: Any) -> Run:
    """Each rank has seen data of its own."""
    net = Normaliser()
    settings = {
        "scheduler": None,
        "spread": 0.0,
        "every": 2,
        "gradients": "local",
        "moments": "average",
        **settings,
    }
    return Run(rank, net=net, ddp=False, buffers=net, **settings)


def replaced(rank: int, world: int, converge: Any) -> Any:
    """(equal?, said to be so?, said to be so before the step ends?) after each step, after a further pass and after `converge`."""
    run = averaged(rank, converge=converge)
    run.net.double()
    seen = []
    for _ in range(4):
        run.backward()
        passed = run.ensemble.in_sync
        run.optimizer.step()
        run.ensemble.step(1.0)
        run.index += 1
        seen.append((on_all_ranks(run.net.mean), run.ensemble.in_sync, passed))
    run.net(taught(rank)[0].double())
    moved = run.ensemble.in_sync
    run.ensemble.converge()
    return seen, moved, on_all_ranks(run.net.mean), run.ensemble.in_sync


@pytest.mark.parametrize(
    "converge",
    [hdet.converge.Plain(), hdet.converge.Streaming(2), hdet.converge.Compressed("bf16")],
    ids=repr,
)
def test_buffers_that_a_forward_pass_replaces_are_averaged_and_converged_is_true(
    converge: Any,
) -> None:
    for seen, moved, equal, converged in run_ranks(replaced, 2, converge):
        if isinstance(converge, hdet.converge.Plain):
            assert seen == [(step % 2 == 1, step % 2 == 1, False) for step in range(4)]
        assert not moved and equal and converged


def unequal(rank: int, world: int) -> str:
    """A buffer that only one of them has made by now."""
    run = averaged(rank, moments="keep")
    run.net.eval()
    run.steps(1)
    run.net.train(rank == 0)
    return told(lambda: run.steps(1))


def test_buffers_that_not_all_replicas_have_are_refused() -> None:
    assert all("the model's buffers differ in number" in text for text in run_ranks(unequal, 2))


def test_a_rollback_takes_back_the_model_s_buffers_counters_included() -> None:
    net = batch_norm()
    run = Run(
        net=net,
        lr=1e-3,
        total=100,
        every=2,
        buffers=net,
        data=taught,
        divergence=hdet.Divergence(rollback="device"),
    ).steps(4)
    x, _ = taught(run.index)
    net(x)  # the next step's forward pass comes before its anchor
    begin = state_of(net)
    net.eval()
    run.step(report=math.nan)
    net.train()
    net(x)
    net.eval()
    run.step(report=math.nan)
    assert run.records[-1]["rolled_back"] and same(state_of(net), begin)


def test_the_tensors_that_are_averaged_are_those_of_the_moment() -> None:
    net = Normaliser()
    tensors = ReplicaTensors(list(net.parameters()), model=net)
    assert len(tensors) == 4 and tensors[2] is net.count and tensors[:1] == [net.layer.weight]
    marks = tensors.marks()
    assert tensors.unwritten(marks)
    net(taught(0)[0])
    assert len(tensors) == 5 and tensors[3] is net.mean and not tensors.unwritten(marks)
    marks = tensors.marks()
    net.mean.add_(1)
    assert not tensors.unwritten(marks)


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize(
    ("dtype", "masters"),
    [
        (torch.float32, None),
        (torch.float64, None),
        (torch.bfloat16, None),
        (torch.bfloat16, "fp32"),
        (torch.bfloat16, "split"),
    ],
)
def test_weights_masters_and_moments_are_taken_back_to_the_last_bit(
    dtype: torch.dtype, masters: str | None, place: str
) -> None:
    """After a cycle: masters are beside their weights by then."""
    optimizer = (
        functools.partial(hdet.FusedAdamW, master_weights=masters) if masters else torch.optim.AdamW
    )
    run = Run(
        lr=1e-2, dtype=dtype, optimizer=optimizer, divergence=hdet.Divergence(rollback=place)
    ).steps(5)
    held = bits([run.weights(), run.optimizer.state_dict()["state"]])
    for _ in range(4):
        run.step(report=math.nan)
    assert bits([run.weights(), run.optimizer.state_dict()["state"]]) != held
    run.step(report=math.nan)
    assert bits([run.weights(), run.optimizer.state_dict()["state"]]) == held
