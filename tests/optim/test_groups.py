"""Arguments, parameter groups and multipliers."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch.nn import Parameter
from torch.optim import AdamW

from hdet.optim import FusedAdamW, FusedSGD
from hdet.testing.rules import parameters, set_gradients

from .common import TORCH_RULES, Pair, Rule, names


def test_the_state_follows_a_parameter_to_its_device() -> None:
    """Without a second device: a state that is elsewhere (meta) is asked to move, which meta
    tensors refuse by name."""
    pair = Pair()
    pair.go(1)
    pair.a.state[pair.ours[0]]["exp_avg"] = torch.zeros(33, 17, device="meta")
    set_gradients(pair.ours, 1)
    with pytest.raises(NotImplementedError, match="meta"):
        pair.a.step()


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
