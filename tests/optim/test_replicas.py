"""Several replicas that share gradients and moments, and their average."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch.nn import Parameter

from hdet import kernels
from hdet.optim import FusedAdamW
from hdet.testing.rules import STORED, assert_equal, copies, parameters, run, state_of, values

from .common import BY_NAME, FREE, Rule, each_backend, names, put, replicated

WEIGHTS = [0.2, 0.5, 0.3]
SEVERAL = pytest.mark.parametrize("rule", [BY_NAME["adamw"], FREE], ids=names)
"""one whose replicas share their state, and one whose replicas have a part of their own"""
MASTERS = pytest.mark.parametrize("stored", ["float32 masters", "split masters"])
KEPT = pytest.mark.parametrize(
    "stored", ["float32", "float32 masters", "split masters", "split, averages"]
)


@each_backend
@pytest.mark.parametrize("stored", [*[*STORED][:4], "averages"])
@SEVERAL
def test_average_replicas(rule: Rule, stored: str, backend: str) -> None:
    params, optimizer, sets = replicated(3, rule, **STORED[stored], backend=backend)
    run(optimizer, params, range(3))
    of_each = zip(*(values(optimizer, k) for k in range(3)), strict=True)
    expected = [sum(w * t for w, t in zip(WEIGHTS, row, strict=True)) for row in of_each]
    every = [tensor for tensors in sets for tensor in tensors]
    versions = [tensor._version for tensor in every]
    optimizer.average_replicas([10 * w for w in WEIGHTS])  # divided by their sum
    for k in range(3):
        if stored != "bfloat16":
            rounding = 2.0**-16 if stored.startswith("24 bits") else 1e-6
            torch.testing.assert_close(values(optimizer, k), expected, rtol=rounding, atol=1e-7)
        assert_equal(values(optimizer, k), values(optimizer, 0))
        assert_equal(sets[k], sets[0])
    assert all(tensor._version > old for tensor, old in zip(every, versions, strict=True))
    before = values(optimizer, 1)
    run(optimizer, params, range(3, 4))  # and they part again, with their masters
    assert not torch.equal(sets[0][0], sets[2][0])
    assert not torch.equal(values(optimizer, 1)[0], before[0])


def test_the_plan_of_the_average_is_kept_until_memory_moves() -> None:
    params, optimizer, sets = replicated()
    run(optimizer, params, range(1))
    with mock.patch.object(kernels, "average_plan", wraps=kernels.average_plan) as made:
        for _ in range(3):
            optimizer.average_replicas(WEIGHTS)
            run(optimizer, params, range(1))
    assert made.call_count == 1
    params[0].data = params[0].data.clone()
    optimizer.average_replicas(WEIGHTS)
    assert_equal(sets[0], sets[2])


def test_a_replica_of_weight_zero_is_not_read_and_frozen_parameters_are_left_alone() -> None:
    params = parameters()
    params[5].requires_grad_(False)
    optimizer = FusedAdamW(params, lr=1e-2)
    sets = {param: [param, param.detach().clone()] for param in params}
    optimizer.set_replicas(2, sets.__getitem__)
    frozen = [tensor.detach().clone().fill_(k) for k, tensor in enumerate(sets[params[5]])]
    for tensor, value in zip(sets[params[5]], frozen, strict=True):
        tensor.data.copy_(value)
    optimizer.replica_parameters(1)[0].fill_(float("nan"))
    optimizer.average_replicas([3.0, 0.0])
    assert_equal(optimizer.replica_parameters(0)[:5], optimizer.replica_parameters(1)[:5])
    assert not params[0].isnan().any()
    assert_equal(sets[params[5]], frozen)


# -- the state -------------------------------------------------------------------------------------


@MASTERS
@SEVERAL
def test_copies_made_in_the_middle_of_a_run_equal_the_first_to_the_last_bit(
    rule: Rule, stored: str
) -> None:
    params, optimizer, _ = replicated(1, rule, **STORED[stored])
    run(optimizer, params, range(3))
    expected = values(optimizer, 0)
    optimizer.set_replicas(2, copies(2))
    optimizer.average_replicas([0.5, 0.5])
    assert_equal(values(optimizer, 0), expected)
    assert_equal(values(optimizer, 1), expected)
    for step in (3, 4):  # at equal multipliers
        run(optimizer, params, range(step, step + 1))
        assert_equal(values(optimizer, 0), values(optimizer, 1))


@pytest.mark.parametrize("stepped", [False, True], ids=["loaded", "stepped"])
def test_an_average_sees_what_was_written_to_parameters_before_it(stepped: bool) -> None:
    params, optimizer, sets = replicated(2, dtype=torch.bfloat16, master_weights="fp32")
    run(optimizer, params, range(1))
    if not stepped:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():
        for k in range(2):
            for tensor in sets[k]:
                tensor.fill_(1 + 2 * k)
    optimizer.average_replicas([0.5, 0.5])
    assert all((tensor == 2).all() for tensors in sets for tensor in tensors)


def test_an_average_is_not_taken_for_somebody_elses_writing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params, optimizer, _ = replicated(2, dtype=torch.bfloat16, master_weights="fp32")
    run(optimizer, params, range(1))
    monkeypatch.setattr(
        "hdet.optim.masters.adopt",
        lambda *_: pytest.fail("masters were compared with parameters"),
    )
    optimizer.average_replicas([0.5, 0.5])
    run(optimizer, params, range(1, 4))


def test_states_of_another_number_of_replicas() -> None:
    params, three, _ = replicated(3)
    run(three, params, range(2))
    state = three.state_dict()
    _, two, sets = replicated(2)
    before = copy.deepcopy([tensor.detach() for tensor in sets[1]])
    message = "the loaded state has 3 replicas that are not equal, this optimizer 2"
    with pytest.raises(ValueError, match=message):
        two.load_state_dict(state)
    assert_equal(sets[1], before)
    alone, one, _ = replicated(1)
    one.load_state_dict(state)
    assert not any("replica_params" in values for values in state_of(one))
    run(one, alone, range(2, 3))
    two.load_state_dict(one.state_dict())  # one becomes several: the sets are the caller's to fill
    assert_equal(sets[1], before)
    run(two, two.replica_parameters(0), range(3, 4))  # type: ignore[arg-type]
    assert all(len(values["replica_params"]) == 1 for values in state_of(two))


@KEPT
@pytest.mark.parametrize("count", [1, 2, 4])
@SEVERAL
def test_a_converged_state_is_that_of_any_number_of_replicas(
    rule: Rule, count: int, stored: str
) -> None:
    ours, three, _ = replicated(3, rule, **STORED[stored])
    run(three, ours, range(3))
    three.average_replicas(WEIGHTS)
    state = copy.deepcopy(three.state_dict())
    theirs, other, sets = replicated(count, rule, **STORED[stored])
    run(other, theirs, range(7, 9))
    other.load_state_dict(state)
    put(ours, theirs)
    for k in range(count):
        assert_equal(sets[k], ours)
        assert_equal(values(other, k), values(three, 0))
    for key in ("replica_masters", "replica_z", "replica_ema"):  # equal parameters are not enough
        apart = copy.deepcopy(state)
        if count > 1 and key in apart["state"][1]:
            apart["state"][1][key][-1].view(torch.uint8)[0] ^= 1
            with pytest.raises(ValueError, match="3 replicas that are not equal"):
                other.load_state_dict(apart)


def test_whether_two_replicas_are_equal_only_the_model_can_tell() -> None:
    ours, two, _ = replicated(2)
    run(two, ours, range(3))
    two.average_replicas(WEIGHTS[:2])
    theirs, three, sets = replicated(3)
    before = [tensor.detach().clone() for tensor in sets[-1]]
    with pytest.raises(ValueError, match="load the model before the optimizer"):
        three.load_state_dict(two.state_dict())
    assert_equal(sets[-1], before)
    put(ours, theirs)
    three.load_state_dict(two.state_dict())
    assert_equal(sets[-1], ours)
    run(two, ours, range(3, 4))
    put(ours, theirs)
    with pytest.raises(ValueError, match="2 replicas that are not equal"):
        three.load_state_dict(two.state_dict())


@MASTERS
@SEVERAL
def test_a_state_of_one_replica_brings_its_master_for_all(rule: Rule, stored: str) -> None:
    """At once, in whatever order parameters and state are loaded: an average may come before the
    next step."""
    ours, one, _ = replicated(1, rule, **STORED[stored])
    run(one, ours, range(3))
    theirs, three, sets = replicated(3, rule, **STORED[stored])
    three.load_state_dict(copy.deepcopy(one.state_dict()))
    for k in range(3):
        put(ours, sets[k])
    expected = values(one, 0)
    for k in range(3):
        assert_equal(values(three, k), expected)
    three.average_replicas([0.5, 0.25, 0.25])
    for k in range(3):
        assert_equal(values(three, k), expected)
    three.multipliers, one.multipliers = [[1.0] * 3] * 3, [[1.0] * 3]
    run(three, theirs, range(3, 4))
    run(one, ours, range(3, 4))
    for k in range(3):
        assert_equal(values(three, k), values(one, 0))


def test_stochastic_rounding_differs_between_replicas() -> None:
    params, optimizer, sets = replicated(2, BY_NAME["sgd"], **STORED["stochastic"])
    optimizer.multipliers = [[1.0] * 3, [1.0] * 3]
    run(optimizer, params, range(1))
    assert not torch.equal(sets[0][0], sets[1][0])


# -- refusals --------------------------------------------------------------------------------------


def test_a_group_added_later_needs_copies() -> None:
    params, optimizer, sets = replicated(2)
    run(optimizer, params, range(1))
    added = Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [added]})
    assert optimizer.multipliers == [[0.5] * 3 + [1.0], [1.0] * 4]
    added.grad = torch.ones(3)
    with pytest.raises(ValueError, match="call set_replicas again"):
        optimizer.step()
    kept = {param: list(tensors) for param, *tensors in zip(params, *sets, strict=True)}
    kept[added] = [added, added.detach().clone()]
    optimizer.set_replicas(2, kept.__getitem__)
    optimizer.multipliers = [[0.5] * 4, [1.5] * 4]
    optimizer.step()
    assert not torch.equal(optimizer.replica_parameters(0)[-1], optimizer.replica_parameters(1)[-1])
