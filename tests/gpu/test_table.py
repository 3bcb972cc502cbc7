"""Cases of the table on Triton, on a GPU.

CUDA runs all of it, and has the bits of the CPU, in tests/kernels.
"""

from __future__ import annotations

import functools

import pytest

from hdet import kernels
from hdet.rules import RULES

from ..kernels.cases import why_not
from ..kernels.problem import check
from ..kernels.table import CASES, COVERING, OTHERS, VALUES, Case
from ..kernels.test_step import assert_same_bits, final_tensors

pytestmark = pytest.mark.gpu
on_triton, on_the_cpu = (
    functools.partial(kernels.step_plan, backend=backend) for backend in ("triton", "cpu")
)


@pytest.fixture(autouse=True)
def triton_or_skip() -> None:
    reason = why_not("triton")
    if reason is not None:
        pytest.skip(reason)


# Each format and number of replicas is compiled, so of the covering array only a part.
CHOSEN = [*[case for case in COVERING if case.replicas <= 8][::8], *VALUES, *OTHERS]


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_the_table(case: Case) -> None:
    check(case, on_triton, "cuda")


@pytest.mark.parametrize(
    "name", [*(f"all float {rule}" for rule in RULES), "all float lion, 4 replicas", "stochastic"]
)
def test_bits_are_those_of_the_cpu(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    ours = final_tensors(case, on_triton, "cuda")
    assert_same_bits(
        {key: bits.cpu() for key, bits in ours.items()}, final_tensors(case, on_the_cpu, "cpu")
    )
