"""States: between ours and torch's in both directions, through files, in other precisions, damaged
ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD

from hdet.optim import FusedAdamW
from hdet.testing.rules import parameters, run, state_of, through_a_file

from .common import (
    BY_NAME,
    TORCH_RULES,
    Pair,
    Rule,
    assert_close,
    groups,
    names,
)


@pytest.mark.parametrize("passed_on", [copy.deepcopy, through_a_file], ids=["copy", "file"])
@pytest.mark.parametrize(
    "options", [{}, {"fused": True}, {"foreach": True}], ids=["plain", "fused", "foreach"]
)
@pytest.mark.parametrize("rule", TORCH_RULES, ids=names)
def test_states_pass_both_ways_in_the_middle_of_a_run(
    rule: Rule, options: dict[str, bool], passed_on: Callable[[Any], Any]
) -> None:
    pair = Pair(rule)
    pair.b = rule.peer(groups(pair.theirs, rule), lr=1e-2, **options)
    pair.go(5)
    from_torch, from_ours = passed_on(pair.b.state_dict()), passed_on(pair.a.state_dict())
    pair.a = rule.fused(groups(pair.ours, rule), lr=0.5)
    pair.b = rule.peer(groups(pair.theirs, rule), lr=0.5, **options)
    pair.a.load_state_dict(from_torch)
    pair.b.load_state_dict(from_ours)
    pair.go(range(5, 12))
    pair.a.load_state_dict(passed_on(pair.a.state_dict()))
    pair.go(range(12, 15))
    assert_close(pair.ours, pair.theirs)
    if rule.peer is not SGD:
        steps = [state["step"] for state in state_of(pair.a)]
        assert {(step.item(), step.dtype) for step in steps} == {(15, torch.float32)}


@pytest.mark.parametrize(
    "as_",
    [
        int,
        float,
        lambda x: torch.tensor(float(x), dtype=torch.float64),
        lambda x: torch.tensor([int(x)]),
    ],
)
def test_steps_are_numbers_or_tensors_of_any_kind(as_: Callable[[Any], Any]) -> None:
    pair = Pair()
    pair.go(1)
    state = copy.deepcopy(pair.b.state_dict())
    for values in state["state"].values():
        values["step"] = as_(values["step"].item())
    for group in state["param_groups"]:  # what old versions of torch did not have
        for key in ("decoupled_weight_decay", "fused", "differentiable", "capturable", "foreach"):
            del group[key]
    pair.a.load_state_dict(state)
    pair.go(range(1, 3))
    pair.check()


@pytest.mark.parametrize("absent", ["key", "None", "state"])
def test_a_momentum_buffer_may_be_missing(absent: str) -> None:
    """As torch's SGD leaves it before its first momentum. dampening shows whether the next step
    counts as the first."""

    def make(params: list[Parameter], cls: type) -> Any:
        return cls(params, lr=1e-2, momentum=0.9, dampening=0.5)

    pair = Pair(BY_NAME["sgd"], make)
    pair.go(3)
    state = copy.deepcopy(pair.b.state_dict())
    if absent == "state":
        state["state"] = {}
    for values in state["state"].values():
        values["momentum_buffer"] = None
        if absent == "key":
            del values["momentum_buffer"]
    for optimizer in (pair.a, pair.b):
        optimizer.load_state_dict(copy.deepcopy(state))
    pair.go(range(3, 6))
    pair.check()


def test_momentum_may_begin_and_end_in_the_middle_of_a_run() -> None:
    pair = Pair(BY_NAME["sgd"], lambda params, cls: cls(params, lr=1e-2, dampening=0.5))
    for step in pair.run(12):
        for optimizer in (pair.a, pair.b):
            optimizer.param_groups[0]["momentum"] = 0.9 if 2 < step < 5 or 7 < step else 0.0
    pair.check()


@pytest.mark.parametrize("rule", TORCH_RULES, ids=names)
def test_torchs_bfloat16_moments_load(rule: Rule) -> None:
    theirs = parameters(dtype=torch.bfloat16)
    b = rule.peer(groups(theirs, rule), lr=1e-2)
    run(b, theirs, range(1))
    a = rule.fused(groups(parameters(dtype=torch.bfloat16), rule), lr=1e-2)
    a.load_state_dict(b.state_dict())
    for one, other in zip(state_of(a), state_of(b), strict=True):
        for name in rule.moments:
            assert one[name].dtype == torch.float32 and torch.equal(one[name], other[name].float())


def test_loading_does_not_tie_the_step_counters_of_two_optimizers() -> None:
    pair = Pair()
    run(pair.b, pair.theirs, range(1))
    pair.a.load_state_dict(pair.b.state_dict())
    run(pair.a, pair.ours, range(1))
    assert pair.b.state[pair.theirs[0]]["step"].item() == 1
    assert pair.a.state[pair.ours[0]]["step"].item() == 2


def test_load_hooks_see_and_change_the_state() -> None:
    pair = Pair()
    pair.go(2)
    seen: list[Any] = []

    def pre(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        seen.append(len(state["state"]))
        moved = {k: {**v, "exp_avg": v["exp_avg"] + 1} for k, v in state["state"].items()}
        return {**state, "state": moved}

    pair.a.register_load_state_dict_pre_hook(pre)
    pair.a.register_load_state_dict_post_hook(
        lambda optimizer: seen.append(optimizer.state[pair.ours[0]]["exp_avg"].clone())
    )
    pair.a.load_state_dict(pair.b.state_dict())
    assert seen[0] == 6
    torch.testing.assert_close(seen[1], pair.b.state[pair.theirs[0]]["exp_avg"] + 1)
    assert len(pair.a._optimizer_load_state_dict_pre_hooks) == 1


def test_what_is_not_a_parameters_is_carried() -> None:
    pair = Pair()
    pair.go(1)
    state = pair.a.state_dict()
    state["state"]["mine"] = {"a": 1}
    state["state"][0]["note"] = 5
    pair.a.load_state_dict(state)
    assert pair.a.state["mine"] == {"a": 1} and pair.a.state[pair.ours[0]]["note"] == 5
    pair.go(range(1, 2))
    assert pair.a.state_dict()["state"]["mine"] == {"a": 1}


def test_small_moments() -> None:
    """A state in float32 loads into an optimizer with bfloat16 moments, and back."""
    pair = Pair()
    pair.go(2)
    small = FusedAdamW(groups(parameters()), moment_dtype=torch.bfloat16)
    small.load_state_dict(pair.b.state_dict())
    for one, other in zip(state_of(small), state_of(pair.b), strict=True):
        assert one["step"].dtype == torch.float32
        assert torch.equal(one["exp_avg"], other["exp_avg"].bfloat16())
    pair.a.load_state_dict(small.state_dict())
    assert all(state["exp_avg_sq"].dtype == torch.float32 for state in state_of(pair.a))
