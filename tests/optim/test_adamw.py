"""FusedAdamW beside torch.optim.AdamW: same numbers, same state, same manners."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

from hdet.optim import FusedAdamW

SHAPES = [(33, 17), (17,), (0,), (5, 3, 2), (), (64,)]


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": params[:2], "lr": 3e-3, "weight_decay": 0.1},
        {"params": params[2:4], "betas": (0.8, 0.9), "eps": 1e-4},
        {"params": params[4:], "weight_decay": 0.0, "maximize": True},
    ]


def set_gradients(params: list[torch.nn.Parameter], step: int, skip: Callable[[int, int], bool] = lambda step, i: False) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for i, param in enumerate(params):
        gradient = torch.randn(param.shape, generator=generator)
        param.grad = None if skip(step, i) else gradient


def both(
    make: Callable[[list[torch.nn.Parameter], type], torch.optim.Optimizer] = lambda params, cls: cls(groups(params), lr=1e-2),
) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer, list[torch.nn.Parameter], torch.optim.Optimizer]:
    ours, theirs = parameters(), parameters()
    return ours, make(ours, FusedAdamW), theirs, make(theirs, AdamW)


def assert_equal(ours: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter]) -> None:
    """1e-6 of the parameters' scale, which is 1."""
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-6, atol=1e-6)


def assert_same_state(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    one, other = ours.state_dict(), theirs.state_dict()
    assert one["state"].keys() == other["state"].keys()
    for key, values in other["state"].items():
        assert one["state"][key].keys() == values.keys()
        for name, value in values.items():
            found = one["state"][key][name]
            assert (found.dtype, found.shape, found.device) == (value.dtype, value.shape, value.device)
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)
    assert [group.keys() for group in one["param_groups"]] == [group.keys() for group in other["param_groups"]]
    assert one["param_groups"] == other["param_groups"]


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_hundred_steps(backend: str) -> None:
    ours, theirs = parameters(), parameters()
    a, b = FusedAdamW(groups(ours), lr=1e-2, backend=backend), AdamW(groups(theirs), lr=1e-2)
    for step in range(100):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        a.step()
        b.step()
    assert_equal(ours, theirs)
    assert_same_state(a, b)


def test_defaults_and_arguments_are_torchs() -> None:
    theirs, ours = AdamW(parameters()).defaults, FusedAdamW(parameters()).defaults
    assert ours == theirs


def test_with_a_scheduler_and_momentum_cycling() -> None:
    ours, a, theirs, b = both()
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[1e-2, 2e-2, 3e-3], total_steps=30) for o in (a, b)]
    for step in range(30):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        a.step()
        b.step()
        for scheduler in schedulers[: 2 if step < 29 else 0]:
            scheduler.step()
    assert_equal(ours, theirs)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_gradients_that_come_and_go(backend: str) -> None:
    def skip(step: int, i: int) -> bool:
        return step < 2 or (i == 1 and step % 3 == 0) or (i >= 4 and step < 6)  # none at all, one of a group, a whole group

    ours, theirs = parameters(), parameters()
    a, b = FusedAdamW(groups(ours), backend=backend), AdamW(groups(theirs))
    for step in range(20):
        set_gradients(ours, step, skip)
        set_gradients(theirs, step, skip)
        a.step()
        b.step()
    assert_equal(ours, theirs)
    assert_same_state(a, b)


@pytest.mark.parametrize("through_a_file", [False, True])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}])
def test_states_pass_both_ways_in_the_middle_of_a_run(options: dict[str, bool], through_a_file: bool) -> None:
    def passed_on(state: dict[str, Any]) -> dict[str, Any]:
        if not through_a_file:
            return copy.deepcopy(state)
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    ours, theirs = parameters(), parameters()
    a, b = FusedAdamW(groups(ours), lr=1e-2), AdamW(groups(theirs), lr=1e-2, **options)

    def run(first: int, last: int) -> None:
        for step in range(first, last):
            set_gradients(ours, step)
            set_gradients(theirs, step)
            a.step()
            b.step()

    run(0, 5)
    from_torch, from_ours = passed_on(b.state_dict()), passed_on(a.state_dict())
    a, b = FusedAdamW(groups(ours), lr=0.5), AdamW(groups(theirs), lr=0.5, **options)
    a.load_state_dict(from_torch)
    b.load_state_dict(from_ours)
    run(5, 12)
    a.load_state_dict(passed_on(a.state_dict()))
    run(12, 15)
    assert_equal(ours, theirs)
    assert all(value["step"].item() == 15 and value["step"].dtype == torch.float32 for value in a.state_dict()["state"].values())


def test_old_states_with_numbers_for_steps_load() -> None:
    ours, a, theirs, b = both()
    set_gradients(ours, 0)
    set_gradients(theirs, 0)
    a.step()
    b.step()
    state = copy.deepcopy(b.state_dict())
    for values in state["state"].values():
        values["step"] = int(values["step"].item())
    for group in state["param_groups"]:
        for key in ("decoupled_weight_decay", "fused", "differentiable", "maximize"):
            del group[key]
    for group, maximize in zip(state["param_groups"], [False, False, True], strict=True):
        group["maximize"] = maximize
    a.load_state_dict(state)
    set_gradients(ours, 1)
    set_gradients(theirs, 1)
    a.step()
    b.step()
    assert_equal(ours, theirs)
    assert_same_state(a, b)


def test_loading_does_not_tie_the_step_counters_of_two_optimizers() -> None:
    ours, a, theirs, b = both()
    set_gradients(theirs, 0)
    b.step()
    a.load_state_dict(b.state_dict())
    set_gradients(ours, 0)
    a.step()
    assert b.state[theirs[0]]["step"].item() == 1
    assert a.state[ours[0]]["step"].item() == 2


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_multiplier_is_a_scaled_rate(backend: str) -> None:
    ours, theirs = parameters(), parameters()
    a, b = FusedAdamW(groups(ours), lr=1e-2, backend=backend), AdamW(groups(theirs), lr=1e-2)
    a.multipliers[:] = [1.3, 0.7, 0.0]
    rates = [group["lr"] for group in a.param_groups]
    for group, multiplier in zip(b.param_groups, a.multipliers, strict=True):
        group["lr"] *= multiplier
    for step in range(10):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        a.step()
        b.step()
    assert_equal(ours, theirs)
    assert [group["lr"] for group in a.param_groups] == rates


def test_multipliers_follow_the_groups_and_the_copies_but_not_the_state() -> None:
    params = parameters()
    optimizer = FusedAdamW(params[:2])
    assert optimizer.multipliers == [1.0]
    optimizer.multipliers[0] = 1.5
    optimizer.add_param_group({"params": (p for p in params[2:])})
    assert optimizer.multipliers == [1.5, 1.0]
    assert "multipliers" not in optimizer.state_dict()
    assert not any("multiplier" in key for group in optimizer.param_groups for key in group)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.multipliers == [1.5, 1.0]
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.multipliers == [1.5, 1.0]
        other.multipliers[1] = 2.0
        assert optimizer.multipliers == [1.5, 1.0]
    optimizer.multipliers.append(1.0)
    with pytest.raises(ValueError, match="multipliers has 3 entries for 2 parameter groups"):
        optimizer.step()


@pytest.mark.parametrize("how", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_goes_on_alone(how: Callable[[FusedAdamW], FusedAdamW]) -> None:
    ours, a, theirs, b = both()
    set_gradients(ours, 0)
    a.step()
    other = how(a)
    copied = [param for group in other.param_groups for param in group["params"]]
    set_gradients(copied, 1)
    other.step()
    set_gradients(theirs, 0)
    b.step()
    assert_equal(ours, theirs)
    set_gradients(theirs, 1)
    b.step()
    assert_equal(copied, theirs)


def test_tensor_rate() -> None:
    def make(params: list[torch.nn.Parameter], cls: type) -> torch.optim.Optimizer:
        return cls(params, lr=torch.tensor(1e-2), weight_decay=0.1)

    ours, a, theirs, b = both(make)
    for step in range(6):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        for optimizer in (a, b):
            optimizer.step()
            optimizer.param_groups[0]["lr"].mul_(0.9)
    assert_equal(ours, theirs)


def test_closure_hooks_and_scaler() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdamW([param], lr=0.1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        calls.append("closure")
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert calls == ["before", "closure", "after"]
    torch.testing.assert_close(param.detach(), torch.full((3,), 1 - 0.1 - 1e-3))

    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = param.detach().clone()
    for scale, moved in ((float("inf"), False), (1.0, True)):
        optimizer.zero_grad()
        scaler.scale((param**2).sum() * scale).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (param.detach() != before).all().item() == moved


def test_a_step_between_forward_and_backward_is_noticed() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdamW([param], lr=0.1)
    param.grad = torch.ones(3)
    loss = (param**2).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def _new_memory(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
    params[0].data = params[0].data.clone()


def _new_object(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
    old, new = params[0], torch.nn.Parameter(params[0].data)  # of the same memory, with a state of its own
    optimizer.state[new] = {key: value.clone() for key, value in optimizer.state.pop(old).items()}
    optimizer.state[new]["exp_avg"].zero_()
    params[0] = optimizer.param_groups[0]["params"][0] = new


def _new_first_moment(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
    optimizer.state[params[1]]["exp_avg"] = torch.zeros(17)


def _new_second_moment(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
    optimizer.state[params[1]]["exp_avg_sq"] = torch.ones(17)


def _new_step(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
    optimizer.state[params[0]]["step"] = torch.tensor(70.0)


def _state_of_one_removed(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
    del optimizer.state[params[3]]


def _state_cleared(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
    optimizer.state.clear()


def _state_replaced(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
    optimizer.state = copy.copy(optimizer.state)
    for param in params:
        optimizer.state[param] = {key: value.clone() for key, value in optimizer.state[param].items()}
        optimizer.state[param]["exp_avg"].zero_()


def _another_group(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
    one, other = optimizer.param_groups[:2]
    one["params"].extend(other["params"])
    other["params"].clear()


def _another_order(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
    optimizer.param_groups.reverse()


def _added_group(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
    params.append(torch.nn.Parameter(torch.ones(9)))
    optimizer.add_param_group({"params": params[-1], "lr": 0.1})


@pytest.mark.parametrize(
    "change",
    [
        _new_memory,
        _new_object,
        _new_first_moment,
        _new_second_moment,
        _new_step,
        _state_of_one_removed,
        _state_cleared,
        _state_replaced,
        _another_group,
        _another_order,
        _added_group,
    ],
)
def test_what_a_plan_was_made_for_may_change(change: Callable[[torch.optim.Optimizer, list], None]) -> None:
    ours, a, theirs, b = both()
    for step in range(6):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        a.step()
        b.step()
        if step == 2:
            change(a, ours)
            change(b, theirs)
    assert_equal(ours, theirs)
    assert_same_state(a, b)


def test_gradients_are_not_kept() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdamW([param])
    param.grad = torch.ones(3)
    alive = weakref.ref(param.grad)
    optimizer.step()
    optimizer.zero_grad()
    assert alive() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0 of the defaults must be finite and not negative"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"lr": torch.tensor([1.0, 2.0])}, "lr of the defaults must be a number or a one-element tensor"),
        ({"eps": float("nan")}, "eps=nan"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"betas": (1.0, 0.9)}, "betas="),
        ({"betas": (0.9, float("nan"))}, "betas="),
        ({"backend": "metal"}, "backend='metal' is unknown"),
    ],
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FusedAdamW([torch.nn.Parameter(torch.ones(2))], **options)


def test_refused_groups_leave_the_optimizer_as_it_was() -> None:
    params = parameters()
    optimizer = FusedAdamW(params[:1])
    for group, error in [
        ({"params": params[1:2], "lr": float("nan")}, ValueError),
        ({"params": params[1:2], "amsgrad": True}, ValueError),
        ({"params": [torch.nn.Parameter(torch.ones(2).double())]}, TypeError),
        ({"params": params[:1]}, ValueError),  # torch: appears in more than one group
    ]:
        with pytest.raises(error), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == len(optimizer.multipliers) == 1


def test_refused_states_leave_the_optimizer_as_it_was() -> None:
    ours, a, theirs, _ = both()
    set_gradients(ours, 0)
    a.step()
    before = copy.deepcopy(a.state_dict())
    other = AdamW(groups(theirs), amsgrad=True)
    with pytest.raises(ValueError, match="amsgrad=True of parameter group 0 of the loaded state is not supported"):
        a.load_state_dict(other.state_dict())
    torch.testing.assert_close(a.state_dict()["state"], before["state"])
    assert a.state_dict()["param_groups"] == before["param_groups"]


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda o, p: o.param_groups[1].update(lr=float("nan")), ValueError),
        (lambda o, p: o.multipliers.__setitem__(0, float("nan")), ValueError),
        (lambda o, p: setattr(p[1], "grad", p[1].grad.to_sparse()), TypeError),
        (lambda o, p: setattr(p[0], "grad", torch.randn(17, 33).t()), ValueError),
        (lambda o, p: setattr(p[0], "data", p[0].data.double()), TypeError),
        (lambda o, p: setattr(p[0], "data", torch.randn(17, 33).t()), ValueError),
    ],
    ids=["nan rate", "nan multiplier", "sparse", "non-contiguous gradient", "dtype", "non-contiguous parameter"],
)
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
def test_refused_steps_change_nothing(spoil: Callable[[FusedAdamW, list], None], error: type[Exception], first: bool) -> None:
    params = parameters()
    optimizer = FusedAdamW(groups(params))
    set_gradients(params, 0)
    if not first:
        optimizer.step()
    spoil(optimizer, params)
    before = copy.deepcopy((optimizer.state_dict()["state"], [param.detach() for param in params]))
    with pytest.raises(error):
        optimizer.step()
    torch.testing.assert_close((optimizer.state_dict()["state"], [param.detach() for param in params]), before, rtol=0, atol=0)


def test_frozen_parameters_of_any_dtype_are_left_alone() -> None:
    frozen = torch.nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdamW([frozen, param], lr=0.1)
    param.grad = torch.ones(3)
    optimizer.step()
    assert frozen.tolist() == [1, 1, 1]
    assert param.tolist() != [1, 1, 1]


def test_named_parameters() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = FusedAdamW(model.named_parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
    AdamW(model.named_parameters()).load_state_dict(optimizer.state_dict())


def test_torchs_arguments_are_accepted_and_what_cannot_be_done_is_refused() -> None:
    parameter = [torch.nn.Parameter(torch.ones(3))]
    FusedAdamW(
        parameter, 1e-3, (0.9, 0.99), 1e-8, 1e-2, False, maximize=False, foreach=True, capturable=False, differentiable=False, fused=True
    )
    for name in ("amsgrad", "capturable", "differentiable"):
        with pytest.raises(ValueError, match=f"{name}=True"):
            FusedAdamW(parameter, **{name: True})


def test_a_state_without_its_moments_is_refused_unchanged() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdamW([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state_dict()
    del state["state"][0]["exp_avg_sq"]
    fresh = FusedAdamW([parameter])
    with pytest.raises(ValueError, match="lacks exp_avg_sq"):
        fresh.load_state_dict(state)
    assert not fresh.state
