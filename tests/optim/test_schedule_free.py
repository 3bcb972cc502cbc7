"""FusedScheduleFreeAdamW beside schedulefree's, and what it has that other fused optimizers have
not: modes, numbers of groups, weights in its state."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import hdet
from hdet.kernels import numbers
from hdet.optim import FusedScheduleFreeAdamW

from .common import BACKENDS, SHAPES

SETTINGS: list[dict[str, Any]] = [
    {},
    {"warmup_steps": 4, "weight_decay": 0.1, "lr": 0.01},
    {"betas": (0.6, 0.99), "r": 1.0, "weight_lr_power": 1.0, "eps": 1e-4},
    {"warmup_steps": 3, "weight_lr_power": 0.0},
]


def parameters(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def run(optimizer: Any, params: list[Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def made(**options: Any) -> tuple[list[Parameter], FusedScheduleFreeAdamW]:
    params = parameters(options.pop("dtype", torch.float32))
    return params, FusedScheduleFreeAdamW(params, **options)


def assert_equal(one: Any, other: Any) -> None:
    (ours, a), (theirs, b) = one, other
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q) and a.state[p].keys() == b.state[q].keys()
        assert all(torch.equal(a.state[p][key], b.state[q][key]) for key in a.state[p])
    for one_group, other_group in zip(a.param_groups, b.param_groups, strict=True):
        assert {**one_group, "params": 0} == {**other_group, "params": 0}


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


@pytest.mark.parametrize("how", ["split", "fp32"])
def test_masters(how: str) -> None:
    """Of bfloat16 parameters: the step and the modes are those of float32 parameters, rounded."""
    low, optimizer = made(dtype=torch.bfloat16, master_weights=how)
    wide = [Parameter(p.detach().float()) for p in low]
    exact = FusedScheduleFreeAdamW(wide)
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(low, wide, strict=True):
            q.grad = torch.randn(p.shape, generator=generator).bfloat16().float()
            p.grad = q.grad.bfloat16()
        for one in (optimizer, exact):
            one.step()
            one.eval()
            one.train()
    for p, q in zip(low, wide, strict=True):
        master = optimizer.masters([p])[0]
        assert torch.equal(numbers.value_of(p.detach(), master), q)
        assert torch.equal(optimizer.state[p]["z"], exact.state[q]["z"])


@pytest.mark.parametrize("options", [{}, {"moment_dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_states(mode: str, options: dict[str, Any]) -> None:
    one = made(**SETTINGS[1], **options)
    run(one[1], one[0], range(3))
    getattr(one[1], mode)()
    other = made(**options)
    other[1].load_state_dict(copy.deepcopy(one[1].state_dict()))
    for p, q in zip(one[0], other[0], strict=True):
        q.data.copy_(p)
    third = copy.deepcopy(one)
    fourth = pickle.loads(pickle.dumps(one))
    for params, optimizer in (one, other, third, fourth):
        assert optimizer.param_groups[0]["train_mode"] == (mode == "train")
        optimizer.train()
        run(optimizer, params, range(3, 6))
    for again in (other, third, fourth):
        assert_equal(one, again)


@pytest.mark.parametrize("backend", BACKENDS)
def test_moments_in_8_bits(backend: str) -> None:
    """z is exact, and so are small tensors."""
    params = [Parameter(torch.randn(5000)), Parameter(torch.randn(10))]
    wide = copy.deepcopy(params)
    small = FusedScheduleFreeAdamW(params, moment_dtype="8bit", backend=backend)
    run(small, params, range(5))
    run(FusedScheduleFreeAdamW(wide, backend=backend), wide, range(5))
    state = small.state[params[0]]
    assert state["exp_avg_sq"].dtype == torch.uint8 and state["z"].dtype == torch.float32
    moved = (wide[0] - small.state[params[0]]["z"]).norm()
    assert 0 < (params[0] - wide[0]).norm() < 0.2 * moved and torch.equal(params[1], wide[1])


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


def test_a_scaler_leaves_a_step_out() -> None:
    params, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for bad in (True, False):
        for param in params:
            param.grad = torch.full_like(param, math.inf if bad else 4.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update(4.0)
    assert optimizer.param_groups[0]["k"] == 1


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "beta1=0.0 of .* above 0", lambda: made(betas=(0.0, 0.9))),
        (ValueError, "warmup_steps=-1", lambda: made(warmup_steps=-1)),
        (ValueError, "r=nan", lambda: made(r=math.nan)),
        (ValueError, "lr=-1", lambda: made(lr=-1)),
        (TypeError, "on meta, and the average's", lambda: made(lr=torch.ones((), device="meta"))),
        (TypeError, "takes no cautious_decay", lambda: made(cautious_decay=True)),
        (TypeError, "unexpected keyword", lambda: made(amsgrad=True)),
        (RuntimeError, "CUDA graph cannot replay", lambda: made()[1].write_hyperparameters()),
        (
            ValueError,
            "FusedScheduleFreeAdamW steps one replica",
            lambda: made()[1].set_replicas(2, lambda p: [p, p.detach().clone()]),
        ),
    ],
)
def test_refusals(error: type[Exception], message: str, call: Any) -> None:
    with pytest.raises(error, match=message):
        call()


def test_the_states_of_others_are_refused() -> None:
    params: list[Tensor] = [torch.nn.Parameter(torch.ones(3))]
    adamw, ours = hdet.FusedAdamW(params), FusedScheduleFreeAdamW(params)
    params[0].grad = torch.ones(3)
    adamw.step()
    with pytest.raises(ValueError, match="lacks"):
        ours.load_state_dict(adamw.state_dict())
