"""What a cycle that is taken back goes back to: all that the run had at its first step. Buffers."""

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
from hdet.converge import Compressed, Plain, Streaming
from tests.harness import Run, losses_of, model, taught

from ..adversary.common import bits
from ..checkpoint.helpers import FusedEightBit
from ..distributed import run_ranks
from .helpers import (
    MASTERS,
    SPLIT,
    STOCK,
    TAKEN_BACK,
    filled,
    flat,
    foreign,
    on_all_ranks,
    same,
    state_of,
    told,
    trained,
)


def batch_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


class Short(Run):
    """The first cycle, of four steps, is taken back, because its losses are NaN."""

    def __init__(self, net: nn.Module, **settings: Any) -> None:
        defaults = {"buffers": net} if any(True for _ in net.buffers()) else {}
        super().__init__(
            net=net, data=lambda key: taught(key // 100), lr=1e-2, total=400, every=4, spread=0.0,
            **{"divergence": TAKEN_BACK, **defaults, **settings},
        )  # fmt: skip

    def step(self, report: Any = None) -> torch.Tensor:
        return super().step(math.nan if self.index < 4 else report)


class Normaliser(nn.Module):
    """As in reinforcement learning: every pass makes new tensors for statistics."""

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


class Counting(nn.Linear):
    """Writes to its buffer, in eval mode too."""

    def __init__(self) -> None:
        super().__init__(6, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += x.detach().mean()
        return super().forward(x)


def load(net: nn.Module) -> None:
    other = batch_norm()
    trained(other, torch.optim.SGD(other.parameters(), lr=0.01), range(20))
    net.load_state_dict(other.state_dict())


@pytest.mark.parametrize(("make", "act"), [
    (batch_norm, nn.Module.train), (batch_norm, load), (batch_norm, nn.Module.double),
    (Counting, nn.Module.train), (Normaliser, nn.Module.train),
])  # fmt: skip
def test_a_restart_goes_back_to_its_first_step(make: Any, act: Any) -> None:
    """Buffers are those after the first forward pass, which comes before that step."""
    net = make()
    run = Short(net)
    act(net)
    begun = copy.deepcopy(net)
    losses_of(begun, taught(0))
    assert not same(state_of(run.steps(3).net), state_of(begun))
    assert same(state_of(run.steps(1).net), state_of(begun))


@pytest.mark.parametrize("make", [model, batch_norm])
def test_weights_that_are_nan_are_taken_back(make: Callable[[], nn.Module]) -> None:
    """And the run goes on from the beginning."""
    run = Short(make())
    begin = run.weights()
    filled(run.steps(2).net, math.nan, parameters=1)
    assert torch.equal(run.steps(2).weights(), begin)
    assert all(value.isfinite().all() for value in run.steps(100).net.state_dict().values())


def test_copies_of_the_parameters_in_an_optimizer_are_followed() -> None:
    net = model()
    copied = copy.deepcopy(net)

    def refresh(*_: Any) -> None:
        with torch.no_grad():
            for p, q in zip(net.parameters(), copied.parameters(), strict=True):
                p.copy_(q)

    def gradients(*_: Any) -> None:
        for p, q in zip(net.parameters(), copied.parameters(), strict=True):
            q.grad, p.grad = p.grad, None

    def optimizer(_: Any, **settings: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(copied.parameters(), **settings)

    run = Short(net, optimizer=optimizer, refresh=refresh)
    run.optimizer.register_step_pre_hook(gradients)
    run.optimizer.register_step_post_hook(refresh)
    begin = state_of(net)
    assert not same(state_of(run.steps(3).net), begin)
    assert same(state_of(run.steps(1).net), begin)


def test_a_rollback_takes_back_the_model_s_buffers_counters_included() -> None:
    """In a later cycle; the next step's forward pass comes before its anchor."""
    net = batch_norm()
    run = Run(
        net=net, lr=1e-3, total=100, every=2, buffers=net, data=taught, divergence=TAKEN_BACK
    ).steps(4)
    passed = []
    for _ in range(2):
        net.train()(taught(4)[0])
        passed.append(state_of(net.eval()))
        run.step(report=math.nan)
    assert run.records[-1]["rolled_back"] and same(state_of(net), passed[0])


class Counts(torch.optim.SGD):
    """Its counter is a number, its tensors are in lists and dicts, and some are no parameter's."""

    def step(self, closure: Any = None) -> None:
        everyone = self.state.setdefault("all", {"steps": 0})
        everyone["steps"] += 1
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            state.setdefault("past", []).append(p.grad.clone())
            state.setdefault("inner", {"sum": torch.zeros_like(p)})["sum"].add_(p.grad)
            move = (state["inner"]["sum"] + state["past"][0]) / everyone["steps"]
            p.data.sub_(0.01 / state["step"] * move)


OPTIMIZERS: dict[str, Any] = {
    **{name: getattr(torch.optim, name) for name in STOCK},
    "SGD": functools.partial(torch.optim.SGD, momentum=0.9),
    "FusedSGD": functools.partial(hdet.FusedSGD, momentum=0.9),
    "FusedAdamW": hdet.FusedAdamW,
    "FusedLion": hdet.FusedLion,
    "fp32": MASTERS,
    "split": SPLIT,
    "8 bits": FusedEightBit,
    "Counts": Counts,
    # What does not begin as zeros (weights beside the parameters), or is counted in a group.
    "AdamWScheduleFree": foreign("schedulefree", "AdamWScheduleFree"),
    "Prodigy": foreign("prodigyopt", "Prodigy"),
    "DAdaptAdam": foreign("dadaptation", "DAdaptAdam"),
}


def dtype_of(name: str) -> torch.dtype:
    return torch.bfloat16 if name in ("fp32", "split") else torch.float32


def moments(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """By parameter."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    return [copy.deepcopy(dict(optimizer.state.get(p, {}))) for p in own]


@pytest.mark.parametrize("loaded", [None, "device", "host"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restart_begins_as_a_new_run_would(name: str, loaded: str | None) -> None:
    """With the moments that were loaded; a parameter that had none has none again."""

    def build(net: nn.Module) -> Any:
        optimizer = OPTIMIZERS[name](net.parameters(), lr=1e-2)
        if loaded:
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict(copy.deepcopy({**state, "param_groups": groups}))
        return optimizer

    net, other = (model().to(dtype_of(name)) for _ in range(2))
    before = OPTIMIZERS[name](net.parameters(), lr=1e-2)
    trained(net, before, range(7))
    state = before.state_dict()
    if name == "AdamW":
        del state["state"][3]
    divergence = hdet.Divergence(rollback=loaded or "device")
    run = Short(net, optimizer=lambda *_, **__: build(net), divergence=divergence)
    begin, held = state_of(net), moments(run.optimizer)
    assert any(held) is bool(loaded) or name == "Adagrad"
    run.steps(4)
    assert same(state_of(net), begin) and (same(moments(run.optimizer), held) or not loaded)
    other.load_state_dict(begin)
    optimizer = build(other)
    for _ in range(3):
        optimizer.param_groups[0]["lr"] = run.rate
        optimizer.zero_grad()
        losses_of(other, taught(run.index)).mean().backward()
        optimizer.step()
        assert torch.equal(run.steps(1).weights(), flat(other))


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize(("dtype", "optimizer"), [
    *((dtype, torch.optim.AdamW) for dtype in (torch.float32, torch.float64, torch.bfloat16)),
    (torch.bfloat16, MASTERS), (torch.bfloat16, SPLIT),
])  # fmt: skip
def test_weights_masters_and_moments_are_taken_back_to_the_last_bit(
    dtype: torch.dtype, optimizer: Any, place: str
) -> None:
    """After a cycle: masters are beside their weights by then."""

    def everything() -> Any:
        return bits([run.weights(), run.optimizer.state_dict()["state"]])

    divergence = hdet.Divergence(rollback=place)
    run = Run(lr=1e-2, dtype=dtype, optimizer=optimizer, divergence=divergence).steps(5)
    held = everything()
    for step in range(5):
        run.step(report=math.nan)
        assert (everything() == held) is (step == 4)


def averaged(rank: int, make: Callable[[], nn.Module] = Normaliser, **settings: Any) -> Run:
    """Each rank has seen data of its own."""
    net = make()
    settings = {"spread": 0.0, "every": 2, "gradients": "local", "moments": "average", **settings}
    return Run(rank, net=net, ddp=False, buffers=net, scheduler=None, **settings)


def replaced(rank: int, world: int, make: Callable[[], nn.Module], converge: Any) -> Any:
    """(equal?, said to be?, said to be before the step ends?) by step, and in the end."""
    run, seen = averaged(rank, make, converge=converge), []
    run.net.double()

    def equal() -> bool:
        return on_all_ranks(torch.cat([buffer.flatten() for buffer in run.net.buffers()]))

    for _ in range(4):
        run.backward()
        passed = run.ensemble.in_sync
        run.optimizer.step()
        run.ensemble.step(1.0)
        run.index += 1
        seen.append((equal(), run.ensemble.in_sync, passed))
    run.net(taught(rank)[0].double())
    passed = run.ensemble.in_sync
    run.ensemble.converge()
    return seen, (equal(), run.ensemble.in_sync, passed)


@pytest.mark.parametrize(("make", "converge"), [
    *((Normaliser, way) for way in (Plain(), Streaming(2), Compressed("bf16"))),
    (Counting, Plain()),
])  # fmt: skip
def test_buffers_that_a_forward_pass_replaces_are_averaged_and_converged_is_true(
    make: Any, converge: Any
) -> None:
    """And buffers that it writes to."""
    for seen, end in run_ranks(replaced, 2, make, converge):
        if isinstance(converge, Plain):
            assert seen == [(step % 2 == 1, step % 2 == 1, False) for step in range(4)]
        assert end == (True, True, False)


def unequal(rank: int, world: int) -> str:
    """A buffer that only one of them has made by now."""
    run = averaged(rank, moments="keep")
    run.net.eval()
    run.steps(1).net.train(rank == 0)
    return told(lambda: run.steps(1))


def test_buffers_that_not_all_replicas_have_are_refused() -> None:
    assert all("the model's buffers differ in number" in text for text in run_ranks(unequal, 2))
