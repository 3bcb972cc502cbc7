"""The table of cases that every backend must pass, on a GPU; and that CUDA has the bits of the CPU there.

Bits, except those of a NaN: a GPU's own has another pattern than x86's, and either may pass one through.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from hdet import kernels

from ..kernels.cases import CHUNK, Guarded
from ..kernels.lines import line_left
from ..kernels.problem import Problem, check
from ..kernels.table import BF16, CASES, F16, F32, SPECIAL, Case
from .conftest import why_not

pytestmark = pytest.mark.gpu


def cases_of_triton() -> list[Case]:
    """Each format and number of replicas is compiled, so of the covering array only a part, and the most replicas once."""
    chosen = CASES[: len(CASES) - len(SPECIAL)]
    few = [case for case in chosen if case.replicas <= 8]
    many = [case for case in chosen if case.replicas > 8]
    return [*few[::8], *many[:1], *SPECIAL]


TABLE = [("cuda", case) for case in CASES] + [("triton", case) for case in cases_of_triton()]


@pytest.mark.parametrize(("name", "case"), TABLE, ids=lambda value: value.name if isinstance(value, Case) else value)
def test_the_table(name: str, case: Case) -> None:
    skip_without(name)
    check(case, functools.partial(kernels.step_plan, backend=name), "cuda")


def skip_without(backend: str) -> None:
    reason = why_not(backend)
    if reason is not None:
        pytest.skip(reason)


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def assert_same(ours: Tensor, theirs: Tensor, name: str) -> None:
    """The same bits, or NaN on both sides. Reports the first element that differs."""
    kind = INTEGERS[ours.element_size()]
    different = ours.contiguous().view(kind) != theirs.contiguous().view(kind)
    if ours.is_floating_point():
        different &= ~(ours.isnan() & theirs.isnan())
    if bool(different.any()):
        place = int(different.flatten().nonzero()[0])
        found, wanted = ours.flatten()[place].item(), theirs.flatten()[place].item()
        pytest.fail(f"{name}: {int(different.sum())} of {ours.numel()} differ, the first at {place}: {found!r}, on the CPU {wanted!r}")


def noted(left: dict[str, Tensor], name: str, guarded: Guarded) -> None:
    """Copies of the tensors, each with its type, and of what lies between them."""
    for i, tensor in enumerate(guarded.tensors):
        if tensor is not None:
            left[f"{name}, tensor {i}"] = tensor.detach().cpu().clone()
    left[f"{name}, guards"] = guarded.buffer[guarded.outside].cpu()


def left_by(case: Case, backend: str, device: str) -> dict[str, Tensor]:
    """Everything that the steps of a case leave behind, on the CPU."""
    problem = Problem(case, device)
    plan = kernels.step_plan(problem.tensors, backend)
    left: dict[str, Tensor] = {}
    for turn in range(case.steps):
        gradients, settings, options = problem.arguments(turn)
        plan.step(gradients.tensors, settings, options)
        noted(left, f"gradients of step {turn}", gradients)
        left[f"norm of step {turn}"], left[f"whether step {turn} was skipped"] = plan.norm.cpu().clone(), plan.skipped.cpu().clone()
    for name, guarded in problem.memory.items():
        noted(left, name, guarded)
    return left


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cuda_has_the_bits_of_the_cpu(case: Case) -> None:
    skip_without("cuda")
    ours, theirs = left_by(case, "cuda", "cuda"), left_by(case, "cpu", "cpu")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert_same(tensor, theirs[name], name)


def test_a_nan_of_another_pattern_is_the_same_and_nothing_else_is() -> None:
    for kind, patterns in (
        (torch.float32, (0x7FC00000, 0x7FFFFFFF)),
        (torch.float16, (0x7E00, 0x7FFF)),
        (torch.bfloat16, (0x7FC0, 0x7FFF)),
    ):
        one, other = (torch.tensor([0, pattern], dtype=INTEGERS[kind.itemsize]).view(kind) for pattern in patterns)
        assert_same(one, other, "NaN")
        with pytest.raises(pytest.fail.Exception, match="1 of 2 differ, the first at 0"):
            assert_same(one, torch.cat((-other[:1], other[1:])), "zeros")
        with pytest.raises(pytest.fail.Exception, match="1 of 2 differ, the first at 1"):
            assert_same(one, torch.zeros_like(one), "a NaN that is lost")


@pytest.mark.parametrize("formats", [(F32, F32, F32), (BF16, BF16, F32), (F16, F32, BF16)], ids=str)
@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("rule", ["adamw", "adam", "sgd", "lion"])
def test_lines_have_the_bits_of_the_cpu(rule: str, count: int, formats: tuple[torch.dtype, ...]) -> None:
    """No NaN is left in these: the gradient that holds one is set to zero, and its step is skipped."""
    skip_without("cuda")
    sizes = [CHUNK + 5, 0, 3, 2049]
    ours, theirs = (line_left(rule, count, formats, sizes, backend) for backend in ("cuda", "cpu"))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
