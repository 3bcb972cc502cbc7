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
from torch.optim import SGD, Adam, AdamW, NAdam, RAdam

from hdet.optim import FusedAdam, FusedAdamW, FusedLion, FusedNAdamW, FusedOptimizer, FusedSGD

from .common import (
    BACKENDS,
    BY_NAME,
    FREE,
    MUON,
    OURS,
    TORCH_RULES,
    Pair,
    Rule,
    assert_close,
    assert_equal,
    groups,
    names,
    parameters,
    run,
    set_gradients,
    state_of,
)
from .test_replicas import WEIGHTS, replicated


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


BF16 = torch.bfloat16
RUNS = [
    *((rule, torch.float32, 1, {}) for rule in OURS),
    *((rule, BF16, 1, {}) for rule in OURS),
    *(
        (BY_NAME["adamw"], BF16, count, {"master_weights": kind})
        for kind in ("fp32", "split")
        for count in (1, 3)
    ),
    *((rule, torch.float32, 3, {}) for rule in (BY_NAME["adamw"], MUON, FREE)),
    *((rule, BF16, 3, {"master_weights": "split"}) for rule in (MUON, FREE)),
]


@pytest.mark.parametrize("model_first", [True, False], ids=["model first", "optimizer first"])
@pytest.mark.parametrize(("rule", "dtype", "count", "options"), RUNS)
def test_our_state_resumes_bitwise(
    rule: Rule, dtype: torch.dtype, count: int, options: dict[str, Any], model_first: bool
) -> None:
    """Of several replicas in the middle of a cycle.

    Moments stay float32, which torch's load_state_dict would cast to the parameter's dtype.
    """
    (ours, a, _), (theirs, b, sets) = (replicated(count, rule, dtype, **options) for _ in range(2))
    run(a, ours, range(3), skip=lambda step, i: (step, i) == (1, 2))
    saved = through_a_file(
        {"model": [param.detach() for param in ours], "optimizer": a.state_dict()}
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
        optimizer.average_replicas(WEIGHTS[:count])
        run(optimizer, params, range(5, 6))
    for k in range(count):
        assert_equal(a.replica_parameters(k), b.replica_parameters(k))
    for one, other in zip(state_of(a), state_of(b), strict=True):
        assert all(one[name].dtype == torch.float32 for name in rule.moments if name in one)
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


def test_an_adam_state_becomes_an_adamw_state_as_in_torch_but_not_the_other_way() -> None:
    pair = Pair(BY_NAME["adam"])
    pair.go(2)
    adamw = FusedAdamW(groups(pair.ours))
    adamw.load_state_dict(pair.b.state_dict())
    assert all(group["decoupled_weight_decay"] for group in adamw.param_groups)
    message = "decoupled_weight_decay=True of parameter group 0 of the loaded state is AdamW"
    with pytest.raises(ValueError, match=message):
        pair.a.load_state_dict(AdamW(groups(pair.theirs)).state_dict())


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


SPOIL: dict[str, Callable[[list[Any], list[Any]], Any]] = {
    r"exp_avg_sq of parameter 1 has the shape \(18,\), the parameter \(17,\)": (
        lambda state, groups: state[1].update(exp_avg_sq=torch.zeros(18))
    ),
    "parameter 1 lacks exp_avg_sq": lambda state, groups: state[1].pop("exp_avg_sq"),
    "parameter 1 lacks step": lambda state, groups: state[1].pop("step"),
    "exp_avg of parameter 1 is a float, not a tensor": (
        lambda state, groups: state[1].update(exp_avg=0.5)
    ),
    "amsgrad=True of parameter group 0 of the loaded state is not supported": (
        lambda state, groups: groups[0].update(amsgrad=True)
    ),
    "lr=nan of parameter group 1 of the loaded state": (
        lambda state, groups: groups[1].update(lr=float("nan"))
    ),
    "parameter group 2 of the loaded state lacks betas: it is not that of a FusedAdamW": (
        lambda state, groups: groups[2].pop("betas")
    ),
    "different number of parameter groups": lambda state, groups: groups.pop(),
}


@pytest.mark.parametrize("message", SPOIL)
def test_damaged_states_are_refused_and_leave_the_optimizer_as_it_was(message: str) -> None:
    pair = Pair()
    pair.go(2)
    state = copy.deepcopy(pair.b.state_dict())
    pair.go(range(2, 3))
    SPOIL[message](state["state"], state["param_groups"])
    before = copy.deepcopy(pair.a.state_dict())
    with pytest.raises(ValueError, match=message):
        pair.a.load_state_dict(state)
    torch.testing.assert_close(pair.a.state_dict()["state"], before["state"], rtol=0, atol=0)
    assert pair.a.state_dict()["param_groups"] == before["param_groups"]
    assert not pair.a._optimizer_load_state_dict_pre_hooks
    pair.go(range(3, 5))
    pair.check()


@pytest.mark.parametrize(
    ("of", "into", "lacks"),
    [
        (SGD, FusedAdamW, "betas"),
        (AdamW, FusedSGD, "momentum"),
        (FusedLion, FusedAdam, "eps"),
        (NAdam, FusedNAdamW, "amsgrad"),
        (RAdam, FusedAdamW, "amsgrad"),
        (Adam, FusedLion, None),
    ],
)
def test_states_of_another_rule_are_refused_by_name(
    of: type, into: type[FusedOptimizer], lacks: str | None
) -> None:
    theirs = parameters()
    set_gradients(theirs, 0)
    other = of(theirs, lr=1e-2)
    other.step()
    ours = into(parameters(), lr=1e-2)
    if lacks is None:  # an Adam has all that a Lion needs
        ours.load_state_dict(other.state_dict())
        return
    with pytest.raises(ValueError, match=f"lacks .*{lacks}"):
        ours.load_state_dict(other.state_dict())


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_counter_of_one_parameter_counts_from_what_is_written_to_it(
    backend: str, in_place: bool
) -> None:
    pair = Pair(backend=backend)
    pair.go(3)
    for optimizer, params in ((pair.a, pair.ours), (pair.b, pair.theirs)):
        for param in (params[1], params[0]):  # not the first of its group, and the first
            if in_place:
                optimizer.state[param]["step"].fill_(1000.0)
            else:
                optimizer.state[param]["step"] = torch.tensor(1000.0)
    pair.go(range(3, 6))
    pair.check()
    assert [float(state["step"]) for state in state_of(pair.a)] == [1003, 1003, 6, 6, 6, 6]
