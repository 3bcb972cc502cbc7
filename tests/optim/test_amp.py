"""Gradient scaling, clipping and skipping, which happen inside the step and on the device. Each
beside the same optimizer on gradients that were not scaled, or that torch has clipped."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from hdet.optim import FusedAdamW, FusedSGD
from hdet.testing.rules import STORED, assert_equal, parameters, run, set_gradients, state_of

from .common import (
    FREE,
    MUON,
    Rule,
    assert_close,
    assert_norms,
    each_backend,
    each_rule,
    everything,
    groups,
    replicated,
)


@each_backend
@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled and clipped"])
@each_rule
def test_a_grad_scaler(rule: Rule, unscale: bool, backend: str) -> None:
    """Infinite gradients skip the step and its counters."""
    ours, theirs = parameters(), parameters()
    a, b = (rule.fused(groups(params, rule), lr=1e-2, backend=backend) for params in (ours, theirs))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    for step in range(8):
        set_gradients(theirs, step)
        spoil = step in (0, 5)
        products = [(p * q.grad).sum() for p, q in zip(ours, theirs, strict=True)]
        a.zero_grad()
        scaler.scale(torch.stack(products).sum() * (math.inf if spoil else 1.0)).backward()
        if unscale:
            scaler.unscale_(a)
            torch.nn.utils.clip_grad_norm_(ours, 3.0)
            torch.nn.utils.clip_grad_norm_(theirs, 3.0)
        scaler.step(a)
        scaler.update()
        if not spoil:
            b.step()
        assert rule is FREE or a.step_skipped.item() == spoil  # that one the scaler leaves out
        assert_close(ours, theirs)
        if step > 0:  # in a first step that is skipped one has a state and the other has none
            assert_close(everything(a), everything(b))
    assert scaler.get_scale() == 512.0 and not hasattr(a, "found_inf")
    assert a.state_dict()["param_groups"] == b.state_dict()["param_groups"]


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


@each_backend
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


@each_backend
@pytest.mark.parametrize(
    "norms", [[0.5] * 5, [1e6] * 2, [None, 20.0, 2.0, None, math.inf]], ids=str
)
@each_rule
def test_clipping_by_the_global_norm(rule: Rule, norms: list[float | None], backend: str) -> None:
    """Which may change between steps."""
    ours, theirs = parameters(), parameters()
    a, b = (rule.fused(groups(params, rule), lr=1e-2, backend=backend) for params in (ours, theirs))
    assert a.grad_norm is None and a.step_skipped is None
    with pytest.raises(RuntimeError, match="needs a step with max_grad_norm before it"):
        a.gradient_norms()
    for step, norm in enumerate(norms):
        a.max_grad_norm = norm
        set_gradients(ours, step)
        set_gradients(theirs, step)
        kept: list[Any] = [param.grad.clone() for param in ours]  # type: ignore[union-attr]
        expected = torch.nn.utils.clip_grad_norm_(theirs, norm or math.inf)
        a.step()
        b.step()
        assert (a.grad_norm is None) == (norm is None)
        if norm is not None:
            torch.testing.assert_close(a.grad_norm, expected)
            in_groups = [p for group in a.param_groups for p in group["params"]]
            places = [next(i for i, q in enumerate(ours) if p is q) for p in in_groups]
            assert_norms(a.gradient_norms(), dict(enumerate(kept[i] for i in places)))
        assert_equal([param.grad for param in ours], kept)  # type: ignore[misc]
        assert_close(ours, theirs, 1e-5 if rule is MUON else 2e-6)
    with pytest.raises(ValueError, match="max_grad_norm=-1.0 must be positive"):
        a.max_grad_norm = -1.0
    assert a.max_grad_norm == norms[-1]


@pytest.mark.usefixtures("small_tensors_have_codes")
@each_backend
@pytest.mark.parametrize("stored", ["float32", "8 bits"])
@each_rule
def test_a_norm_that_is_not_finite_skips_the_step(rule: Rule, stored: str, backend: str) -> None:
    """Also where Muon's matrices alone have gradients, or all else; and the norm is that of the
    last step."""
    options: dict[str, Any] = {"max_grad_norm": 1.0, "zero_gradients": True, "backend": backend}
    params, optimizer, _ = replicated(1, rule, **STORED[stored], **options)
    every = range(len(params))
    matrices = [i for i in every if params[i].dim() > 1]
    rest = [5, *(i for i in every[:5] if i not in matrices)]
    rows = [(1.0, every), (math.nan, matrices), (1.0, every), (-math.inf, rest)]
    for step, (number, given) in enumerate(rows):
        set_gradients(params, step, lambda _, i, given=given: i not in given)
        params[given[0]].grad.view(-1)[0] = number  # type: ignore[union-attr]
        before = copy.deepcopy(everything(optimizer))
        optimizer.step()
        found: Any = optimizer.grad_norm
        assert found.isfinite() == math.isfinite(number) != optimizer.step_skipped.item()
        if not math.isfinite(number):
            assert_equal(everything(optimizer), before)
        assert all(not param.grad.any() for param in params if param.grad is not None)
    for param in params:
        param.grad = None
    optimizer.step()
    assert optimizer.grad_norm is None and optimizer.step_skipped is None
    assert {float(state["step"]) for state in state_of(optimizer)} == {2.0}


def test_nothing_to_unscale() -> None:
    """Without gradients a scaler leaves numbers where tensors are; torch's refuses to go on, as
    with any optimizer."""
    optimizer = FusedSGD(parameters())
    optimizer.found_inf, optimizer.grad_scale = 0, torch.tensor(2.0)
    optimizer.step()
    set_gradients(optimizer.param_groups[0]["params"], 0)
    optimizer.step()
