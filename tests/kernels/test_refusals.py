"""What a step refuses: by name, with a remedy, and before anything is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from hdet import kernels
from hdet.kernels import StepOptions, StepSettings, StepTensors

from .problem import Problem
from .table import F16, I16, SETTINGS, U8, Case, Format

BACKENDS = ["cpu", "torch"]  # the checks are shared by all
NAN, INF = float("nan"), float("inf")


def refused(
    problem: Problem,
    backend: str,
    error: type[Exception],
    message: str,
    spoil: Callable[[list[Any]], None] = lambda gradients: None,
    options: StepOptions | None = None,
    **changes: Any,
) -> None:
    """A step that works, then one that is refused and changes nothing, then one that works
    again."""
    plan = kernels.step_plan(problem.tensors, backend)
    for turn in range(3):
        gradients, settings, usual = problem.arguments(turn)
        if turn != 1:
            plan.step(gradients.tensors, settings, usual)
            continue
        given = list(gradients.tensors)
        spoil(given)
        with problem.unchanged(gradients), pytest.raises(error, match=message):
            plan.step(given, [s._replace(**changes) for s in settings], options or usual)
    assert problem.steps[0].item() == 2


# -- tensors ---------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[Tensor], Any], type[Exception], str]] = {
    "no tensor": (lambda x: 3.0, TypeError, "must be a tensor, not float"),
    "a wrapper": (
        lambda x: TwoTensor(x, x),
        TypeError,
        "is a TwoTensor, which wraps other tensors; pass its local tensor",
    ),
    "sparse": (Tensor.to_sparse, TypeError, "has the layout torch.sparse_coo; .* use .to_dense"),
    "double": (
        Tensor.double,
        TypeError,
        r"has the dtype torch.float64; it must be torch.float32.* use .to\(",
    ),
    "integers": (Tensor.int, TypeError, "has the dtype torch.int32"),
    "complex": (lambda x: x.to(torch.complex64), TypeError, "has the dtype torch.complex64"),
    "elsewhere": (lambda x: x.to("meta"), ValueError, "is on meta, but the first tensor is on cpu"),
    "strided": (
        lambda x: x.repeat_interleave(2)[::2],
        ValueError,
        r"is not contiguous \(strides \(2,\)\): use .contiguous",
    ),
    "negated": (torch._neg_view, ValueError, "is a negated view.*resolve_neg"),
    "another shape": (lambda x: x.view(2, 5), ValueError, r"has the shape \("),
}
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "parameter 1": lambda x: kernels.step_plan(replace(usual(), params=[[torch.zeros(6), x]])),
    "exp_avg of parameter 1": lambda x: kernels.step_plan(
        replace(usual(), moments=[[torch.zeros(6), x], [torch.zeros(6), torch.zeros(10)]])
    ),
    "tensor 1 of replica 1": lambda x: kernels.average_(
        [[torch.zeros(6), torch.zeros(10)], [torch.zeros(6), x]], [1, 1]
    ),
    "source 1": lambda x: kernels.copy_plan([torch.zeros(6), x], [torch.zeros(6), torch.zeros(10)]),
    "destination 1": lambda x: kernels.copy_plan(
        [torch.zeros(6), torch.zeros(10)], [torch.zeros(6), x]
    ),
}


def usual() -> StepTensors:
    return Problem(Case("", sizes=(6, 10)), "cpu").tensors


@pytest.mark.parametrize(
    ("name", "wrong"),
    [*(("parameter 1", wrong) for wrong in WRONG), *((name, "strided") for name in OPERATIONS)],
)
def test_a_tensor_that_no_kernel_reads(name: str, wrong: str) -> None:
    spoil, error, message = WRONG[wrong]
    with pytest.raises(
        error, match=message if wrong == "another shape" else f"{name} .*{message}"
    ):  # of two that differ either is named
        OPERATIONS[name](spoil(torch.zeros(10)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrong", WRONG)
def test_gradients(backend: str, wrong: str) -> None:
    """In a step between two that work: what is noticed of gradients is kept from step to step
    (csrc/tensors.h)."""
    spoil, error, message = WRONG[wrong]

    def spoiled(gradients: list[Any]) -> None:
        gradients[1] = spoil(gradients[1].clone())

    refused(
        Problem(Case("", sizes=(6, 10)), "cpu"),
        backend,
        error,
        f"gradient of parameter 1 .*{message}",
        spoiled,
    )


ONE, TWO, SGD = Case(""), Case("", replicas=2), Case("", rule="sgd")
NO_DECAY = SETTINGS._replace(weight_decay=0.0)
NO_MOMENTUM = Case(
    "", rule="sgd", formats=(Format(exp_avg=None),), settings=SETTINGS._replace(momentum=0.0)
)
IN_MOMENTS = {
    rule: Case("", rule=rule, replicas=count, settings=NO_DECAY)
    for rule, count in (("adam", 2), ("sgd", 3))
}
OF_SETTINGS: list[tuple[Case, dict[str, Any], str]] = [
    *(
        (ONE, {name: value}, f"{name}={value} of group 0 must be ")
        for name in ("lr", "beta1", "beta2", "eps", "weight_decay")
        for value in (NAN, -0.1, INF)
    ),
    (TWO, {"multipliers": [1.0]}, "multipliers of group 0 has 1 entries for 2 replicas"),
    (TWO, {"multipliers": [1.0, NAN]}, "multipliers of group 0 must be finite"),
    (TWO, {"multipliers": [1.0, -1.0]}, "multipliers of group 0 must be finite and not negative"),
    (ONE, {"beta1": 1.0}, r"beta1=1.0 of group 0 must be in \[0, 1\)"),
    (Case("", rule="lion"), {"beta2": 1.0}, r"beta2=1.0 of group 0 must be in \[0, 1\)"),
    (ONE, {"lr": torch.ones(2)}, "lr of group 0 must hold one number"),
    (ONE, {"lr": torch.ones(1).double()}, "lr of group 0 has the dtype torch.float64"),
    (ONE, {"lr": torch.ones(1, device="meta")}, "lr of group 0 is on meta"),
    (SGD, {"dampening": NAN}, "dampening=nan of group 0 must be finite"),
    (SGD, {"momentum": -0.1}, "momentum=-0.1 of group 0 must be finite and not"),
    (SGD, {"nesterov": True, "dampening": 0.1}, "nesterov=True .* momentum > 0 and dampening 0"),
    (SGD, {"nesterov": True, "momentum": 0.0}, "nesterov=True of group 0 needs momentum > 0"),
    (NO_MOMENTUM, {"momentum": 0.9}, "is 0.9, but momentum_buffer of parameter 0 is missing"),
    (IN_MOMENTS["adam"], {"weight_decay": 0.1}, "weight_decay=0.1 .* adamw or "),
    (IN_MOMENTS["sgd"], {"weight_decay": 0.1}, "3 replicas cannot share moments"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("case", "changes", "message"), OF_SETTINGS)
def test_settings(backend: str, case: Case, changes: dict[str, Any], message: str) -> None:
    refused(Problem(case, "cpu"), backend, (ValueError, TypeError), message, **changes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_as_many_as_there_are(backend: str) -> None:
    problem = Problem(Case("", sizes=(3, 4), groups=2), "cpu")
    refused(problem, backend, ValueError, "1 gradients for 2 parameters", list.pop)
    gradients, settings, _ = problem.arguments(0)
    with pytest.raises(ValueError, match="1 settings for 2 groups"):
        kernels.step_plan(problem.tensors, backend).step(gradients.tensors, settings[:1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grad_scale": torch.ones(2)}, "grad_scale must hold one number"),
        ({"grad_scale": 3.0}, "grad_scale must be a tensor, not float"),
        ({"found_inf": torch.zeros(1, dtype=F16)}, "found_inf has the dtype torch.float16"),
        ({"found_inf": torch.zeros(1, device="meta")}, "found_inf is on meta"),
        ({"max_norm": -1.0}, "max_norm=-1.0 must not be negative"),
        ({"max_norm": NAN}, "max_norm=nan must not be negative"),
    ],
)
def test_options(backend: str, options: dict[str, Any], message: str) -> None:
    problem = Problem(Case("", replicas=2), "cpu")
    refused(problem, backend, (ValueError, TypeError), message, options=StepOptions(**options))


def pair(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.zeros(10, dtype=dtype), torch.zeros(6, dtype=dtype)]


(X, Y), LOW, HALF, MOMENT = pair(), pair(torch.bfloat16), pair(F16), pair()
INTEGERS, FLOAT = torch.zeros(10, dtype=I16), torch.zeros(10)
CODED = {"moments": [pair(U8), pair(U8)]}
SCALES = [torch.ones(1), torch.ones(1)]
OF_PLANS: list[tuple[dict[str, Any], str]] = [
    ({"rule": "rprop"}, "rule='rprop' is unknown; choose adamw, adam, "),
    ({"params": [[X, Y], [X]]}, "params of replica 1 has 1 entries, but there are 2 parameters"),
    (
        {"params": [[X, Y], HALF]},
        "parameter 0 of replica 1 has the dtype torch.float16, but that of replica 0",
    ),
    (
        {"params": [[X, Y], [FLOAT, torch.zeros(2, 3)]]},
        r"parameter 1 of replica 1 has the shape \(2, 3\), but parameter 1 of replica 0",
    ),
    ({"params": [[X, Y], [X, torch.zeros(6)]]}, "overlap in memory: give each its own"),
    (
        {"moments": [HALF, MOMENT]},
        "exp_avg of parameter 0 has .* must be torch.float32, torch.bfloat16 or torch.uint8",
    ),
    ({"moments": [pair(torch.int8), MOMENT]}, "exp_avg of parameter 0 has the dtype torch.int8"),
    ({"moments": [[None, None], MOMENT]}, "exp_avg of parameter 0 is missing; adamw needs it"),
    ({"moments": [MOMENT, [FLOAT, None]]}, "exp_avg_sq of parameter 1 is missing; adamw needs it"),
    ({"moments": [MOMENT, [FLOAT]]}, "exp_avg_sq has 1 entries, but there are 2 parameters"),
    ({"moments": [MOMENT]}, "moments has 1 lists, but adamw keeps exp_avg, exp_avg_sq"),
    ({"rule": "sgd"}, "moments has 2 lists, but sgd keeps momentum_buffer"),
    (
        {"rule": "lion", "moments": [[X, None]], "scales": None},
        "exp_avg of parameter 1 is missing; lion needs it",
    ),
    ({"steps": [torch.tensor(0), torch.tensor(0.0)]}, "step of parameter 0 has .* torch.int64"),
    (
        {"steps": [torch.zeros(1), torch.tensor(0.0)]},
        "step of parameter 0 must be a 0-d float32 tensor",
    ),
    ({"steps": [torch.tensor(0.0)] * 2}, "step of parameter 0 and step of parameter 1 overlap"),
    ({"groups": [0, 2]}, r"groups must number the settings from 0 without a gap, got \[0, 2\]"),
    ({"groups": [0]}, "groups has 1 entries"),
    (
        {"masters": [[FLOAT, None]]},
        r"master of parameter 0 \(torch.float32\) has the dtype torch.float32; it must be None",
    ),
    ({"params": [LOW], "masters": [HALF]}, "master of parameter 0 has the dtype torch.float16"),
    ({"params": [HALF], "masters": [[INTEGERS, None]]}, "int16; it must be torch.float32"),
    (
        {"params": [LOW], "masters": [[torch.zeros(9), None]]},
        "master of parameter 0 has the shape",
    ),
    ({"masters": [[None, None]] * 2}, "masters has 2 lists for 1 replicas"),
    (
        {"params": [LOW, pair(torch.bfloat16)], "masters": [[X, None], [INTEGERS, None]]},
        "master of parameter 0 of replica 1 has .*int16, but that of replica 0 has torch.float32",
    ),
    ({"params": [[X, Y]], "moments": [[X, torch.zeros(6)], MOMENT]}, "overlap in memory"),
    ({"stochastic": -1}, "stochastic=-1 must be a seed from 0 to 2"),
    ({"first_replica": 65536}, "first_replica=65536 is out of range"),
    ({"params": [[]]}, "no parameters"),
    ({**CODED, "scales": None}, "exp_avg of parameter 0 .* must have scales"),
    ({**CODED, "scales": [[None, SCALES[1]], SCALES]}, "exp_avg of parameter 0 .* have scales"),
    (
        {**CODED, "scales": [[torch.ones(2), SCALES[1]], SCALES]},
        r"scales of exp_avg of parameter 0 has the shape \(2,\), it must be \(1,\)",
    ),
    (
        {**CODED, "scales": [SCALES, [x.bfloat16() for x in SCALES]]},
        "scales of exp_avg_sq of parameter 0 has the dtype",
    ),
    (
        {"moments": [pair(U8), MOMENT], "scales": [SCALES, SCALES]},
        "exp_avg and exp_avg_sq of parameter 0 must all be torch.uint8",
    ),
    (
        {"moments": [MOMENT, pair()], "scales": [SCALES, [None, None]]},
        "exp_avg of parameter 0 .* must have scales if it is .* and none else",
    ),
]


@pytest.mark.parametrize(("change", "message"), OF_PLANS)
def test_plans(change: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        kernels.step_plan(replace(Problem(Case("", sizes=(10, 6)), "cpu").tensors, **change))


def test_what_looks_odd_and_is_allowed() -> None:
    x = torch.zeros(3)
    tensors = StepTensors("sgd", [[x]], [0], [torch.tensor(0.0)], [[torch.zeros(3)]])
    for s in (
        StepSettings(lr=0.0),
        StepSettings(lr=1.0, multipliers=[0.0]),
        StepSettings(lr=1.0, momentum=1.5, dampening=-2.0),
        StepSettings(lr=torch.tensor([[0.5]])),
    ):
        for backend in BACKENDS:
            kernels.step_plan(tensors, backend).step(
                [torch.ones(3)], [s], StepOptions(max_norm=math.inf)
            )
