"""Optimizers whose moments are kept in 8 bits: what they save and load, in one process and over
shards, and how near they stay to float32."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import hdet
from hdet.kernels import numbers
from hdet.optim import FusedAdamW, FusedMuon
from hdet.optim.moment_storage import SMALLEST

from .common import RULES
from .test_replicas import copies

SHAPES = [(70, 100), (SMALLEST,), (SMALLEST - 1,), (0,), ()]
CODED = 2
"""the rest is small"""
Make = Callable[..., Any]
MAKERS: dict[str, Make] = {
    **{rule.name: partial(rule.fused, **rule.keeps) for rule in RULES if rule.moments},
    "muon": lambda params, **options: FusedMuon(
        [{"params": params[:1], "use_muon": True}, {"params": params[1:], "use_muon": False}],
        adamw_lr=options["lr"],
        **options,
    ),
}
EACH = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def parameters(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def run(optimizer: Any, params: Sequence[Tensor], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for i, param in enumerate(params):
            gradient = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = None if (step, i) == (1, 1) else gradient
        optimizer.step()


def made(
    make: Make, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[list[Parameter], Any]:
    params = parameters(dtype)
    return params, make(params, **{"lr": 1e-3, "moment_dtype": "8bit", **options})


def assert_same_run(one: tuple[list[Parameter], Any], other: tuple[list[Parameter], Any]) -> None:
    for p, q in zip(one[0], other[0], strict=True):
        assert torch.equal(p, q)
        ours, theirs = one[1].state[p], other[1].state[q]
        assert ours.keys() == theirs.keys()
        assert all(
            torch.equal(ours[key], theirs[key]) for key in ours if isinstance(ours[key], Tensor)
        )


@EACH
def test_it_stays_near_float32(make: Make) -> None:
    """Over twenty steps of noise, where steps do not add up: by a tenth of what the parameters
    move."""
    (ours, optimizer), (theirs, wide) = made(make), made(make, moment_dtype=None)
    for params, stepped in ((ours, optimizer), (theirs, wide)):
        run(stepped, params, range(20))
    for p, q, start in zip(ours[:CODED], theirs, parameters(), strict=False):
        assert 0 < (p - q).norm() < 0.1 * (q - start).norm()
        assert all(
            t.dtype == torch.uint8
            for key, t in optimizer.state[p].items()
            if key in ("exp_avg", "exp_avg_sq", "momentum_buffer")
        )
        exact = optimizer.state[p].get("exp_avg_slow")
        assert exact is None or exact.dtype == torch.float32
    for p, q in zip(ours[CODED:], theirs[CODED:], strict=True):
        assert torch.equal(p, q), "small tensors have float32 moments"


@EACH
def test_bytes_of_the_state(make: Make) -> None:
    params, optimizer = made(make)
    run(optimizer, params, range(1))
    state = optimizer.state[params[0]]
    moments = [name for name in state if f"{name}_scale" in state]
    held = sum(t.nbytes for key, t in state.items() if key not in ("step", "exp_avg_slow"))
    assert held == len(moments) * (7000 + 4 * 28) > 0


@EACH
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_step_under_another_default_device(make: Make, backend: str) -> None:
    """torch.set_default_device("cuda"), for which "meta" stands: the tables of codes are the
    host's."""
    one, other = made(make, backend=backend), made(make, backend=backend)
    run(one[1], one[0], range(2))
    for cached in (
        numbers.codebook,
        numbers._tables,
        numbers.magnitudes,
        numbers.thresholds,
    ):
        cached.cache_clear()
    for step in range(2):
        generator = torch.Generator().manual_seed(100 + step)
        for i, param in enumerate(other[0]):
            gradient = torch.randn(param.shape, generator=generator)
            param.grad = None if (step, i) == (1, 1) else gradient
        with torch.device("meta"):
            other[1].step()
            other[1].state_dict()
    assert_same_run(one, other)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resume_is_exact(make: Make, dtype: torch.dtype) -> None:
    options = {} if dtype == torch.float32 else {"master_weights": "split"}
    one = made(make, dtype, **options)
    run(one[1], one[0], range(3))
    saved = copy.deepcopy(one[1].state_dict())
    assert all(
        t.dtype in (torch.float32, torch.bfloat16)
        for state in saved["state"].values()
        for t in state.values()
    )
    other = made(make, dtype, **options)
    for p, q in zip(other[0], one[0], strict=True):
        p.data.copy_(q)
    other[1].load_state_dict(saved)
    assert_same_run(one, other)
    third = copy.deepcopy(one)
    fourth = pickle.loads(pickle.dumps(one))
    for params, optimizer in (one, other, third, fourth):
        run(optimizer, params, range(3, 6))
    for again in (other, third, fourth):
        assert_same_run(one, again)


@EACH
def test_states_in_float32_load_and_the_other_way_round(make: Make) -> None:
    wide, small = made(make, moment_dtype=None), made(make)
    run(wide[1], wide[0], range(3))
    small[1].load_state_dict(wide[1].state_dict())
    for p, q in zip(small[0][:CODED], wide[0], strict=False):
        for name, moment in wide[1].state[q].items():
            if name in ("step", "exp_avg_slow"):
                assert torch.equal(small[1].state[p][name], moment)
                continue
            codes, scales = numbers.encode(moment, signed=not name.endswith("_sq"))
            assert torch.equal(small[1].state[p][name], codes) and torch.equal(
                small[1].state[p][f"{name}_scale"], scales
            )
    run(small[1], small[0], range(3, 5))
    back = made(make, moment_dtype=None)
    back[1].load_state_dict(small[1].state_dict())
    for q, p in zip(back[0][:CODED], small[0], strict=False):
        state = back[1].state[q]
        assert {t.dtype for t in state.values()} == {torch.float32} and not [
            key for key in state if key.endswith("_scale")
        ]
        name = "exp_avg" if "exp_avg" in state else "momentum_buffer"
        held = small[1].state[p]
        assert torch.equal(
            state[name], numbers.decode(held[name], held[f"{name}_scale"], signed=True)
        )
    run(back[1], back[0], range(5, 6))


@EACH
def test_values_that_are_written_into_a_state_become_codes(make: Make) -> None:
    """torch's ZeroRedundancyOptimizer so loads the states of its shards."""
    one, other = made(make), made(make)
    run(one[1], one[0], range(3))
    for i, state in copy.deepcopy(one[1].state_dict())["state"].items():
        other[0][i].data.copy_(one[0][i])
        other[1].state[other[0][i]].update(state)
    for params, optimizer in (one, other):
        run(optimizer, params, range(3, 5))
    assert_same_run(one, other)


def test_hooks_of_state_dict_see_values() -> None:
    """Also one that numbers parameters by name, as in torch's documentation, after which nobody
    finds the codes."""
    params, optimizer = made(FusedAdamW)
    run(optimizer, params, range(2))
    plain, seen = optimizer.state_dict(), []

    def named(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
        seen.append({t.dtype for state in saved["state"].values() for t in state.values()})
        return {**saved, "state": {f"p{i}": state for i, state in saved["state"].items()}}

    optimizer.register_state_dict_post_hook(named)
    hooked = optimizer.state_dict()
    assert seen == [{torch.float32}]
    for i, state in plain["state"].items():
        assert state.keys() == hooked["state"][f"p{i}"].keys()
        assert all(
            torch.equal(value, hooked["state"][f"p{i}"][key]) for key, value in state.items()
        )


def test_torchs_adamw_takes_the_state() -> None:
    params, optimizer = made(FusedAdamW)
    run(optimizer, params, range(2))
    theirs = torch.optim.AdamW(parameters(), lr=1e-3)
    theirs.load_state_dict(optimizer.state_dict())
    run(theirs, theirs.param_groups[0]["params"], range(2, 3))


@EACH
def test_replicas_share_the_codes(make: Make) -> None:
    params, optimizer = made(make)
    optimizer.set_replicas(3, copies(3))
    optimizer.multipliers = [
        [0.5] * len(optimizer.param_groups),
        [1.0] * len(optimizer.param_groups),
        [1.5] * len(optimizer.param_groups),
    ]
    alone, middle = made(make)
    run(optimizer, params, range(3))
    run(middle, alone, range(3))
    for ours, theirs in zip(optimizer.replica_parameters(1), alone, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(
        optimizer.state[params[0]][next(iter(middle.state[alone[0]]))],
        next(iter(middle.state[alone[0]].values())),
    )
    optimizer.average_replicas([1.0, 1.0, 1.0])
    saved = optimizer.state_dict()["state"][0]
    assert saved["replica_params"] and not [key for key in saved if key.endswith("_scale")]


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="moment_dtype='4bit' is not supported; choose .*'8bit'"):
        FusedAdamW(parameters(), moment_dtype="4bit")
    params, optimizer = made(FusedAdamW, decay_at="base")
    run(optimizer, params, range(1))
    raw = {
        **optimizer.state_dict(),
        "state": {i: dict(optimizer.state[p]) for i, p in enumerate(params)},
    }
    with pytest.raises(
        ValueError, match=r"exp_avg of parameter 0 is torch.uint8, codes .* save its state_dict\(\)"
    ):
        optimizer.load_state_dict(raw)
    with pytest.raises(
        ValueError, match="moments is 'average', but the optimizer keeps them in 8 bits"
    ):
        hdet.Ensemble(optimizer, sync=hdet.Sync(1, gradients="local", moments="average"))


@EACH
def test_codes_without_their_scales_are_refused_by_name(make: Make) -> None:
    params, optimizer = made(make)
    run(optimizer, params, range(1))
    moment, before = (
        next(key for key in optimizer.state[params[0]] if key != "step"),
        copy.deepcopy(params),
    )
    del optimizer.state[params[0]][f"{moment}_scale"]
    with pytest.raises(
        ValueError,
        match=(
            f"{moment} of a parameter's state is codes of 8 bits, but its {moment}_scale is "
            "missing: load"
        ),
    ):
        run(optimizer, params, range(1, 2))
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    del optimizer.state[params[0]][moment]
    run(optimizer, params, range(1, 2))


@EACH
def test_a_skipped_step_changes_nothing(make: Make) -> None:
    params, optimizer = made(make, max_grad_norm=1.0)
    run(optimizer, params, range(2))
    before = copy.deepcopy((params, optimizer))
    for param in params:
        param.grad = torch.full_like(param, float("nan"))
    optimizer.step()
    assert optimizer.step_skipped == 1
    assert_same_run((params, optimizer), before)


def test_moments_begin_anew_in_place() -> None:
    """As after a cycle with moments="reset", or one that is taken back to before the first step."""
    from hdet.optim.snapshot import reset_moments

    params, optimizer = made(FusedAdamW)
    run(optimizer, params, range(2))
    reset_moments(optimizer)
    assert not any(
        moment.any()
        for name in ("exp_avg", "exp_avg_sq")
        for moment in [optimizer.state_dict()["state"][0][name]]
    )
    fresh, other = made(FusedAdamW)
    for p, q in zip(fresh, params, strict=True):
        p.data.copy_(q)
    run(optimizer, params, range(2, 4))
    run(other, fresh, range(2, 4))
    for p, q in zip(fresh, params, strict=True):
        assert torch.equal(p, q)
