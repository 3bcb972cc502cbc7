"""All fused optimizers beside torch's: the same numbers, the same state, the same manners."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn import Parameter
from torch.optim import Optimizer, lr_scheduler

from hdet.optim import FusedAdamW
from hdet.rules import DECOUPLED, StepSettings
from hdet.rules import RULES as ALL_RULES
from hdet.testing.rules import assert_equal, parameters, run, set_gradients

from ..kernels import reference
from .common import (
    BACKENDS,
    BY_NAME,
    OURS,
    RULES,
    TORCH_RULES,
    Pair,
    Rule,
    assert_close,
    groups,
    names,
)


@pytest.mark.parametrize("rule", RULES, ids=names)
def test_a_rule_is_its_peer_in_float64(rule: Rule) -> None:
    """With this the kernels' own tests know that their tree is the right one."""
    for settings in rule.groups:
        facts = ALL_RULES[rule.fused.rule]
        param = Parameter(torch.linspace(-2, 3, 50, dtype=torch.float64))
        peer = rule.peer([param], **{"lr": 1e-2, **settings})
        values = dict(zip(facts.fields, facts.values(peer.param_groups[0]), strict=True))
        x = param.detach().clone()
        moments = [torch.zeros_like(x) for _ in facts.moments]
        for t in range(1, 5):
            gradient = param.grad = torch.sin(t * torch.arange(50, dtype=torch.float64))
            peer.step()
            values_of = StepSettings(**values)
            found = reference.step(facts.name, values_of, t, gradient, 1.0, [x], moments)
            x, moments = found.params[0].value, [m.value for m in found.moments]
            torch.testing.assert_close(param.detach(), x, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES, ids=names)
def test_gradients_that_are_none(rule: Rule, backend: str) -> None:
    """One starts late, some alternate, one has never any, and in some steps none has."""
    pair = Pair(rule, backend=backend)
    late = lambda step, i: (i == 1 and step < 5) or (i in (2, 3) and (step + i) % 3 == 0)
    pair.go(20, lambda step, i: i == 5 or step % 4 == 3 or late(step, i))
    pair.check()


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    # moves betas or momentum as well
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=12),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[5]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=4),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("rule", [BY_NAME["adamw"], BY_NAME["sgd"]], ids=names)
def test_torchs_schedulers(rule: Rule, name: str) -> None:
    pair = Pair(rule, lambda params, cls: cls(params, lr=1e-2, **rule.keeps))
    both = [SCHEDULERS[name](optimizer) for optimizer in (pair.a, pair.b)]
    for _ in pair.run(10):
        for scheduler in both:
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    pair.check()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", TORCH_RULES, ids=names)
def test_a_tensor_as_the_rate(rule: Rule, dtype: torch.dtype, backend: str) -> None:
    def make(params: list[Parameter], cls: type) -> Optimizer:
        own = {"backend": backend} if cls is rule.fused else {}
        return cls(params, lr=torch.tensor(1e-2, dtype=dtype), **own)

    pair = Pair(rule, make)
    for step in pair.run(8):
        for optimizer in (pair.a, pair.b):
            if step == 3:
                optimizer.param_groups[0]["lr"] = torch.tensor(2e-2, dtype=dtype)
            else:
                optimizer.param_groups[0]["lr"].mul_(0.9)
    pair.check()


@pytest.mark.parametrize("rule", RULES, ids=names)
def test_a_multiplier_is_a_scaled_rate(rule: Rule) -> None:
    pair = Pair(rule)
    pair.a.multipliers[0][:] = [1.3, 0.7, 0.0]
    rates = [group["lr"] for group in pair.a.param_groups]
    for group, multiplier in zip(pair.b.param_groups, pair.a.multipliers[0], strict=True):
        group["lr"] *= multiplier
    pair.go(10)
    assert_close(pair.ours, pair.theirs)
    assert [group["lr"] for group in pair.a.param_groups] == rates


@pytest.mark.parametrize("backend", BACKENDS)
def test_decay_at_the_base_rate(backend: str) -> None:
    """The step is scaled by the multiplier, the decay is not: AdamW at lr * rho with
    weight_decay / rho."""
    pair = Pair(make=lambda params, cls: cls(params, lr=1e-2 * 1.5, weight_decay=0.3 / 1.5))
    pair.a = FusedAdamW(pair.ours, lr=1e-2, weight_decay=0.3, decay_at="base", backend=backend)
    pair.a.multipliers[0][0] = 1.5
    pair.go(10)
    assert_close(pair.ours, pair.theirs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name in DECOUPLED if name in BY_NAME])
def test_cautious_decay(name: str, backend: str) -> None:
    """Beside the same optimizer without decay, whose step tells the direction's sign."""
    ours, theirs, cls = parameters(), parameters(), BY_NAME[name].fused
    a: Any = cls(ours, lr=0.1, weight_decay=0.5, cautious_decay=True, backend=backend)
    b: Any = cls(theirs, lr=0.1, weight_decay=0.0, backend=backend)  # type: ignore[call-arg]
    for step in range(5):
        before = [p.detach().clone() for p in ours]
        for params in (ours, theirs):
            set_gradients(params, step)
        a.step(), b.step()
        if step + 1 < ALL_RULES[name].first_step:
            assert_close(ours, before, 0.0)
            continue
        for p, plain, old in zip(ours, theirs, before, strict=True):
            agrees = (old - plain.detach()) * old >= 0
            assert not old.numel() or 0 < agrees.float().mean() < 1 or old.numel() == 1
            expected = plain.detach() - 0.05 * old * agrees
            torch.testing.assert_close(p.detach(), expected, rtol=1e-5, atol=1e-6)
            plain.data.copy_(p.detach())


def test_closure_and_hooks() -> None:
    param = Parameter(torch.ones(3))
    optimizer = FusedAdamW([param], lr=0.1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        calls.append("closure")
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert calls == ["before", "closure", "after"]
    torch.testing.assert_close(param.detach(), torch.full((3,), 1 - 0.1 - 1e-3))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_between_forward_and_backward_is_noticed(backend: str) -> None:
    param = Parameter(torch.ones(3))
    optimizer = FusedAdamW([param], lr=0.1, backend=backend)
    param.grad = torch.ones(3)
    loss = (param**2).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("whole_step", [False, True], ids=["model", "training step"])
def test_a_compiled_model(whole_step: bool) -> None:
    """The "eager" compiler of torch.compile: its front end without a code generator."""

    def train(optimizer_class: type, compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        optimizer = optimizer_class(model.parameters(), lr=1e-2)
        forward = torch.compile(model, backend="eager") if compiled and not whole_step else model

        def step() -> None:
            optimizer.zero_grad()
            forward(torch.linspace(-1, 1, 20).view(4, 5)).square().mean().backward()
            optimizer.step()

        run = torch.compile(step, backend="eager") if compiled and whole_step else step
        for _ in range(5):
            run()
        return list(model.parameters())

    try:
        assert_close(train(FusedAdamW, True), train(torch.optim.AdamW, False))
    finally:
        torch._dynamo.reset()


def test_compiled_code_breaks_once_for_a_step_and_is_not_compiled_again() -> None:
    param, counter = Parameter(torch.ones(3)), CompileCounter()
    optimizer = FusedAdamW([param], lr=0.1)

    @torch.compile(backend=counter)
    def train(x: Tensor) -> Tensor:
        y = x.sin()
        optimizer.step()
        return y.cos()

    try:
        for turn in range(4):
            param.grad, optimizer.param_groups[0]["lr"] = torch.ones(3), 0.1 / (turn + 1)
            train(torch.ones(3))
        assert counter.frame_count == counter.op_count == 2 and param.max() < 0.8
    finally:
        torch._dynamo.reset()


def test_gradients_of_a_compiled_model_stay_where_they_lie() -> None:
    """As a CUDA graph of a whole training step needs it."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = FusedAdamW(model.parameters(), lr=1e-2, zero_gradients=True)
    forward, places = torch.compile(model, backend="aot_eager"), set()
    try:
        for _ in range(4):
            forward(torch.ones(4, 5)).square().mean().backward()
            optimizer.step()
            places.add(tuple(p.grad.data_ptr() for p in model.parameters()))  # type: ignore[union-attr]
        assert len(places) == 1
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("rule", OURS, ids=names)
@pytest.mark.parametrize(
    "how",
    [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_goes_on_alone(how: Callable[[Any], Any], rule: Rule) -> None:
    params = parameters()
    optimizer = rule.fused(groups(params, rule), lr=1e-2, max_grad_norm=1e6)
    optimizer.multipliers[0][1] = 1.5
    run(optimizer, params, range(1))
    other, copied = how((optimizer, params))
    assert other.multipliers == optimizer.multipliers and other.max_grad_norm == 1e6
    before = [param.detach().clone() for param in params]
    run(other, copied, range(1, 3))
    assert_equal(before, params)
    run(optimizer, params, range(1, 3))
    assert_equal(copied, params)


def test_gradients_are_not_kept() -> None:
    param = Parameter(torch.ones(3))
    optimizer = FusedAdamW([param])
    param.grad = torch.ones(3)
    alive = weakref.ref(param.grad)
    optimizer.step()
    optimizer.zero_grad()
    assert alive() is None
