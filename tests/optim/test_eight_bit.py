"""Optimizers whose moments are kept in 8 bits: what they save and load, and how near they stay to
float32. Over shards: test_dtensor.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from hdet.kernels import numbers
from hdet.optim import FusedAdamW, FusedMuon
from hdet.optim.moment_storage import SMALLEST
from hdet.optim.snapshot import reset_moments
from hdet.testing.rules import assert_equal

from .common import FREE, RULES, everything

SHAPES = [(70, 100), (SMALLEST,), (SMALLEST - 1,), (0,), ()]
CODED = 2
"""the rest is small"""
Make = Callable[..., Any]
MAKERS: dict[str, Make] = {
    **{rule.name: partial(rule.fused, **rule.keeps) for rule in [*RULES, FREE] if rule.moments},
    "muon": lambda params, **options: FusedMuon(
        [{"params": params[:1], "use_muon": True}, {"params": params[1:], "use_muon": False}],
        adamw_lr=options["lr"],
        **options,
    ),
}
EACH = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
EXACT = ("step", "exp_avg_slow", "z")
"""what no state has in 8 bits"""


def run(optimizer: Any, params: Sequence[Tensor], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for i, param in enumerate(params):
            gradient = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = None if (step, i) == (1, 1) else gradient
        optimizer.step()


def made(
    make: Make, dtype: torch.dtype = torch.float32, steps: int = 0, **options: Any
) -> tuple[list[Parameter], Any]:
    generator = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    optimizer = make(params, **{"lr": 1e-3, "moment_dtype": "8bit", **options})
    run(optimizer, params, range(steps))
    return params, optimizer


@EACH
def test_it_stays_near_float32(make: Make) -> None:
    """Over twenty steps of noise, where steps do not add up: by a tenth of what the parameters
    move. Of a quarter of the bytes."""
    starts, _ = made(make)
    (ours, optimizer), (theirs, _) = made(make, steps=20), made(make, steps=20, moment_dtype=None)
    for p, q, start in zip(ours[:CODED], theirs, starts, strict=False):
        assert 0 < (p - q).norm() < 0.1 * (q - start).norm()
        state = optimizer.state[p]
        moments = [key for key in state if key not in EXACT and not key.endswith("_scale")]
        assert moments and all(state[key].dtype == torch.uint8 for key in moments)
        assert {state[key].dtype for key in state if key in EXACT} == {torch.float32}
        held = sum(state[key].nbytes + state[f"{key}_scale"].nbytes for key in moments)
        assert held == len(moments) * (p.numel() + 4 * -(-p.numel() // 256))
    assert_equal(ours[CODED:], theirs[CODED:])  # small tensors have float32 moments


def loaded(make: Make, one: tuple[list[Parameter], Any], **options: Any) -> Any:
    other = made(make, one[0][0].dtype, **options)
    for p, q in zip(other[0], one[0], strict=True):
        p.data.copy_(q)
    other[1].load_state_dict(copy.deepcopy(one[1].state_dict()))
    return other


def test_states_that_are_written_and_not_loaded() -> None:
    """As torch's ZeroRedundancyOptimizer loads those of its shards."""
    (ours, one), (theirs, other) = made(FusedAdamW, steps=3), made(FusedAdamW)
    for i, state in copy.deepcopy(one.state_dict())["state"].items():
        theirs[i].data.copy_(ours[i])
        other.state[theirs[i]].update(state)
    for params, optimizer in ((ours, one), (theirs, other)):
        run(optimizer, params, range(3, 6))
    assert_equal(everything(one), everything(other))


@EACH
def test_states_in_float32_load_and_the_other_way_round(make: Make) -> None:
    wide = made(make, steps=3, moment_dtype=None)
    small = loaded(make, wide)
    for p, q in zip(small[0][:CODED], wide[0], strict=False):
        state = small[1].state[p]
        for name, moment in wide[1].state[q].items():
            if name in EXACT:
                assert torch.equal(state[name], moment)
            else:
                expected = numbers.encode(moment, signed=not name.endswith("_sq"))
                assert_equal([state[name], state[f"{name}_scale"]], expected)
    run(small[1], small[0], range(3, 5))
    back = loaded(make, small, moment_dtype=None)
    for q, p in zip(back[0][:CODED], small[0], strict=False):
        state, held = back[1].state[q], small[1].state[p]
        assert {t.dtype for t in state.values()} == {torch.float32}
        assert not any(key.endswith("_scale") for key in state)
        name = next(key for key in held if f"{key}_scale" in held)
        signed = not name.endswith("_sq")
        decoded = numbers.decode(held[name], held[f"{name}_scale"], signed)
        assert torch.equal(state[name], decoded)
    run(back[1], back[0], range(5, 6))


def test_hooks_of_state_dict_see_values() -> None:
    """Also one that numbers parameters by name, as in torch's documentation, after which nobody
    finds the codes."""
    params, optimizer = made(FusedAdamW, steps=2)
    plain, seen = optimizer.state_dict(), []

    def named(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
        seen.append({t.dtype for state in saved["state"].values() for t in state.values()})
        return {**saved, "state": {f"p{i}": state for i, state in saved["state"].items()}}

    optimizer.register_state_dict_post_hook(named)
    hooked = optimizer.state_dict()["state"]
    assert seen == [{torch.float32}]
    for i, state in plain["state"].items():
        torch.testing.assert_close(state, hooked[f"p{i}"], rtol=0, atol=0)
    theirs = torch.optim.AdamW([param.detach().requires_grad_() for param in params])
    theirs.load_state_dict(plain)
    run(theirs, theirs.param_groups[0]["params"], range(2, 3))


@EACH
def test_codes_without_their_scales_are_refused_by_name(make: Make) -> None:
    params, optimizer = made(make, steps=1)
    state, before = optimizer.state[params[0]], copy.deepcopy(params)
    moment = next(key for key in state if key != "step")
    del state[f"{moment}_scale"]
    message = f"{moment} of .* is codes of 8 bits, but its {moment}_scale is missing: load"
    with pytest.raises(ValueError, match=message):
        run(optimizer, params, range(1, 2))
    assert_equal(params, before)
    del state[moment]
    run(optimizer, params, range(1, 2))


def test_moments_begin_anew_in_place() -> None:
    """As after a cycle with moments="reset", or one that is taken back to before the first step."""
    params, optimizer = made(FusedAdamW, steps=2)
    reset_moments(optimizer)
    saved = optimizer.state_dict()["state"][0]
    assert not saved["exp_avg"].any() and not saved["exp_avg_sq"].any()
    fresh, other = made(FusedAdamW)
    for p, q in zip(fresh, params, strict=True):
        p.data.copy_(q)
    run(optimizer, params, range(2, 4))
    run(other, fresh, range(2, 4))
    assert_equal(fresh, params)
