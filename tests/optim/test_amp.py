"""Gradient scaling, clipping and skipping, which happen inside the step and on the device."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from hdet.optim import FusedAdamW, FusedSGD

from .common import (
    BACKENDS,
    OURS,
    RULES,
    Pair,
    Rule,
    assert_close,
    assert_equal,
    assert_norms,
    groups,
    names,
    parameters,
    run,
    set_gradients,
    state_of,
)


def scaled_backward(
    scaler: torch.amp.GradScaler, params: list[Parameter], step: int, spoil: bool = False
) -> None:
    generator = torch.Generator().manual_seed(step)
    losses = [(param * torch.randn(param.shape, generator=generator)).sum() for param in params]
    loss = torch.stack(losses).sum() * (math.inf if spoil else 1.0)
    scaler.scale(loss).backward()


def copies(optimizer: Any, params: list[Parameter]) -> Any:
    return copy.deepcopy(([param.detach() for param in params], optimizer.state_dict()["state"]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled and clipped"])
@pytest.mark.parametrize("rule", RULES, ids=names)
def test_a_grad_scaler(rule: Rule, unscale: bool, backend: str) -> None:
    """As torch.amp.GradScaler drives torch's optimizer; infinite gradients skip the step and its
    counters."""
    pair = Pair(rule, backend=backend)
    sides = [
        (o, ps, torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4))
        for o, ps in ((pair.a, pair.ours), (pair.b, pair.theirs))
    ]
    for step in range(12):
        for optimizer, params, scaler in sides:
            before = copies(optimizer, params)
            optimizer.zero_grad()
            scaled_backward(scaler, params, step, spoil=step in (0, 5))
            if unscale:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, 3.0)
            scaler.step(optimizer)
            scaler.update()
            if optimizer is pair.a and step in (5,):
                torch.testing.assert_close(copies(optimizer, params), before, rtol=0, atol=0)
            if optimizer is pair.a:
                assert optimizer.step_skipped.item() == (step in (0, 5))
    assert sides[0][2].get_scale() == sides[1][2].get_scale()
    assert_close(pair.ours, pair.theirs)
    assert not hasattr(pair.a, "found_inf")


def test_no_host_read_of_the_scalers_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading found_inf or the scale would wait for a GPU."""
    params = parameters()
    optimizer = FusedAdamW(params)
    run(optimizer, params, range(1))
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor([0.0])

    def refuse(self: torch.Tensor, *_: Any) -> Any:
        raise AssertionError("a tensor was read on the host")

    for name in ("item", "tolist", "__bool__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    optimizer.step()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_norms_have_names_and_are_those_of_the_last_step(backend: str) -> None:
    """Unscaled, before clipping, also where gradients are zeros by then or the scaler went on."""
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 1)).half()
    options: dict[str, Any] = {"zero_gradients": True, "backend": backend}
    optimizer = FusedAdamW(model.named_parameters(), max_grad_norm=0.5, **options)
    for scale, absent in ((1.0, None), (8.0, "0.bias"), (3.0, None)):
        optimizer.grad_scale = torch.tensor(scale)
        expected = {}
        for name, param in model.named_parameters():
            param.grad = None if name == absent else torch.randn(param.shape).half()
            if param.grad is not None:
                expected[name] = param.grad.double() / scale
        optimizer.step()
        optimizer.grad_scale.fill_(64.0)
        assert_norms(optimizer.gradient_norms(), expected)
    optimizer.max_grad_norm = None
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"set max_grad_norm \(math.inf measures"):
        optimizer.gradient_norms()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "norms", [[0.5] * 5, [20.0] * 5, [1e6] * 5, [None, 0.5, 2.0, None, math.inf]], ids=str
)
@pytest.mark.parametrize("rule", RULES, ids=names)
def test_clipping_by_the_global_norm(rule: Rule, norms: list[float | None], backend: str) -> None:
    """Which may change between steps."""
    pair = Pair(rule, backend=backend)
    assert pair.a.grad_norm is None and pair.a.step_skipped is None
    for step, norm in enumerate(norms):
        pair.a.max_grad_norm = norm
        set_gradients(pair.ours, step)
        set_gradients(pair.theirs, step)
        kept = [param.grad.clone() for param in pair.ours]  # type: ignore[union-attr]
        expected = torch.nn.utils.clip_grad_norm_(pair.theirs, norm or math.inf)
        pair.a.step()
        pair.b.step()
        assert (pair.a.grad_norm is None) == (norm is None)
        if norm is not None:
            torch.testing.assert_close(pair.a.grad_norm, expected)
            assert_norms(pair.a.gradient_norms(), dict(enumerate(kept)))
        assert_equal([param.grad for param in pair.ours], kept)  # type: ignore[misc]
    assert_close(pair.ours, pair.theirs, 2e-6)
    with pytest.raises(RuntimeError, match="needs a step with max_grad_norm before it"):
        Pair(rule, backend=backend).a.gradient_norms()
    with pytest.raises(ValueError, match="max_grad_norm=-1.0 must be positive"):
        pair.a.max_grad_norm = -1.0
    assert pair.a.max_grad_norm == norms[-1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", OURS, ids=names)
def test_a_norm_that_is_not_finite_skips_the_step(rule: Rule, backend: str) -> None:
    params = parameters()
    optimizer = rule.fused(
        groups(params, rule), backend=backend, max_grad_norm=1.0, zero_gradients=True
    )
    for step, bad in enumerate([None, math.nan, math.inf, None]):
        set_gradients(params, step)
        if bad is not None:
            params[3].grad[0, 0, 0] = bad  # type: ignore[index]
        before = copies(optimizer, params)
        optimizer.step()
        assert optimizer.step_skipped is not None and optimizer.step_skipped.item() == (
            bad is not None
        )
        if bad is not None:
            torch.testing.assert_close(copies(optimizer, params), before, rtol=0, atol=0)
        assert all(not param.grad.any() for param in params)  # type: ignore[union-attr]
    assert all(state["step"].item() == 2 for state in state_of(optimizer))


def test_nothing_to_unscale() -> None:
    """Without gradients a scaler leaves numbers where tensors are; torch's refuses to go on, as
    with any optimizer."""
    optimizer = FusedSGD(parameters())
    optimizer.found_inf, optimizer.grad_scale = 0, torch.tensor(2.0)
    optimizer.step()
    set_gradients(optimizer.param_groups[0]["params"], 0)
    optimizer.step()
