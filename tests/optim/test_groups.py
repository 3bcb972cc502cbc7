"""Parameter groups and parameters that change, and what is refused before anything is changed."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

from hdet.optim import FusedAdam, FusedAdamW, FusedLion, FusedOptimizer, FusedSGD

from .common import (
    BACKENDS,
    RULES,
    TORCH_RULES,
    Pair,
    Rule,
    assert_equal,
    groups,
    names,
    parameters,
    plans_made,
    set_gradients,
)


def _new_object(optimizer: Optimizer, params: list[Parameter]) -> None:
    """Of the same memory, which begins anew."""
    optimizer.state.pop(params[0])
    params[0] = optimizer.param_groups[0]["params"][0] = Parameter(params[0].data)


def _new_dictionaries(optimizer: Optimizer, params: list[Parameter]) -> None:
    for param in params:
        state = optimizer.state[param] = {k: v.clone() for k, v in optimizer.state[param].items()}
        state["exp_avg"].zero_()


def _state_replaced(optimizer: Optimizer, params: list[Parameter]) -> None:
    optimizer.state = copy.copy(optimizer.state)
    _new_dictionaries(optimizer, params)


def _another_group(optimizer: Optimizer, params: list[Parameter]) -> None:
    one, other = optimizer.param_groups[:2]
    one["params"].extend(other["params"])
    other["params"].clear()


def _added_group(optimizer: Optimizer, params: list[Parameter]) -> None:
    params.append(Parameter(torch.ones(9)))
    optimizer.add_param_group({"params": params[-1], "lr": 0.1})


CHANGES: dict[str, Callable[[Optimizer, list[Parameter]], Any]] = {
    "new memory": lambda o, p: setattr(p[0], "data", p[0].data.clone()),
    "new object": _new_object,
    "new first moment": lambda o, p: o.state[p[1]].update(exp_avg=torch.zeros(17)),
    "new second moment": lambda o, p: o.state[p[1]].update(exp_avg_sq=torch.ones(17)),
    "new step": lambda o, p: o.state[p[0]].update(step=torch.tensor(70.0)),
    "new dictionaries": _new_dictionaries,
    "state of one removed": lambda o, p: o.state.pop(p[3]),
    "state cleared": lambda o, p: o.state.clear(),
    "state replaced": _state_replaced,
    "another group": _another_group,
    "another order": lambda o, p: o.param_groups.reverse(),
    "added group": _added_group,
    "group without parameters": lambda o, p: o.add_param_group({"params": []}),
    "other settings": lambda o, p: o.param_groups[0].update(
        lr=0.02, betas=(0.7, 0.8), eps=1e-3, weight_decay=0.3, maximize=True
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_a_plan_was_made_for_may_change(
    change: Callable[[Optimizer, list[Parameter]], None], backend: str
) -> None:
    pair = Pair(backend=backend)
    for step in pair.run(6):
        if step == 2:
            change(pair.a, pair.ours)
            change(pair.b, pair.theirs)
    pair.check()


def test_a_plan_is_kept_while_nothing_changes() -> None:
    pair = Pair()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(pair.a, 0.9)
    with plans_made() as made:
        for step in pair.run(6):
            scheduler.step()
            pair.a.multipliers[0][0] = 1 + step / 10
    assert made.call_count == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_that_come_and_go_are_planned_for_once(backend: str) -> None:
    """One plan for each first gradient, whatever set of them a step has; and no state, nor anything
    else, without one."""
    pair = Pair(backend=backend)
    with plans_made() as made:
        skip = lambda step, i: (
            (i == 4 and step < 5) or (i == 1 and step < 3) or (step > 5 and (step + i) % 3 == 0)
        )
        for step in pair.run(9, skip):
            known = {0, 2, 3, 5} | {i for i, first in ((1, 3), (4, 5)) if step >= first}
            assert set(pair.a.state_dict()["state"]) == set(pair.b.state_dict()["state"]) == known
    assert made.call_count == 3
    pair.check()
    set_gradients(pair.ours, 9, skip=lambda _, i: i == 3)
    versions = [param._version for param in pair.ours]
    pair.a.step()  # what a backward pass has saved of a parameter without a gradient stays valid
    changed = [param._version > old for param, old in zip(pair.ours, versions, strict=True)]
    assert changed == [i != 3 for i in range(6)]
    for param in pair.ours:
        param.grad = None
    pair.a.step()
    assert pair.a.step_skipped is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES, ids=names)
def test_parameters_of_several_dtypes(rule: Rule, backend: str) -> None:
    """One plan for all; each steps as it would alone."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16] * 2
    make = lambda: [Parameter(p.detach().to(d)) for p, d in zip(parameters(), dtypes, strict=True)]
    ours, alone = make(), make()
    a = rule.fused(groups(ours, rule), lr=1e-2, backend=backend)
    others = [
        rule.fused([{**group, "params": [param]}], lr=1e-2, backend=backend)
        for group in groups(alone, rule)
        for param in group["params"]
    ]
    for step in range(4):
        set_gradients(ours, step)
        set_gradients(alone, step)
        with plans_made() as made:
            a.step()
        assert made.call_count == (step == 0)
        for other in others:
            other.step()
    assert_equal(ours, alone)


def test_a_parameter_changes_its_dtype() -> None:
    pair = Pair(master_weights="fp32")
    pair.go(2)
    for dtype in (torch.bfloat16, torch.float32):
        for param in pair.ours:
            param.data = param.data.to(dtype)
        set_gradients(pair.ours, 3)
        pair.a.step()
        kept = ["master_param" in pair.a.state[param] for param in pair.ours]
        assert kept == [dtype == torch.bfloat16] * len(pair.ours)


def test_the_state_follows_a_parameter_to_its_device() -> None:
    """Without a second device: a state that is elsewhere (meta) is asked to move, which meta
    tensors refuse by name."""
    pair = Pair()
    pair.go(1)
    pair.a.state[pair.ours[0]]["exp_avg"] = torch.zeros(33, 17, device="meta")
    set_gradients(pair.ours, 1)
    with pytest.raises(NotImplementedError, match="meta"):
        pair.a.step()


@pytest.mark.filterwarnings("ignore:tensors on meta")
def test_a_device_without_memory_is_refused_by_name() -> None:
    param = Parameter(torch.ones(2, device="meta"))
    param.grad = torch.ones(2, device="meta")
    optimizer = FusedAdamW([param])
    with pytest.raises(ValueError, match="no memory .meta or fake tensor"):
        optimizer.step()
    assert not optimizer.state


def test_multipliers_follow_the_groups_and_the_copies_but_not_the_state() -> None:
    params = parameters()
    optimizer = FusedAdamW(params[:2])
    assert optimizer.multipliers == [[1.0]]
    optimizer.multipliers[0][0] = 1.5
    optimizer.add_param_group({"params": (p for p in params[2:])})
    assert optimizer.multipliers == [[1.5, 1.0]]
    assert "multipliers" not in optimizer.state_dict()
    assert not any("multiplier" in key for group in optimizer.param_groups for key in group)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.multipliers == [[1.5, 1.0]]
    other = copy.deepcopy(optimizer)
    other.multipliers[0][1] = 2.0
    assert optimizer.multipliers == [[1.5, 1.0]]
    optimizer.multipliers[0].append(1.0)
    with pytest.raises(ValueError, match=r"multipliers\[0\] has 3 entries for 2 parameter groups"):
        optimizer.step()
    optimizer.multipliers.append([1.0, 1.0])
    with pytest.raises(ValueError, match="multipliers has 2 lists for 1 replicas"):
        optimizer.step()


def test_frozen_parameters_of_any_dtype_are_left_alone() -> None:
    frozen = Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    param = Parameter(torch.ones(3))
    optimizer = FusedAdamW([frozen, param], lr=0.1)
    param.grad = torch.ones(3)
    optimizer.step()
    assert frozen.tolist() == [1, 1, 1]
    assert param.tolist() != [1, 1, 1]
    assert frozen not in optimizer.state


def test_named_parameters() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = FusedAdamW(model.named_parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
    AdamW(model.named_parameters()).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("rule", TORCH_RULES, ids=names)
def test_arguments_and_defaults_are_torchs(rule: Rule) -> None:
    """In torch's order by position, and all that it takes by name; what is kept of them is what
    torch keeps."""
    ours, theirs = (
        list(inspect.signature(cls).parameters.values()) for cls in (rule.fused, rule.peer)
    )
    placed = [p for p in theirs if p.kind is p.POSITIONAL_OR_KEYWORD]
    for one, other in zip(ours, placed, strict=False):
        assert (one.name, one.kind, one.default) == (other.name, other.kind, other.default)
    param = [Parameter(torch.ones(1))]
    options = {p.name: True for p in theirs if p.kind is p.KEYWORD_ONLY}
    for name in options.keys() & {"differentiable", "decoupled_weight_decay"} | {"amsgrad"}:
        if any(p.name == name for p in theirs):
            kept = {"fused": True, name: True}
            with pytest.raises(ValueError, match=f"{name}=True of the defaults is"):
                rule.fused(param, **kept)
            options[name] = False
    assert rule.fused(param, **options).defaults == {**rule.peer(param).defaults, **options}
    with pytest.raises(TypeError, match="unexpected keyword argument 'rho'"):
        rule.fused(param, rho=0.5)


NAN = float("nan")
REFUSED: dict[type[FusedOptimizer], list[tuple[str, dict[str, Any]]]] = {
    FusedAdamW: [
        ("lr=-1.0 of the defaults must be finite and not negative", {"lr": -1.0}),
        ("lr=nan", {"lr": NAN}),
        ("lr of the defaults must be a number or a one-element tensor", {"lr": torch.ones(2)}),
        ("eps=nan", {"eps": NAN}),
        ("weight_decay=-0.1", {"weight_decay": -0.1}),
        (r"beta1=1.0 of the defaults must be in \[0, 1\)", {"betas": (1.0, 0.9)}),
        ("backend='metal' is unknown", {"backend": "metal"}),
        ("master_weights='fp64' is unknown", {"master_weights": "fp64"}),
        ("moment_dtype=torch.float16 is not supported", {"moment_dtype": torch.float16}),
        ("seed=-1", {"seed": -1}),
        ("decay_at='here' is unknown", {"decay_at": "here"}),
        ("max_grad_norm=0 must be positive", {"max_grad_norm": 0}),
        ("max_grad_norm=nan must be positive", {"max_grad_norm": NAN}),
    ],
    FusedLion: [
        ("beta2=nan", {"betas": (0.9, NAN)}),
        (r"betas=\(0.9,\) of the defaults must be 2 numbers", {"betas": (0.9,)}),
        ("lr=inf", {"lr": float("inf")}),
    ],
    FusedSGD: [
        ("momentum=-0.1", {"momentum": -0.1}),
        ("dampening=nan", {"dampening": NAN}),
        ("nesterov=True of the defaults needs momentum > 0", {"nesterov": True}),
        ("and dampening 0, got 0.9 and 0.1", {"nesterov": True, "momentum": 0.9, "dampening": 0.1}),
        ("FusedSGD takes no cautious_decay", {"cautious_decay": True}),
    ],
    FusedAdam: [("FusedAdam takes no cautious_decay", {"cautious_decay": True})],
}


@pytest.mark.parametrize(
    ("cls", "message", "options"), [(cls, *row) for cls, rows in REFUSED.items() for row in rows]
)
def test_refused_options(cls: Any, message: str, options: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        cls([Parameter(torch.ones(2))], **options)


def test_refused_groups_leave_the_optimizer_as_it_was() -> None:
    params = parameters()
    optimizer = FusedAdamW(params[:1])
    for group, error in [
        ({"params": params[1:2], "lr": NAN}, ValueError),
        ({"params": params[1:2], "amsgrad": True}, ValueError),
        ({"params": [Parameter(torch.ones(2).double())]}, TypeError),
        ({"params": params[:1]}, ValueError),  # torch: appears in more than one group
    ]:
        with pytest.raises(error), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == len(optimizer.multipliers[0]) == 1


SPOIL: dict[str, Callable[[Any, list[Any]], Any]] = {
    "lr=nan": lambda o, p: o.param_groups[1].update(lr=NAN),
    "beta2=1.0": lambda o, p: o.param_groups[1].update(betas=(0.9, 1.0)),
    "multipliers of": lambda o, p: o.multipliers[0].__setitem__(0, NAN),
    "layout": lambda o, p: setattr(p[1], "grad", p[1].grad.to_sparse()),
    "dtype": lambda o, p: setattr(p[0], "data", p[0].data.double()),
    "overlap": lambda o, p: setattr(p[1], "data", p[5].data[:17]),
}


@pytest.mark.parametrize("message", SPOIL)
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_refused_steps_change_nothing(message: str, first: bool, backend: str) -> None:
    params = parameters()
    optimizer = FusedAdamW(groups(params), backend=backend)
    set_gradients(params, 0)
    if not first:
        optimizer.step()
    SPOIL[message](optimizer, params)
    found = lambda: (optimizer.state_dict()["state"], [param.detach() for param in params])
    before = copy.deepcopy(found())
    for _ in range(2):  # asked twice, it is refused twice
        with pytest.raises((ValueError, TypeError), match=message):
            optimizer.step()
    torch.testing.assert_close(found(), before, rtol=0, atol=0)


@pytest.mark.parametrize("named", [False, True])
def test_a_parameter_that_is_named_twice_is_warned_of_and_stepped_once(named: bool) -> None:
    first, second = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    params = [("a", first), ("b", second), ("a", first)] if named else [first, second, first]
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = FusedSGD(params, lr=0.5)
    first.grad, second.grad = torch.ones(3), torch.ones(2)
    optimizer.step()
    assert first.tolist() == [0.5] * 3 and second.tolist() == [0.5] * 2
    group = optimizer.param_groups[0]
    assert len(group["params"]) == 2 and group.get("param_names") == (["a", "b"] if named else None)
