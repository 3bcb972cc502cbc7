"""Offsets past 2^31 elements without the memory: chunks lie that far out, and addresses as far
back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hdet import kernels
from hdet.kernels import StepTensors, numbers

from .cases import BACKENDS, CHUNK, Guarded, device_of
from .problem import Problem
from .table import BF16, F16, F32, I16, SETTINGS, Case, Format

FAR = 2**36 + CHUNK
"""elements: past 2^31, and past 2^34 where random numbers need a second word; chunks start at
multiples of their length"""
SIZES = [CHUNK + 3, 17]
NATIVE = [backend for backend in BACKENDS if backend != "torch"]
Prepared = tuple[Any, Callable[[], list[Tensor]], list[Tensor]]
"""a plan, a call of it, which may return tensors, and the tensors that the plan has addresses of"""


def go_far(plan: Any, tensors: list[Tensor]) -> None:
    """The next calls on the same tensors take place FAR elements further on, in the same memory."""
    chunks = getattr(plan, "placed_chunks", plan.chunks)
    chunks[:, 0] += FAR
    widths = {t.data_ptr(): t.element_size() for t in tensors if t.numel()}
    inputs = getattr(plan, "inputs", None)
    for table in (
        plan.addresses,
        None if inputs is None else inputs.placed,
        getattr(plan, "line_addresses", None),
    ):
        for place, address in enumerate([] if table is None else table.tolist()):
            table[place] -= FAR * widths.get(address, 0)


def step(backend: str) -> Prepared:
    formats = (
        Format(),
        Format(BF16, None, BF16, BF16, BF16),
        Format(BF16, I16, BF16),
        Format(F16, F32, F16, F32, BF16),
    )
    case = Case(
        "",
        sizes=(1, 17, CHUNK + 13, 2 * CHUNK, 33, 0, 129),
        formats=formats,
        replicas=5,
        groups=2,
        shifts=(0, 1, 2),
        max_norm=1.0,
    )
    problem = Problem(case, device_of(backend))
    gradients, settings, options = problem.arguments(1)
    plan = kernels.step_plan(problem.tensors, backend)
    tensors = [
        t for name, guarded in problem.memory.items() if name != "steps" for t in guarded.given()
    ]
    return (
        plan,
        lambda: plan.step(gradients.tensors, settings, options) or problem.steps,
        [*tensors, *gradients.given()],
    )  # type: ignore[func-returns-value]


def average(backend: str) -> Prepared:
    sets = [Guarded(SIZES, k, k, device_of(backend), BF16).tensors for k in range(3)]
    kept = [[t.clone() for t in row] for row in sets]
    plan = kernels.average_plan(sets, backend=backend)

    def call() -> list[Tensor]:
        for row, values in zip(sets, kept, strict=True):
            torch._foreach_copy_(row, values)
        plan.average([0.2, 0.3, 0.5])
        return []

    return plan, call, [t for row in sets for t in row]


def copy(backend: str) -> Prepared:
    sources, destinations = (
        Guarded(SIZES, k, k, device_of(backend), BF16).tensors for k in range(2)
    )
    kept = [t.clone() for t in destinations]
    plan = kernels.copy_plan(sources, destinations, backend=backend)

    def call() -> list[Tensor]:
        torch._foreach_copy_(destinations, kept)
        plan.copy(0.5)
        return []

    return plan, call, [*sources, *destinations]


OPERATIONS = {
    "step": step,
    "average": average,
    "copy": copy,
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("backend", NATIVE)
def test_far_out_is_as_near(backend: str, operation: Callable[[str], Prepared]) -> None:
    results = []
    for far in (False, True):
        plan, call, tensors = operation(backend)
        call()  # the tables are written
        if far:
            go_far(plan, tensors)
        results.append([t.clone() for t in (*call(), *tensors)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def step_tensors(dtype: torch.dtype, backend: str, **more: object) -> StepTensors:
    columns = [Guarded(SIZES, place % 3, place, device_of(backend)).tensors for place in range(3)]
    params = [t.to(BF16).to(dtype) for t in columns[0]]
    moments = [[t.abs() for t in column] for column in columns[1:]]
    steps = [torch.zeros((), device=device_of(backend)) for _ in SIZES]
    return StepTensors("adamw", [params], [0] * len(SIZES), steps, moments, **more)


@pytest.mark.parametrize("backend", NATIVE)
def test_random_numbers_know_where_they_are(backend: str) -> None:
    """A stochastically rounded step far out uses the numbers of its elements there, all 50 bits of
    them."""
    exact, tensors = (
        step_tensors(F32, backend),
        step_tensors(BF16, backend, stochastic=77, first_replica=3, ids=[5, 9]),
    )
    gradients, settings = (
        Guarded(SIZES, 1, 60, device_of(backend)).tensors,
        [SETTINGS._replace(multipliers=[1.0])],
    )
    kernels.step_plan(exact, backend).step(gradients, settings)
    plan = kernels.step_plan(tensors, backend)
    streams = [*tensors.params[0], *tensors.moments[0], *tensors.moments[1]]  # type: ignore[misc]
    before = [t.clone() for t in (*streams, *tensors.steps)]  # type: ignore[union-attr]
    plan.step(gradients, settings)  # the tables are written
    torch._foreach_copy_([*streams, *tensors.steps], before)
    go_far(plan, [*streams, *gradients])  # type: ignore[list-item]
    plan.step(gradients, settings)
    for identity, value, found in zip([5, 9], exact.params[0], tensors.params[0], strict=True):
        element = FAR + torch.arange(value.numel())
        zero, quad = torch.zeros_like(element), element // 4
        words = numbers.philox(
            77, (quad & 0xFFFFFFFF, (quad >> 32) | 3 << 16, zero + identity, zero + 1)
        )
        word = torch.stack(words)[element % 4, torch.arange(value.numel())]
        assert torch.equal(found.cpu(), numbers.stochastic_bfloat16(value.cpu(), word & 0xFFFF))
