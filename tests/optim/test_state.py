"""States: between ours and torch's in both directions, through files, in other precisions, damaged
ones."""

from __future__ import annotations

import copy
import io
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD

from hdet.optim import FusedAdamW

from .common import (
    BY_NAME,
    FREE,
    MUON,
    OURS,
    STORED,
    TORCH_RULES,
    Pair,
    Rule,
    assert_close,
    assert_equal,
    groups,
    names,
    parameters,
    replicated,
    run,
    state_of,
)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


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


KINDS = {
    "bfloat16 moments": {torch.bfloat16},
    **{stored: {torch.float32, torch.uint8} for stored in ("8 bits", "split, 8 bits")},
}
"""of first moments"""
STATES = [
    *((rule, 1, stored) for rule in OURS for stored in ("float32", "bfloat16", "split, 8 bits")),
    *(
        (BY_NAME["adamw"], count, f"{kind} masters")
        for kind in ("float32", "split")
        for count in (1, 3)
    ),
    *((rule, 3, kind) for rule in (BY_NAME["adamw"], MUON, FREE) for kind in ("float32", "8 bits")),
    *((rule, 3, "split masters") for rule in (MUON, FREE)),
    *((rule, count, "split, averages") for rule in (BY_NAME["adamw"], MUON) for count in (1, 3)),
]


@pytest.mark.usefixtures("small_tensors_have_codes")
@pytest.mark.parametrize("model_first", [True, False], ids=["model first", "optimizer first"])
@pytest.mark.parametrize(("rule", "count", "stored"), STATES)
def test_our_state_resumes_bitwise(rule: Rule, count: int, stored: str, model_first: bool) -> None:
    """Of several replicas in the middle of a cycle.

    Moments stay what they are, which torch's load_state_dict would cast to the parameter's dtype;
    what is saved of 8 bits are float32 values.
    """
    (ours, a, _), (theirs, b, sets) = (replicated(count, rule, **STORED[stored]) for _ in range(2))
    run(a, ours, range(3), skip=lambda step, i: (step, i) == (1, 2))
    saved = through_a_file(
        {"model": [param.detach() for param in ours], "optimizer": a.state_dict()}
    )
    assert not any(
        key.endswith("_scale") for x in saved["optimizer"]["state"].values() for key in x
    )
    run(b, theirs, range(7, 9))  # it has gone elsewhere
    if not model_first:
        b.load_state_dict(saved["optimizer"])
    with torch.no_grad():
        for param, value in zip(theirs, saved["model"], strict=True):
            param.copy_(value)  # as Module.load_state_dict
    if model_first:
        b.load_state_dict(saved["optimizer"])
    for k in range(count):
        assert all(map(operator.is_, b.replica_parameters(k), sets[k])), "in place"
    for optimizer, params in ((a, ours), (b, theirs)):
        run(optimizer, params, range(3, 5))
        optimizer.average_replicas([1.0, 2.0, 3.0][:count])
        run(optimizer, params, range(5, 6))
    for k in range(count):
        assert_equal(a.replica_parameters(k), b.replica_parameters(k))
    for one, other in zip(state_of(a), state_of(b), strict=True):
        kinds = {one[name].dtype for name in rule.moments[:1] if name in one}
        assert kinds <= KINDS.get(stored, {torch.float32})
        torch.testing.assert_close(one, other, rtol=0, atol=0)


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
