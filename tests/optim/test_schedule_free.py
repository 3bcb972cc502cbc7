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

import hdet
from hdet.optim import FusedScheduleFreeAdamW

from .common import BACKENDS, assert_close, assert_equal, parameters, run
from .test_replicas import RHOS, copies, put, values

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


# -- replicas --------------------------------------------------------------------------------------

FORMATS: dict[str, dict[str, Any]] = {
    "clipped": {"max_grad_norm": 0.5, "zero_gradients": True, "weight_decay": 0.1},
    "fp32": {"dtype": torch.bfloat16, "master_weights": "fp32"},
    "split, 8 bits": {"dtype": torch.bfloat16, "master_weights": "split", "moment_dtype": "8bit"},
    "stochastic": {"dtype": torch.bfloat16, "stochastic_rounding": True},
}


def several(
    count: int, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[list[Parameter], FusedScheduleFreeAdamW]:
    """Of which the last one is large enough for codes."""
    params = [*parameters(dtype=dtype), Parameter((torch.arange(-2050, 2050) / 500).to(dtype))]
    optimizer = FusedScheduleFreeAdamW(params, lr=0.02, warmup_steps=3, **options)
    optimizer.set_replicas(count, copies(count))
    optimizer.multipliers = [[rho] for rho in RHOS[:count]]
    return params, optimizer


def shared(optimizer: FusedScheduleFreeAdamW) -> list[Tensor]:
    states = [optimizer.state[param] for param in optimizer.replica_parameters(0)]
    return [state[key] for state in states for key in ("step", "exp_avg_sq")]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_replicas_are_separate_optimizers(options: dict[str, Any], backend: str) -> None:
    """Bitwise, also where they have become x and y again, or gone through a copy and a state."""
    params: Any
    params, together = several(3, **options, backend=backend)
    alone = []
    for k, rho in enumerate(RHOS):
        own, one = several(1, **options, backend=backend)
        one.multipliers, one.first_replica = [[rho]], k
        alone.append((own, one))
    modes = [FusedScheduleFreeAdamW.eval, FusedScheduleFreeAdamW.train]
    for step in range(5):
        for own, one in ((params, together), *alone):
            run(one, own if step else own[1:], range(step, step + 1))
        for change in modes if step else ():
            for _, one in ((params, together), *alone):
                change(one)
            for k, (_, one) in enumerate(alone):
                assert_equal(together.replica_parameters(k), one.replica_parameters(0))
                assert_equal(values(together, k), values(one))
                assert_equal(shared(together), shared(one))
            if step == 3:
                together, params = copy.deepcopy((together, params))
                together.load_state_dict(copy.deepcopy(together.state_dict()))
    if options.get("zero_gradients"):
        assert not any(p.grad.any() for p in params)
        assert_equal(list(together.gradient_norms().values()), list(one.gradient_norms().values()))


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
