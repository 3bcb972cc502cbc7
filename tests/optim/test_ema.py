"""Averages of the weights over time: beside torch.optim.swa_utils, in and out of the model, and
where they begin."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter, ParameterList
from torch.optim.swa_utils import AveragedModel

import hdet
from examples import diffusion
from hdet import FusedAdamW, WeightAverage
from hdet.kernels.numbers import value_of
from hdet.optim.masters import kept_masters
from hdet.testing.rules import BF16, assert_equal, copies, parameters, run, state_of, values

from .common import BY_NAME, FREE, MUON, RULES, Rule, each_backend, groups, names, replicated

STEPS = 40
AVERAGES: dict[str, WeightAverage] = {
    "decay": WeightAverage(0.9, warm_up=False),
    "warm-up": WeightAverage(0.9),
    "uniform": WeightAverage(decay=None),
    "power": WeightAverage(decay=None, power=6.94),
    "late": WeightAverage(0.8, warm_up=False, every=3, begin=10),
}


def peer_of(average: WeightAverage, model: Any) -> AveragedModel:
    """As a user of torch would write it: n counts the updates before this one."""

    def move(old: Tensor, new: Tensor, n: Any) -> Tensor:
        if average.decay is None:
            kept = (1 - 1 / (int(n) + 1)) ** (average.power + 1)
        else:
            warm = (int(n) + 1) / (int(n) + 10) if average.warm_up else 1.0
            kept = min(average.decay, warm)
        return kept * old + (1 - kept) * new

    return AveragedModel(model.double(), avg_fn=move)


REST = [pytest.param(rule, marks=pytest.mark.slow) for rule in RULES[1:]]


@each_backend
@pytest.mark.parametrize("kind", AVERAGES)
@pytest.mark.parametrize("rule", [RULES[0], *REST, MUON], ids=names)
def test_it_is_what_swa_utils_gives(rule: Rule, kind: str, backend: str) -> None:
    """In float64, of the same weights."""
    average, params = AVERAGES[kind], parameters()
    optimizer = rule.fused(groups(params, rule), lr=1e-2, ema=(0.5, average), backend=backend)
    as_model = lambda: ParameterList([Parameter(p.detach().clone()) for p in params])
    peer = peer_of(average, as_model())
    for step in range(1, STEPS + 1):
        run(optimizer, params, range(step, step + 1))
        since = step - average.begin
        if since <= 0:
            peer = peer_of(average, as_model())
        elif since % average.every == 0:
            peer.update_parameters(as_model().double())
    weights = [p.detach().clone() for p in params]
    with optimizer.averaged(1):
        for ours, theirs in zip(params, peer.module, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=2e-6)
    assert_equal(params, weights)


STORED: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": BF16, "stochastic_rounding": True},
    "float16": {"dtype": torch.float16, "master_weights": "fp32"},
    "float32 masters": {"dtype": BF16, "master_weights": "fp32"},
    "split masters": {"dtype": BF16, "master_weights": "split"},
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("stored", STORED)
def test_the_model_is_the_average_inside_and_the_weights_after_an_error(
    stored: str, count: int
) -> None:
    """Of masters, in float32; and nobody takes the average for the weights."""
    params, optimizer, sets = replicated(count, ema=0.5, **STORED[stored])
    run(optimizer, params, range(3))
    twin_params, twin = copy.deepcopy((params, optimizer))
    kept = [[p.detach().clone() for p in of] for of in sets]
    state, exact = copy.deepcopy(state_of(optimizer)), values(optimizer)
    with pytest.raises(ZeroDivisionError), optimizer.averaged():
        for k, of in enumerate(sets):
            averages = [
                state["ema"] if k == 0 else state["replica_ema"][k - 1]
                for state in state_of(optimizer)
            ]
            assert all(average.dtype == torch.float32 for average in averages)
            assert_equal(of, [average.to(of[0].dtype) for average in averages])
        optimizer.masters(params)  # as somebody may ask who sends weights
        refused = {
            "step": optimizer.step,
            "state_dict": optimizer.state_dict,
            "load_state_dict": lambda: optimizer.load_state_dict({}),
            "average_replicas": lambda: optimizer.average_replicas([1.0] * count),
            "averaged": lambda: optimizer.averaged().__enter__(),
            "deepcopy": lambda: copy.deepcopy((params, optimizer)),
            "dumps": lambda: pickle.dumps(optimizer),
        }
        for name, act in refused.items():
            with pytest.raises(RuntimeError, match=rf"{name}\(\).* inside optimizer.averaged\(\)"):
                act()
        1 / 0  # noqa: B018
    for of, before in zip(sets, kept, strict=True):
        assert_equal(of, before)
    for one, before in zip(state_of(optimizer), state, strict=True):
        for key in before.keys() - {"replica_params"}:
            torch.testing.assert_close(one[key], before[key], rtol=0, atol=0)
    run(optimizer, params, range(3, 5))
    run(twin, twin_params, range(3, 5))
    assert_equal(values(optimizer), values(twin))
    assert not torch.equal(values(optimizer)[0], exact[0])


def test_it_is_exact_for_masters() -> None:
    """A first step, which makes it the weights."""
    for stored in ("float32 masters", "split masters"):
        params, optimizer, _ = replicated(1, ema=0.5, **STORED[stored])
        run(optimizer, params, range(1))
        for param, state in zip(params, state_of(optimizer), strict=True):
            exact = value_of(param.detach(), kept_masters(state)[0])
            assert torch.equal(state["ema"], exact)
            assert param.numel() < 2 or not torch.equal(state["ema"], param.float())


@each_backend
def test_a_skipped_step_and_a_parameter_without_a_gradient_leave_it_alone(backend: str) -> None:
    params, optimizer, _ = replicated(1, ema=0.5, max_grad_norm=math.inf, backend=backend)
    run(optimizer, params, range(2), skip=lambda step, i: (step, i) == (1, 0))
    before = copy.deepcopy(state_of(optimizer))
    run(optimizer, params, range(2, 3))
    assert [state["ema_step"].item() for state in state_of(optimizer)] == [2, *[3] * 5]
    params[1].grad = torch.full_like(params[1], math.nan)
    after = copy.deepcopy(state_of(optimizer))
    optimizer.step()
    for one, other in zip(state_of(optimizer), after, strict=True):
        assert torch.equal(one["ema"], other["ema"]) and one["ema_step"] == other["ema_step"]
    assert not torch.equal(before[0]["ema"], after[0]["ema"])


# -- states ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", ["float32", "split masters"])
def test_of_a_state_without_averages_they_begin_as_the_weights(stored: str) -> None:
    """Whatever the run has counted; in whatever order model and optimizer are loaded."""
    ours, before, _ = replicated(1, **STORED[stored])
    run(before, ours, range(30))
    theirs, optimizer, _ = replicated(1, ema=WeightAverage(decay=None), **STORED[stored])
    optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
    with torch.no_grad():
        for param, value in zip(theirs, ours, strict=True):
            param.copy_(value)
    seen = []
    for step in range(30, 32):
        run(optimizer, theirs, range(step, step + 1))
        masters = [kept_masters(state) for state in state_of(optimizer)]
        seen.append(
            [
                value_of(p.detach(), m[0] if m else None).clone()
                for p, m in zip(theirs, masters, strict=True)
            ]
        )
    for state, *two in zip(state_of(optimizer), *seen, strict=True):
        torch.testing.assert_close(state["ema"], (two[0] + two[1]) / 2, rtol=1e-6, atol=1e-7)
        assert (state["step"], state["ema_step"]) == (32, 2)


def test_states_with_other_averages() -> None:
    ours, one, _ = replicated(1, ema=0.5)
    run(one, ours, range(2))
    _, two, _ = replicated(1, ema=(0.5, 0.9))
    with pytest.raises(ValueError, match="has 1 averages over time, this optimizer 2"):
        two.load_state_dict(one.state_dict())
    theirs, none, _ = replicated(1)
    with pytest.warns(UserWarning, match="has averages over time, this optimizer keeps none"):
        none.load_state_dict(copy.deepcopy(one.state_dict()))
    run(none, theirs, range(1))
    assert sorted(state_of(none)[0]) == ["exp_avg", "exp_avg_sq", "step"]
    torch.optim.AdamW(groups(theirs)).load_state_dict(one.state_dict())  # which keeps them


def test_a_new_number_of_replicas_begins_with_the_first_ones() -> None:
    params, optimizer, _ = replicated(1, ema=0.5)
    run(optimizer, params, range(3))
    first = [state["ema"].clone() for state in state_of(optimizer)]
    optimizer.set_replicas(3, copies(3))
    for k in range(2):
        assert_equal([state["replica_ema"][k] for state in state_of(optimizer)], first)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ema", "error", "message"),
    [
        (1.0, ValueError, r"decay of an average of weights must be .* in \[0, 1\), got 1.0"),
        (math.nan, ValueError, "decay of an average .* got nan"),
        (True, TypeError, "ema=True must be a decay such as 0.9999"),
        ("0.9", TypeError, "ema='0' must be a decay|ema='0.9' must be"),
        ((0.9,) * 4, ValueError, "ema has 4 averages, an optimizer keeps 3 at most"),
    ],
)
def test_arguments_are_refused_by_name(ema: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FusedAdamW(parameters(), ema=ema)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every of an average .* a whole number of steps >= 1, got 0"),
        ({"every": 1.5}, "every .* got 1.5"),
        ({"every": True}, "every .* got True"),
        ({"every": 1 << 24}, "every .* got 16777216"),
        ({"begin": -1}, "begin .* >= 0, got -1"),
        ({"power": 1.0}, r"power of an average of weights must be .*, got 1.0: .*decay=None"),
        ({"decay": None, "power": -0.5}, "power .* got -0.5"),
        ({"decay": None, "power": "1"}, "power .* got '1'"),
        ({"decay": "0.9"}, "decay .* got '0.9'"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightAverage(**settings)


def test_who_has_no_average_says_so() -> None:
    with pytest.raises(TypeError, match="FusedScheduleFreeAdamW takes no ema: its eval"):
        FREE.fused(parameters(), ema=0.5)
    for optimizer in (FusedAdamW(parameters()), FusedAdamW(parameters(), ema=(0.5, 0.9))):
        with pytest.raises(ValueError, match=r"average 2 does not exist.* \d \(ema=\)"):
            optimizer.averaged(2).__enter__()
    assert BY_NAME["adamw"].fused(parameters()).ema == () == hdet.FusedLion(parameters()).ema


def test_the_example_ends_lower_with_its_average() -> None:
    of_weights, of_average = diffusion.main(600)
    assert of_average < of_weights - 0.003
