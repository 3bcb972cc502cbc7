"""The optimizer step of every backend: the table of cases, and what the table cannot say.
test_shim.py runs it on the CUDA sources."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hdet import kernels
from hdet.kernels import StepSettings, StepTensors

from .cases import BACKENDS, CHUNK, device_of
from .problem import MakePlan, Problem, check, final_tensors
from .table import BF16, CASES, I16, SETTINGS, Case, Format


def plan_maker(backend: str) -> MakePlan:
    return functools.partial(kernels.step_plan, backend=backend)


def each(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@each(CASES)
def test_the_table(case: Case) -> None:
    check(case, plan_maker("cpu"))


# norms add up in another order on each backend, which is another factor of all gradients
@each([case for case in CASES if case.max_norm != 0 and sum(case.sizes) < CHUNK])
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_the_table_with_norms(backend: str, case: Case) -> None:
    check(case, plan_maker(backend), device_of(backend))


@each([case for case in CASES if case.max_norm == 0])
@pytest.mark.parametrize("other", BACKENDS[1:])
def test_all_backends_have_the_bits_of_the_cpu(other: str, case: Case) -> None:
    """One operation, one rounding everywhere."""
    assert_same_bits(
        final_tensors(case, plan_maker("cpu")),
        final_tensors(case, plan_maker(other), device_of(other)),
    )


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, bits in one.items():
        assert torch.equal(bits, other[name]), name


# stochastic rounding


LOW = Format(BF16, None, BF16, BF16, BF16)


def stochastic_step(
    backend: str, start: Tensor, ids: list[int], sizes: list[int], seed: int, first_replica: int = 0
) -> Tensor:
    """New parameters of a step on pieces of `start`, and their second moments."""
    device = device_of(backend)
    params = [piece.clone().to(device) for piece in start.bfloat16().split(sizes)]
    first, second = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    steps = [torch.zeros((), device=device) for _ in params]
    tensors = StepTensors(
        "adamw",
        [params],
        [0] * len(params),
        steps,
        [first, second],
        ids=ids,
        stochastic=seed,
        first_replica=first_replica,
    )
    gradients = [torch.ones_like(p) for p in params]
    settings = StepSettings(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
    kernels.step_plan(tensors, backend).step(gradients, [settings])
    return torch.cat([torch.cat(params), torch.cat(second)]).cpu()


@pytest.mark.parametrize("backend", BACKENDS)
def test_stochastic_rounding_is_unbiased(backend: str) -> None:
    """A step of 1e-3 from 1: bfloat16 has 1 and 1 - 2^-8 = 0.99609 there, so about 25.6 % of the
    elements move; to nearest none would."""
    count = 1 << 16
    params = stochastic_step(backend, torch.ones(count), [0], [count], seed=5)[:count].float()
    assert set(params.tolist()) == {1.0, 1 - 2**-8}
    share = (params < 1).float().mean().item()
    assert abs(share - 1e-3 * 2**8) < 5 * (0.256 * 0.744 / count) ** 0.5
    # four neighbours take four words of one random number: none of them repeats another
    quads = (params < 1).view(-1, 4).float()
    correlation = torch.corrcoef(quads.T) - torch.eye(4)
    assert correlation.abs().max() < 5 / (count / 4) ** 0.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_stochastic_rounding_depends_on_seed_step_replica_tensor_and_element_alone(
    backend: str,
) -> None:
    start = torch.randn(4 * CHUNK, generator=torch.Generator().manual_seed(3))
    whole = [4 * CHUNK]
    reference = stochastic_step(backend, start, [7], whole, seed=1)
    assert torch.equal(reference, stochastic_step(backend, start, [7], whole, seed=1))
    beside = stochastic_step(
        backend, torch.cat([start[:33], start]), [0, 7], [33, 4 * CHUNK], seed=1
    )
    assert torch.equal(reference, torch.cat([beside[33 : 33 + 4 * CHUNK], beside[-4 * CHUNK :]]))
    seconds = slice(4 * CHUNK, None)
    for other in (
        stochastic_step(backend, start, [7], whole, seed=2),
        stochastic_step(backend, start, [8], whole, seed=1),
        stochastic_step(backend, start, [7], whole, seed=1 + 2**32),
    ):
        assert not torch.equal(reference, other) and not torch.equal(
            reference[seconds], other[seconds]
        )
    other = stochastic_step(backend, start, [7], whole, seed=1, first_replica=1)
    assert not torch.equal(reference, other)
    assert torch.equal(
        reference[seconds], other[seconds]
    )  # moments are shared: they are rounded as replica 0's


# settings and plans over time


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_plan_takes_other_settings_and_options_in_every_step(backend: str) -> None:
    """As many plans as steps, each made for its step, and one plan for all steps: the same bits."""
    base = Case(
        "", sizes=(5, 40), formats=(Format(BF16, I16), Format()), replicas=2, groups=2, steps=1
    )
    variants = [
        base,
        replace(base, max_norm=0.5, grad_scale=2.0),
        replace(base, found_inf=(1.0,), zero_gradients=True),
        replace(
            base,
            settings=SETTINGS._replace(
                beta1=0.5, beta2=0.5, weight_decay=0.0, decay_at_base=True, maximize=True
            ),
        ),
        replace(base, max_norm=1.0, found_inf=(0.0,)),
        base,
    ]
    one, many = Problem(base, device_of(backend)), Problem(base, device_of(backend))
    plan = kernels.step_plan(one.tensors, backend)
    for turn, variant in enumerate(variants):
        for problem in (one, many):
            problem.case = variant
            gradients, settings, options = problem.arguments(turn)
            used = plan if problem is one else kernels.step_plan(problem.tensors, backend)
            used.step(gradients.tensors, settings, options)
            assert used.skipped.item() == (turn == 2)
    for name, guarded in one.memory.items():
        assert torch.equal(guarded.buffer, many.memory[name].buffer), name
    assert [s.item() for s in one.steps] == [5.0, 14.0]
