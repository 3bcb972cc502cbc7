"""Parameters of 16 bits: masters, the split form, stochastic rounding, small moments."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from hdet.kernels import numbers
from hdet.optim import FusedAdamW
from hdet.testing.rules import (
    assert_equal,
    parameters,
    run,
    set_gradients,
    state_of,
    step_both,
    values,
)

from .common import BACKENDS, groups


def bfloat16_run(**options: Any) -> tuple[list[Parameter], FusedAdamW]:
    params = parameters(dtype=torch.bfloat16)
    return params, FusedAdamW(groups(params), lr=1e-2, **options)


@pytest.mark.parametrize("master_weights", ["fp32", "split", "split24"])
def test_float32_parameters_need_no_master(master_weights: str) -> None:
    params = parameters()
    optimizer = FusedAdamW(params, master_weights=master_weights)
    run(optimizer, params, range(1))
    assert all(state.keys() == {"step", "exp_avg", "exp_avg_sq"} for state in state_of(optimizer))


# -- in the state ----------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [None, "torch"])
@pytest.mark.parametrize("master_weights", ["fp32", "split"])
def test_states_without_masters_get_them_from_the_parameter(
    master_weights: str, of: str | None
) -> None:
    ours, old = bfloat16_run()
    if of == "torch":
        old = torch.optim.AdamW(groups(ours), lr=1e-2)  # type: ignore[assignment]
    run(old, ours, range(1))
    a = FusedAdamW(groups(ours), lr=1e-2, master_weights=master_weights)
    a.load_state_dict(old.state_dict())
    theirs = [Parameter(param.detach().float()) for param in ours]
    b = FusedAdamW(groups(theirs), lr=1e-2)
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    step_both(a, ours, b, theirs, 1)
    assert_equal(values(a), theirs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_24_bits_lose_no_small_step(backend: str) -> None:
    """Of 1e-6 from 1, where they are 2^-16 apart: on average each is taken."""
    param = Parameter(torch.ones(1 << 14, dtype=torch.bfloat16))
    optimizer = FusedAdamW([param], lr=1e-6, weight_decay=0, master_weights="split24",
                           backend=backend)  # fmt: skip
    for _ in range(50):
        param.grad = torch.ones_like(param)
        optimizer.step()
    gone = 1 - numbers.value_of(param.detach(), optimizer.masters([param])[0]).double().mean()
    assert abs(float(gone) - 50e-6) < 5 * 2**-17 * (50 / len(param)) ** 0.5


@pytest.mark.parametrize("of", ["fp32", "split"])
def test_masters_become_24_bits_to_nearest_and_exactly_others(of: str) -> None:
    ours, a = bfloat16_run(master_weights=of)
    run(a, ours, range(3))
    short = FusedAdamW(groups(ours), lr=0.0, master_weights="split24")
    expected = [numbers.to_24(value) for value in values(a)]
    for optimizer in (short, FusedAdamW(groups(ours), lr=0.0, master_weights=of)):
        optimizer.load_state_dict(copy.deepcopy(a.state_dict()))
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        run(optimizer, ours, range(1))
        assert_equal(values(optimizer), expected)
        a = optimizer


@pytest.mark.parametrize(("of", "into"), [("fp32", "split"), ("split", "fp32")])
def test_masters_change_their_form_exactly(of: str, into: str) -> None:
    ours, a = bfloat16_run(master_weights=of)
    theirs = [Parameter(param.detach().float()) for param in ours]
    b = FusedAdamW(groups(theirs), lr=1e-2)
    for step in range(3):
        step_both(a, ours, b, theirs, step)
    other = FusedAdamW(groups(ours), lr=1e-2, master_weights=into)
    other.load_state_dict(a.state_dict())
    for step in range(3, 5):
        step_both(other, ours, b, theirs, step)
    assert_equal(values(other), theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_parameter_that_becomes_float32_gets_its_masters_value(dtype: torch.dtype) -> None:
    """Unless somebody has written to it."""
    ours = parameters(dtype=dtype)
    a = FusedAdamW(groups(ours), lr=1e-2, master_weights="fp32")
    run(a, ours, range(1))
    expected = values(a)
    for param in ours:
        param.grad, param.data = None, param.data.float()
    with torch.no_grad():
        ours[1][3] = 5.0
    expected[1] = ours[1].detach().clone()
    for param in ours:
        param.grad = torch.zeros_like(param)
    for group in a.param_groups:
        group["lr"] = 0.0
    a.step()
    assert_equal(ours, expected)
    assert not any("master_param" in state for state in state_of(a))


def test_masters_that_nobody_keeps_are_dropped_with_a_warning() -> None:
    ours, a = bfloat16_run(master_weights="fp32")
    run(a, ours, range(1))
    other = FusedAdamW(groups(ours), lr=1e-2)
    with pytest.warns(UserWarning, match="has master weights, this optimizer keeps none"):
        other.load_state_dict(a.state_dict())
    run(other, ours, range(1, 2))
    assert all(state.keys() == {"step", "exp_avg", "exp_avg_sq"} for state in state_of(other))


# -- parameters that others write to ---------------------------------------------------------------


def test_what_is_written_to_a_parameter_in_place_is_taken_over() -> None:
    """Only where it is not the rounded master any more: elsewhere the master keeps its lower
    bits."""
    ours, a = bfloat16_run(master_weights="fp32")
    run(a, ours, range(3))
    expected = values(a)
    with torch.no_grad():
        ours[0][3:5] = 7.0
        ours[5].add_(0)  # nothing new
    expected[0][3:5] = 7.0
    theirs = [Parameter(value) for value in expected]
    b = FusedAdamW(groups(theirs), lr=1e-2)
    saved = copy.deepcopy(a.state_dict())
    for state in saved["state"].values():
        del state["master_param"]
    b.load_state_dict(saved)
    step_both(a, ours, b, theirs, 3)
    assert_equal(values(a), theirs)


@pytest.mark.parametrize("master_weights", ["fp32", "split", "split24"])
def test_refresh_masters(master_weights: str) -> None:
    """A write through .data is not noticed by itself."""
    ours, a = bfloat16_run(master_weights=master_weights)
    run(a, ours, range(2))
    ours[0].data.fill_(5.0)
    a.refresh_masters()
    assert_equal(values(a), [param.float() for param in ours])
    set_gradients(ours, 2)
    ours[0].grad = torch.zeros_like(ours[0])
    a.param_groups[0]["lr"] = 0.0
    a.step()
    assert (ours[0] == 5).all()


@pytest.mark.parametrize("master_weights", ["fp32", "split", "split24", None])
@pytest.mark.parametrize("loaded", [False, True], ids=["stepped", "loaded"])
def test_masters_are_asked_for_up_to_date(master_weights: str | None, loaded: bool) -> None:
    ours, a = bfloat16_run(master_weights=master_weights)
    buffer = torch.zeros(3)
    assert a.masters([*ours, buffer]) == [None] * 7  # none before the first step
    run(a, ours, range(1))
    if loaded:
        a.load_state_dict(copy.deepcopy(a.state_dict()))
    kept = a.masters([*ours, buffer])
    if master_weights is None:
        assert kept == [None] * 7
        return
    key = "master_param" if master_weights == "fp32" else "remainder"
    assert kept.pop() is None
    assert all(master is a.state[param][key] for param, master in zip(ours, kept, strict=True))
    assert a.masters(ours, 1) == [None] * 6  # there is no such replica
    with torch.no_grad():
        ours[0].fill_(1.0)
    if master_weights == "fp32":
        assert (a.masters(ours)[0] == 1).all()


@pytest.mark.parametrize("master_weights", ["fp32", "split", "split24"])
@pytest.mark.parametrize("backend", [*BACKENDS, "released"])
def test_averages_that_torchft_writes_stay(backend: str, master_weights: str) -> None:
    """Its LocalSGD averages in a hook after the step, in place, through `.data`."""

    def average(*_: Any) -> None:
        for param in ours:
            param.data.copy_(torch.full_like(param, 3.0))

    average.__module__ = "torchft.local_sgd"
    released = backend == "released"
    ours, a = bfloat16_run(master_weights=master_weights, backend="auto" if released else backend)
    if released:
        a.release_gradients()
    run(a, ours, range(2))
    hook = a.register_step_post_hook(average)
    run(a, ours, range(2, 3))
    hook.remove()
    assert all((value == 3).all() for value in a.masters(ours) if value.dtype == torch.float32)
    for group in a.param_groups:
        group["lr"] = 1e-4
    run(a, ours, range(3, 4))
    for value in values(a):  # from the average on, not from what was there before it
        torch.testing.assert_close(value, torch.full_like(value, 3.0), rtol=0, atol=2e-2)


def test_a_refused_step_leaves_masters_as_they_are() -> None:
    ours, a = bfloat16_run(master_weights="fp32")
    run(a, ours, range(1))
    a.load_state_dict(copy.deepcopy(a.state_dict()))  # the next step is planned anew
    before = values(a)
    with torch.no_grad():
        ours[0].fill_(1.0)
    a.multipliers[0][1] = -1.0
    a.multipliers.append([1.0] * 3)
    with pytest.raises(ValueError, match="multipliers has 2 lists for 1 replicas"):
        a.step()
    assert_equal(values(a), before)
    a.multipliers = [[1.0] * 3]
    ours[0].grad = None
    a.step()
    assert (values(a)[0] == 1).all()


# -- rounding --------------------------------------------------------------------------------------


def test_random_numbers_follow_from_the_seed_alone() -> None:
    """Not from torch's, nor from the other parameters' gradients; a resume: test_state.py."""

    def stepped(seed: int, others: int, skip: bool = False) -> torch.Tensor:
        params, optimizer = bfloat16_run(stochastic_rounding=True, seed=seed)
        for step in range(3):
            torch.manual_seed(others)
            set_gradients(params, step, skip=lambda step, i: skip and i == 0)
            optimizer.step()
        return params[5]

    assert torch.equal(stepped(1, 1), stepped(1, 2)) and torch.equal(
        stepped(1, 1), stepped(1, 1, True)
    )
    assert not torch.equal(stepped(1, 1), stepped(2, 1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_moments_in_bfloat16_do_not_stand_still(backend: str) -> None:
    """exp_avg_sq moves by a thousandth of the way, less than half of bfloat16's spacing."""
    param = Parameter(torch.zeros(4096))
    optimizer = FusedAdamW([param], moment_dtype=torch.bfloat16, backend=backend)
    for step in range(60):
        param.grad = torch.full_like(param, 1.0 if step < 30 else 2.0)
        optimizer.step()
    state = optimizer.state[param]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    exact = (1 - 0.999**30) * 0.999**30 + 4 * (1 - 0.999**30)
    assert state["exp_avg_sq"].float().mean().item() == pytest.approx(exact, rel=2e-3)
