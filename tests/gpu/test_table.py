"""The table of cases that every backend must pass, on a GPU; and that CUDA has the bits of the CPU there."""

from __future__ import annotations

import functools

import pytest
import torch

from hdet import kernels

from ..kernels.cases import CHUNK
from ..kernels.lines import line_left
from ..kernels.problem import check, final_tensors
from ..kernels.table import BF16, CASES, F16, F32, Case
from .conftest import why_not

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_table(backend: str, case: Case) -> None:
    check(case, functools.partial(kernels.step_plan, backend=backend), "cuda")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cuda_has_the_bits_of_the_cpu(case: Case) -> None:
    reason = why_not("cuda")
    if reason is not None:
        pytest.skip(reason)
    ours, theirs = (
        final_tensors(case, functools.partial(kernels.step_plan, backend=name), device)
        for name, device in (("cuda", "cuda"), ("cpu", "cpu"))
    )
    assert ours.keys() == theirs.keys()
    for name, bits in ours.items():
        assert torch.equal(bits.cpu(), theirs[name]), name


@pytest.mark.parametrize("formats", [(F32, F32, F32), (BF16, BF16, F32), (F16, F32, BF16)], ids=str)
@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("rule", ["adamw", "adam", "sgd", "lion"])
def test_lines_have_the_bits_of_the_cpu(rule: str, count: int, formats: tuple[torch.dtype, ...]) -> None:
    reason = why_not("cuda")
    if reason is not None:
        pytest.skip(reason)
    sizes = [CHUNK + 5, 0, 3, 2049]
    ours, theirs = (line_left(rule, count, formats, sizes, backend, device) for backend, device in (("cuda", "cuda"), ("cpu", "cpu")))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
