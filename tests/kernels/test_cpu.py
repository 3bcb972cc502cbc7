"""The native CPU loops: instruction sets, threads, tables and offsets."""

from __future__ import annotations

import functools
import struct
from typing import Any

import pytest

from hdet import kernels
from hdet.kernels import tables

from .cases import CHUNK, check_same_bits
from .problem import Problem, final_tensors
from .table import BF16, CASES, F16, F32, I16, Case, Format

MIXED = (
    Format(),
    Format(BF16, None, BF16, BF16, BF16),
    Format(BF16, I16, BF16),
    Format(F16, F32, F16, F32, BF16),
    Format(BF16, F32, F32, BF16),
)
# enough for a parallel region, and every kind of stream
WIDE = [
    Case("one replica", sizes=(3, 5 * CHUNK + 1, 0, 17, 2 * CHUNK, 40), shifts=(1,), max_norm=1.0),
    Case(
        "mixed",
        sizes=(1, 3, 16, 17, 1000, CHUNK + 13, 3 * CHUNK + 5, 2 * CHUNK, 33, 0, 129),
        formats=MIXED,
        replicas=5,
        groups=2,
        shifts=(0, 1, 2, 3),
        max_norm=1.0,
        stochastic=9,
        zero_gradients=True,
    ),
]
cpu: Any = functools.partial(kernels.step_plan, backend="cpu")


@pytest.mark.parametrize(
    "case",
    [*WIDE, *(case for case in CASES if case.rule != "adamw" and "all float" in case.name)],
    ids=lambda c: c.name,
)
def test_instruction_sets_and_threads_give_the_same_bits(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_same_bits(
        lambda backend: list(final_tensors(case, cpu).values()), monkeypatch, threads=(1, 2, 5)
    )


def test_unknown_instruction_set_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HDET_ISA", "z80")
    problem = Problem(Case("", sizes=(100,), max_norm=1.0, zero_gradients=True), "cpu")
    gradients, settings, options = problem.arguments(0)
    refused = pytest.raises(
        ValueError, match="HDET_ISA=z80 is not available here; choose one of: .*baseline"
    )
    with problem.unchanged(gradients), refused:
        cpu(problem.tensors).step(gradients.tensors, settings, options)


@pytest.mark.parametrize(
    ("elements", "least", "length"),
    [
        ([5], 0, CHUNK),
        ([5], 1, 2048),
        ([10**6] * 2, 2112, 2048),
        ([10**7], 2112, 4096),
        ([CHUNK * 2112], 2112, CHUNK),
        ([], 7, 2048),
    ],
)
def test_chunks_are_shorter_where_there_would_be_too_few(
    elements: list[int], least: int, length: int
) -> None:
    assert tables.chunk_length(elements, least) == length


def test_chunks_of_a_tensor_past_two_to_the_31_elements() -> None:
    elements = [5, 2**33 + 3, 0, 1]
    table = tables.chunks_of(elements, [7, 8, 9, 10], 0, range(4)).table
    chunks = list(struct.iter_unpack("=qqiii4x", bytes(table.numpy().tobytes())))
    assert len(chunks) == 1 + 2**33 // CHUNK + 1 + 1
    assert chunks[0] == (0, 0, 0, 5, 7)
    assert chunks[-2] == (2**33, 5 + 2**33, 1, 3, 8)
    assert chunks[-1] == (0, 8 + 2**33, 3, 1, 10)
    assert sum(chunk[3] for chunk in chunks) == sum(elements)
