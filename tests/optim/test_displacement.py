"""Replicas that are kept as a base and one displacement, beside the same replicas with parameters of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from hdet.kernels.spec.interface import DECOUPLED
from hdet.optim import FusedAdam, FusedAdamW, FusedOptimizer, FusedSGD

from .common import BACKENDS, RULES, Rule, assert_equal, names, parameters, run, set_gradients
from .test_replicas import RHOS, WEIGHTS, copies, replicated, values


def on_line(
    rule: Rule = RULES[0],
    dtype: torch.dtype = torch.float32,
    storage: str = "displacement",
    **options: Any,
) -> tuple[list[Parameter], FusedOptimizer, list[list[Tensor]]]:
    """As `replicated`, with decay at the base rate; stored ones with float32 masters."""
    if rule.fused.rule in DECOUPLED:
        options["decay_at"] = "base"
    if storage == "parameters" and dtype != torch.float32:
        options["master_weights"] = "fp32"
    return replicated(3, rule, dtype, storage, **options)


def exact(optimizer: FusedOptimizer, k: int) -> list[Tensor]:
    """The float32 values of replica k."""
    sets = optimizer.replica_parameters(k)
    masters = optimizer.masters(optimizer.replica_parameters(0), k)
    return [
        (p.float() if m is None else m).detach().clone() for p, m in zip(sets, masters, strict=True)
    ]


def assert_near(ours: list[Tensor], theirs: list[Tensor], steps: int) -> None:
    """Both forms step along the same directions, and round at most three times a step, by half a unit in the last place of values below 5."""
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            one.detach(), other.detach(), rtol=0, atol=2 * 3 * steps * 5 * 2.0**-24
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", RULES, ids=names)
def test_equals_stored_parameters_over_cycles(rule: Rule, dtype: torch.dtype, backend: str) -> None:
    """Cycles of five steps with other rates and multipliers each, clipped; one parameter misses a step, one step is skipped."""
    (ours, a, sets), (theirs, b, _) = (
        on_line(rule, dtype, storage, backend=backend) for storage in ("displacement", "parameters")
    )
    steps = 0
    for cycle in range(4):
        for optimizer in (a, b):
            optimizer.multipliers = [
                [rho * (1 + 0.1 * cycle)] * 3 for rho in RHOS[cycle % 3 :] + RHOS[: cycle % 3]
            ]
            optimizer.max_grad_norm = 20.0
        for step in range(5):
            for optimizer, params in ((a, ours), (b, theirs)):
                optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 10)
                set_gradients(params, steps, skip=lambda step, i: (step, i) == (6, 1))
                if steps == 12:
                    params[0].grad[0, 0] = float("nan")  # type: ignore[index]
                optimizer.step()
            steps += 1
            for k in range(3):
                assert_near(exact(a, k), values(b, k), steps)
                assert_equal(sets[k], [value.to(dtype) for value in exact(a, k)])
        assert any(not torch.equal(one, other) for one, other in zip(sets[0], sets[2], strict=True))
        for optimizer in (a, b):
            optimizer.average_replicas([WEIGHTS, [1.0, 0.0, 0.0], [0.0, 3.0, 1.0], WEIGHTS][cycle])
        for k in range(3):
            assert_near(exact(a, k), values(b, k), steps)
            assert_equal(sets[k], sets[0])
    for one, other in zip(a.state.values(), b.state.values(), strict=True):
        assert_equal(
            [one[key] for key in rule.moments if key in one],
            [other[key] for key in rule.moments if key in one],
        )


def test_memory_is_a_base_a_displacement_and_the_sets() -> None:
    params, optimizer, sets = on_line(dtype=torch.bfloat16)
    run(optimizer, params, range(2))
    state = optimizer.state[params[0]]
    assert sorted(state) == [
        "base",
        "displacement",
        "exp_avg",
        "exp_avg_sq",
        "replica_params",
        "scale",
        "step",
    ]
    held = [
        state["base"],
        state["displacement"],
        state["exp_avg"],
        state["exp_avg_sq"],
        params[0].grad,
        *(s[0] for s in sets),
    ]
    assert sum(t.nbytes for t in held) == (18 + 2 * 3) * params[0].numel()  # type: ignore[union-attr]


def test_saving_and_looking_change_nothing() -> None:
    (ours, a, sets), (theirs, b, others) = (
        on_line(dtype=torch.bfloat16),
        on_line(dtype=torch.bfloat16),
    )
    for step in range(6):
        run(a, ours, range(step, step + 1))
        run(b, theirs, range(step, step + 1))
        copy.deepcopy(a).state_dict()
        exact(a, 1)
        with torch.no_grad():  # as a measurement does: other values for a while
            held = [tensor.clone() for tensor in sets[1]]
            for tensor, value in zip(sets[1], held, strict=True):
                tensor.zero_()
                tensor.copy_(value)
    for k in range(3):
        assert_equal(sets[k], others[k])


def test_an_average_right_after_loading_needs_no_step() -> None:
    ours, a, sets = on_line()
    run(a, ours, range(3))
    theirs, b, others = on_line()
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    with torch.no_grad():
        for param, value in zip(theirs, ours, strict=True):
            param.copy_(value)
    for optimizer in (a, b):
        optimizer.average_replicas(WEIGHTS)
    assert_equal(sets[2], others[2])


def test_states_pass_to_and_from_stored_parameters() -> None:
    """At a cycle's end: there is nothing else that both can hold."""
    (ours, a, _), (theirs, b, _) = (
        on_line(dtype=torch.bfloat16, storage=storage) for storage in ("displacement", "parameters")
    )
    for there, here, source, target in ((b, a, theirs, ours), (a, b, ours, theirs)):
        run(there, source, range(3))
        with pytest.raises(ValueError, match=r"call ensemble.converge\(\)"):
            here.load_state_dict(copy.deepcopy(there.state_dict()))
        there.average_replicas(WEIGHTS)
        here.load_state_dict(copy.deepcopy(there.state_dict()))
        with torch.no_grad():
            for param, value in zip(target, source, strict=True):
                param.copy_(value)
        run(here, target, range(3, 4))
        run(there, source, range(3, 4))
        for k in range(3):
            assert_near(exact(here, k), exact(there, k), 1)
        there.average_replicas(WEIGHTS)


def test_what_is_written_to_all_replicas_becomes_the_base() -> None:
    params, optimizer, sets = on_line(dtype=torch.bfloat16)
    run(optimizer, params, range(2))
    with torch.no_grad():
        for tensors in sets:
            for tensor in tensors:
                tensor.fill_(0.5)
    optimizer.average_replicas(WEIGHTS)
    assert all((tensor == 0.5).all() for tensors in sets for tensor in tensors)
    for tensors in sets:
        for tensor in tensors:
            tensor.data.fill_(0.25)  # not counted
    optimizer.refresh_masters()
    assert all(
        (state["base"] == 0.25).all() and not state["displacement"].any()
        for state in optimizer.state.values()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_are_refreshed_in_the_middle_of_a_cycle(dtype: torch.dtype) -> None:
    """Nobody has written to replicas that are apart: they stay on their line."""
    params, optimizer, sets = on_line(dtype=dtype)
    run(optimizer, params, range(2))
    before = copy.deepcopy([sets, [state["base"] for state in optimizer.state.values()]])
    optimizer.refresh_masters()
    after = [sets, [state["base"] for state in optimizer.state.values()]]
    assert_equal(
        [*before[0][1], *before[0][2], *before[1]], [*after[0][1], *after[0][2], *after[1]]
    )
    run(optimizer, params, range(2, 3))


def test_replicas_that_leave_the_line_are_refused_before_anything_changes() -> None:
    params, optimizer, sets = on_line()
    run(optimizer, params, range(2))
    before = copy.deepcopy(
        [
            [state[key] for key in ("base", "displacement", "exp_avg", "step")]
            for state in optimizer.state.values()
        ]
    )
    optimizer.multipliers = [[2.0] * 3, *optimizer.multipliers[1:]]
    with pytest.raises(ValueError, match=r"multipliers changed .* while the replicas are apart"):
        run(optimizer, params, range(2, 3))
    optimizer.multipliers = [[rho] * 3 for rho in RHOS]
    held = sets[1][0].detach().clone()
    with torch.no_grad():
        sets[1][0][0, 0] += 1
    for act in (
        lambda: run(optimizer, params, range(2, 3)),
        lambda: optimizer.average_replicas(WEIGHTS),
        optimizer.refresh_masters,
    ):
        with pytest.raises(
            ValueError,
            match=r"not where steps and multipliers have put them.*storage=\"parameters\"",
        ):
            act()
    with torch.no_grad():
        sets[1][0].copy_(held)
    after = [
        [state[key] for key in ("base", "displacement", "exp_avg", "step")]
        for state in optimizer.state.values()
    ]
    assert all(
        torch.equal(a, b)
        for one, other in zip(before, after, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    run(optimizer, params, range(2, 3))


@pytest.mark.parametrize(
    ("make", "count", "storage", "message"),
    [
        (
            lambda p: FusedAdamW(p),
            2,
            "displacement",
            r"weight_decay=0.01 of group 0 .*decay_at='base'",
        ),
        (
            lambda p: FusedAdam(p, weight_decay=0.5),
            2,
            "displacement",
            r"weight_decay=0.5 of group 0 .*set it to 0",
        ),
        (
            lambda p: FusedAdamW(p, decay_at="base", master_weights="split"),
            2,
            "displacement",
            "without master_weights='split'",
        ),
        (lambda p: FusedSGD(p), 1, "displacement", "for several replicas, not 1"),
        (lambda p: FusedSGD(p), 2, "line", "storage='line' is unknown"),
    ],
)
def test_refused_storage(make: Any, count: int, storage: str, message: str) -> None:
    params = parameters()
    optimizer = make(params)
    with pytest.raises(ValueError, match=message):
        optimizer.set_replicas(count, copies(count), storage)
    assert optimizer.num_replicas == 1 and optimizer.storage == "parameters" and not optimizer.state
