"""What a cycle that is taken back goes back to: all that the run had at its first step. Buffers."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hdet
from hdet.converge import Compressed, Plain
from tests.harness import Run, losses_of, model, taught

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
    "FusedScheduleFreeAdamW": hdet.FusedScheduleFreeAdamW,
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


@pytest.mark.parametrize("loaded", [None, "host"])
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


REPLACED = [
    (Normaliser, Plain()), (Normaliser, Compressed("bf16")), (Counting, Plain()),
]  # fmt: skip


def replaced_all(rank: int, world: int) -> list[Any]:
    return [replaced(rank, world, *case) for case in REPLACED]


def test_buffers_that_a_forward_pass_replaces_are_averaged_and_converged_is_true() -> None:
    """And buffers that it writes to."""
    for found in run_ranks(replaced_all, 2):
        for (_, converge), (seen, end) in zip(REPLACED, found, strict=True):
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


# -- cycles that are taken back, moments -------------------------------------------------------


def taken_back(every: int = 2, **settings: Any) -> Run:
    return Run(every=every, total=100, **{"divergence": TAKEN_BACK, **settings})


def broken(run: Run, steps: int) -> Run:
    for _ in range(steps):
        run.step(math.nan if run.replicas is None else dict.fromkeys(range(3), math.nan))
    return run


def test_a_cycle_that_was_accepted_in_ruins_is_taken_back_too() -> None:
    """It explodes in its last step, too late for its mean loss: no place to go back to."""
    run = Run(every=4, total=400, lr=1e-3, divergence=hdet.Divergence(rollback="device", lower=0.1))
    before = run.steps(4).weights()
    run.steps(3)
    with torch.no_grad():
        for p in run.net.parameters():
            p.mul_(1e4)
    run.step(report=5.0)
    assert not run.history["rolled_back"]
    engine = run.steps(8).ensemble._engine
    assert engine.rollbacks_in_row == 2 and run.weights().abs().max() > 100, "back to the ruins"
    assert torch.equal(run.steps(4).weights(), before) and engine.rollbacks_in_row == 3
    run.steps(4)
    assert engine.rollbacks_in_row == 0


def test_what_was_before_a_load_is_no_place_to_go_back_to() -> None:
    run = taken_back().steps(6)
    state = run.ensemble.state_dict()
    filled(run.net, 0.5)
    run.ensemble.load_state_dict(state)
    assert broken(run, 6).ensemble._engine.rollbacks_in_row == 3
    assert run.weights().unique().tolist() == [0.5]


def test_coresident_replicas_are_taken_back_too() -> None:
    """In the first cycle, before which the other replicas' parameters did not exist."""
    run = taken_back(4, together=3)
    before = run.all_weights()
    assert broken(run, 4).history["rolled_back"]
    for a, b in zip(run.all_weights(), before, strict=True):
        assert torch.allclose(a, b, rtol=1e-6)  # the mean of three equal numbers is rounded
    assert not run.steps(4).history["rolled_back"]
    assert not torch.equal(run.all_weights()[0], before[0])


AVERAGED: dict[str, dict[str, Any]] = {
    "factored": {"optimizer": torch.optim.Adafactor},
    "parameters stand still": {"lr": 0.0},
    "a gradient is missing": {},
}


def averaged_moments(rank: int, world: int) -> Any:
    found = []
    for case, settings in AVERAGED.items():
        settings = {"gradients": "local", "moments": "average", **settings}
        run = Run(rank, ddp=False, scheduler=None, every=2, **settings)
        if case == "a gradient is missing" and rank == 1:
            drop = lambda *_, run=run: setattr(run.net[0].weight, "grad", None)
            run.optimizer.register_step_pre_hook(drop)
        message = told(lambda run=run: run.steps(2).ensemble.converge())
        states = run.optimizer.state.values()
        kept = [{k: v for k, v in state.items() if k != "step"} for state in states]
        found.append((message, kept))
    return found


def test_moments_are_averaged_if_all_replicas_have_them() -> None:
    (*averaged, (refused, _)), (*others, (refused_there, _)) = run_ranks(averaged_moments, 2)
    for (message, one), (other, two) in zip(averaged, others, strict=True):
        assert message == other == "no error" and len(one) == 4 and same(one, two)
    assert refused == refused_there and "moments='average' needs the same on all" in refused


def undeclared(rank: int, world: int) -> list[list[str]]:
    """Errors and warnings."""
    found = []
    for gradients, closure in (("shared", False), ("shared", True), ("local", False)):
        local = gradients == "local"
        run = Run(rank, every=2, ddp=local, gradients=gradients, moments="keep" if local else None)
        through = lambda run=run: run.ensemble.step(run.optimizer.step(run.backward))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            error = told(through if closure else run.step)
        found.append([error, *(str(w.message) for w in caught)])
    return found


def test_gradients_that_are_not_what_was_said_are_noticed() -> None:
    for *shared, (error, *messages) in run_ranks(undeclared, 2):
        assert all("differ between replicas (norms" in said[0] for said in shared)
        assert error == "no error" and any("no_sync()" in message for message in messages)


def test_a_tied_group_must_be_one() -> None:
    net = model()
    said = r"tied\[0\] must be a process group that this rank is in, got -100"
    with pytest.raises(ValueError, match=said):
        Run(net=net, tied=[(net[0].weight, -100)])


def tied_state(rank: int, masters: str | None, moments: str | None) -> list[Any]:
    """3 replicas of 2 stages, whose copies lie at different places of a bucket.

    So gloo adds them up in another order.
    """
    replica, stage = divmod(rank, 2)
    peers = [dist.new_group([0, 2, 4]), dist.new_group([1, 3, 5])][stage]
    copies = [dist.new_group([2 * r, 2 * r + 1]) for r in range(3)][replica]
    generator = torch.Generator().manual_seed(replica if moments else 0)
    dtype = torch.bfloat16 if masters else torch.float32
    matrix = torch.ones(25, 40, dtype=dtype) if masters else torch.ones(40, 25).t()
    own, shared = map(torch.nn.Parameter, (torch.ones(3 + 400 * stage, dtype=dtype), matrix))
    kind, settings = torch.optim.AdamW, {}
    if masters:
        kind, settings = hdet.FusedScheduleFreeAdamW, {"master_weights": masters}
    optimizer = kind([own, shared], lr=0.1, **settings)
    world_group, ranks = dist.group.WORLD, [[0, 1], [2, 3], [4, 5]]
    ensemble = hdet.Ensemble(
        optimizer, knobs=[hdet.LearningRate(0.3)],
        replicas=hdet.Replicas(
            replica, 3, peers, ranks=ranks, member=stage, world_group=world_group
        ),
        sync=hdet.Sync(
            2, tied=[(shared, copies)], gradients="local" if moments else "shared", moments=moments
        ),
    )  # fmt: skip
    for _ in range(4):
        own.grad = torch.ones_like(own)
        shared.grad = torch.randn(25, 40, generator=generator).to(dtype)
        optimizer.step()
        ensemble.step(None if stage == 0 else 2.0)
    state = optimizer.state[shared].values()
    return [shared.detach(), *(value for value in state if isinstance(value, torch.Tensor))]


def tied_states(rank: int, world: int) -> Any:
    return tied_state(rank, None, "average"), tied_state(rank, "split", None)


def test_tied_copies_are_equal_with_all_their_state() -> None:
    first, *others = run_ranks(tied_states, 6)
    assert same(others, [first] * 5)
