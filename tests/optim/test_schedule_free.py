"""FusedScheduleFreeAdamW beside schedulefree's, and what it has that other fused optimizers have
not: modes, numbers of groups, weights in its state."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from hdet.optim import FusedScheduleFreeAdamW
from hdet.testing.rules import parameters, run

from .common import BACKENDS, assert_close, put

SETTINGS: list[dict[str, Any]] = [
    {},
    {"warmup_steps": 4, "weight_decay": 0.1, "lr": 0.01},
    {"betas": (0.6, 0.99), "r": 1.0, "weight_lr_power": 1.0, "eps": 1e-4},
    {"warmup_steps": 3, "weight_lr_power": 0.0},
]


def made(**options: Any) -> tuple[list[Parameter], FusedScheduleFreeAdamW]:
    params = parameters()
    return params, FusedScheduleFreeAdamW(params, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_it_is_schedulefrees_step_by_step(settings: dict[str, Any], backend: str) -> None:
    """In float64, the modes in between, and numbers of the groups to the last bit."""
    schedulefree = pytest.importorskip("schedulefree")
    ours, optimizer = made(**settings, backend=backend)
    theirs = [Parameter(p.detach().double()) for p in ours]
    peer = schedulefree.AdamWScheduleFree(theirs, **settings)
    peer.train()
    for step in range(25):
        for one, params in ((optimizer, ours), (peer, theirs)):
            run(one, params, range(step, step + 1))
            if step % 8 == 5:
                one.eval()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p.double(), q, rtol=1e-5, atol=3e-6)
            torch.testing.assert_close(
                optimizer.state[p]["z"].double(), peer.state[q]["z"], rtol=1e-5, atol=3e-6
            )
        for key in ("k", "train_mode", "weight_sum", "lr_max", "scheduled_lr"):
            assert optimizer.param_groups[0][key] == peer.param_groups[0][key]
        optimizer.train()
        peer.train()


@pytest.mark.parametrize("saved_in_eval", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_states_pass_to_schedulefree_and_back(
    settings: dict[str, Any], saved_in_eval: bool
) -> None:
    peer = pytest.importorskip("schedulefree").AdamWScheduleFree
    saved: list[Any] = [None, None]
    for turn in range(4):
        now: list[Any] = []
        for kind, earlier in zip((FusedScheduleFreeAdamW, peer), saved[::-1], strict=True):
            params = parameters()
            optimizer = kind(params, **settings)
            if earlier:
                put(earlier[0], params)
                optimizer.load_state_dict(earlier[1])
            optimizer.train()
            run(optimizer, params, range(6 * turn, 6 * turn + 6))
            if saved_in_eval:
                optimizer.eval()
            now.append((params, copy.deepcopy(optimizer.state_dict())))
        assert_close(now[0][0], now[1][0], 1e-5)
        saved = now


def test_x_is_the_weighted_mean_of_all_z() -> None:
    """From the paper's definition: with weights of the squared largest rate."""
    params, optimizer = made(lr=0.01, warmup_steps=5)
    kept: list[list[Tensor]] = [[] for _ in params]
    weights: list[float] = []
    for step in range(12):
        run(optimizer, params, range(step, step + 1))
        weights.append((0.01 * min(1.0, (step + 1) / 5)) ** 2)
        for p, seen in zip(params, kept, strict=True):
            seen.append(optimizer.state[p]["z"].clone())
    optimizer.eval()
    for p, seen in zip(params, kept, strict=True):
        means = [w * z.double() for w, z in zip(weights, seen, strict=True)]
        expected = torch.stack(means).sum(0) / math.fsum(weights)
        torch.testing.assert_close(p.double(), expected, rtol=1e-5, atol=1e-5)


def test_modes() -> None:
    params, optimizer = made()
    optimizer.eval()  # before the first step all weights are one
    optimizer.train()
    run(optimizer, params, range(3))
    y = [p.detach().clone() for p in params]
    optimizer.eval()
    optimizer.eval()
    assert not torch.equal(params[0], y[0])
    before = [p.detach().clone() for p in params]
    with pytest.raises(RuntimeError, match=r"in eval mode: call its train\(\) before a step"):
        optimizer.step()
    assert all(map(torch.equal, params, before)) and optimizer.param_groups[0]["k"] == 3
    optimizer.train()
    for p, old in zip(params, y, strict=True):
        torch.testing.assert_close(p.detach(), old, rtol=1e-6, atol=1e-6)


def test_a_late_parameter_begins_where_it_is() -> None:
    params, optimizer = made()
    for param in params[1:]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert "z" not in optimizer.state[params[0]]
    before = params[0].detach().clone()
    run(optimizer, params, range(1))
    z, rate = optimizer.state[params[0]]["z"], optimizer.param_groups[0]["scheduled_lr"]
    torch.testing.assert_close((before - z).abs(), torch.full_like(z, rate), rtol=1e-3, atol=1e-6)
