"""The Triton kernels in Triton's interpreter. test_interpreter.py runs this file in a process with
TRITON_INTERPRET=1.

The interpreter makes numpy calls of every operation of every program, so there are few programs
here: what does not fit is cut.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

import hdet
from hdet import kernels
from hdet.kernels import StepOptions, StepSettings, numbers, tables
from hdet.kernels import triton as triton_backend
from hdet.kernels.triton import step as triton_step
from hdet.kernels.triton import symmetric_products as symmetric
from hdet.kernels.triton.launch import Memory
from hdet.optim import newton_schulz
from hdet.triton_kernels import symmetric as triton_symmetric
from tests.freed import left_alive, tensors_of
from tests.kernels import (
    cases,
    test_average,
    test_eight_bit,
    test_far_offsets,
    test_gradients,
    test_memory,
    test_norm,
    test_numbers,
)
from tests.kernels.cases import CHUNK, SIZES
from tests.kernels.problem import Problem, check, final_tensors
from tests.kernels.table import COVERING, OTHERS, STORAGE, VALUES, Case, Format
from tests.kernels.test_step import assert_same_bits
from tests.optim import test_freed

on_triton, on_the_cpu = (
    functools.partial(kernels.step_plan, backend=backend) for backend in ("triton", "cpu")
)


def cut(case: Case) -> Case:
    """Seven tensors, the first and the last; 5 replicas, one more than a batch, for 8 or 16; one
    step if nothing changes between steps."""
    sizes = case.sizes if len(case.sizes) <= 7 else case.sizes[:4] + case.sizes[-3:]
    changes = case.changing or case.spoiled or case.special or case.found_inf
    case = replace(case, sizes=sizes, steps=min(case.steps, 2) if changes else 1)
    return replace(case, replicas=min(case.replicas, 5))


@pytest.fixture(autouse=True, scope="session")
def patch_once() -> None:
    """The interpreter patches triton.language anew for every call of a device function, which takes
    longer than most calls.

    Once for each kernel and each module that device functions know it by is enough. This only saves
    time: a Triton that does it in another way is left alone.
    """
    original, outer, done = getattr(interpreter, "_patch_lang", None), [], set()
    if original is None:
        return

    def patch(fn: Any) -> Any:
        modules = frozenset(
            id(value) for value in fn.__globals__.values() if value in (tl, tl.core)
        )
        if not (
            outer and getattr(outer[0], "_changes", None)
        ):  # a kernel begins: those of the last one were taken back
            done.clear()
            outer[:] = [original(fn)]
        elif modules not in done:
            original(fn)
        done.add(modules)
        return outer[0]

    interpreter._patch_lang = patch


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of the other backends, which are called below, take tensors on the CPU."""
    for module in (
        cases,
        test_average,
        test_eight_bit,
        test_far_offsets,
        test_gradients,
        test_norm,
        test_numbers,
    ):
        monkeypatch.setattr(module, "device_of", lambda backend: "cpu")


def check_steps(case: Case) -> None:
    """The bits of the CPU. Norms add up in another order: beside float64."""
    if case.max_norm != 0:
        check(case, on_triton)
    else:
        assert_same_bits(*(final_tensors(case, make) for make in (on_triton, on_the_cpu)))


@pytest.mark.parametrize("case", [*COVERING, *VALUES, *OTHERS], ids=lambda case: case.name)
def test_the_table(case: Case) -> None:
    check_steps(cut(case))


STOCHASTIC = next(case for case in OTHERS if case.name == "stochastic")


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
@pytest.mark.parametrize("block", [16, 64])
def test_chunks_of_several_blocks(
    block: int, max_norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device a block is shorter than a chunk; here only if told so."""
    monkeypatch.setattr(triton_step, "block_for", lambda longest: block)
    sizes = (block - 1, 2 * block + 9, 0, 3 * block)
    check_steps(replace(STOCHASTIC, sizes=sizes, max_norm=max_norm))


def test_slices_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device several programs share a chunk; here only if told so."""
    for module in (triton_step, triton_backend):
        monkeypatch.setattr(module, "slices_of", lambda longest, coded=False: 8)
    for max_norm in (0.0, 1.0):
        check_steps(replace(STOCHASTIC, sizes=(CHUNK + 5000, 0, 3), max_norm=max_norm, steps=1))
    test_average.check_average([5, 0, CHUNK + 3], STORAGE["split"], 2, [0.3, 0.7], "triton")


def test_a_small_model_is_cut_into_as_many_chunks_as_keep_the_device_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables, "_multiprocessors", lambda device: 1)
    coded = Format(exp_avg=torch.uint8, exp_avg_sq=torch.uint8)
    case = Case("", sizes=(CHUNK + 2048, 5, 0), formats=(coded,), steps=1)
    assert on_triton(Problem(case, "cpu").tensors).chunks.number == 10
    check_steps(case)


# numbers


def test_numbers_of_16_bits() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        test_numbers.test_rounding_to_16_bits_and_widening_are_torchs("triton", dtype)
    test_numbers.test_split_is_exact_for_every_number_and_its_upper_half_is_the_nearest("triton")
    test_numbers.test_split24_is_the_nearest_number_of_24_bits_and_keeps_that("triton")
    for lower in numbers.LOWER:
        test_numbers.test_a_nan_shows_in_the_upper_half_of_the_split_form("triton", lower)
    test_numbers.test_a_parameter_that_was_set_to_zero_is_zero_whatever_its_lower_half("triton")


@pytest.mark.parametrize("operation", ["step", "average"])
def test_elements_beyond_two_to_the_31(operation: str) -> None:
    test_far_offsets.test_far_out_is_as_near("triton", test_far_offsets.OPERATIONS[operation])


def test_random_bits_are_those_of_every_backend() -> None:
    test_far_offsets.test_random_numbers_know_where_they_are("triton")


# the other operations, by the tests of the other backends


@pytest.mark.parametrize("storage", list(STORAGE))
def test_averages(storage: str) -> None:
    weights = [1.0, 0.1, 1.2, 1.3, 1.4]
    test_average.check_average([5, 0, CHUNK + 3, 1, 17], STORAGE[storage], 5, weights, "triton")


def test_average_edges() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        test_average.test_a_replica_of_weight_zero_is_left_out_but_receives_the_mean(
            "triton", dtype
        )
    test_average.test_one_plan_takes_other_weights_in_every_call("triton")
    test_average.test_one_replica_keeps_its_bits("triton")


@pytest.mark.parametrize("sizes", ["vector edges", "chunk edges", "empty first", "only empty"])
def test_norms(sizes: str) -> None:
    dtypes = (torch.float16, torch.float32, torch.bfloat16)
    test_norm.test_is_the_root_of_the_sum_of_squares_rounded_once("triton", SIZES[sizes], dtypes)


def test_norm_edges() -> None:
    test_norm.test_of_each_tensor("triton")
    for exponent in (-149, -45, 64):
        test_norm.test_numbers_of_every_size_count_in_full("triton", exponent)
    for bad in (math.nan, -math.inf):
        test_norm.test_is_not_finite_where_one_element_is_not("triton", torch.float16, bad)


def test_codes_of_8_bits() -> None:
    test_eight_bit.test_kernels_find_the_codes_of_all_numbers("triton")


# around the kernels


def test_gradients_that_are_negated_views_are_refused() -> None:
    test_gradients.test_a_negated_view_is_refused("triton")


def test_a_rate_that_is_another_object_for_the_same_memory_travels_once() -> None:
    test_memory.check_rates("triton")


def test_a_kernel_that_no_step_has_launched_is_not_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would be compiled and loaded under capture: the norm's, and another end of a step."""
    p, g, capturing = torch.zeros(3), torch.ones(3), [False]
    monkeypatch.setattr(tables, "_capturing", lambda device: capturing[0])
    plan = kernels.step_plan(cases.of_sgd([p]), "triton")
    plan.step([g], [StepSettings(0.5)])
    for options in (StepOptions(max_norm=10.0), StepOptions(zero_gradients=True)):
        plan.upload([StepSettings(0.5)], options)
        capturing[0] = True
        with pytest.raises(
            RuntimeError,
            match=(
                r"as no step before it did \(max_grad_norm, zero_gradients.*before the capture run "
                r"one step"
            ),
        ):
            plan.step([g], [StepSettings(0.5)], options)
        capturing[0] = False
        plan.step([g], [StepSettings(0.5)], options)
        g.fill_(1)
        capturing[0] = True
        plan.step([g], [StepSettings(0.5)], options)
        g.fill_(1)
        capturing[0] = False
    assert p.tolist() == [-2.5] * 3


def test_tensors_that_the_interpreter_cannot_read_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match="interpreter here, which cannot read tensors on cuda:0: unset TRITON_INTERPRET",
    ):
        Memory(torch.device("cuda", 0))


# matrices


@pytest.mark.parametrize(("batch", "m", "length"), [(1, 16, 16), (2, 35, 50), (3, 5, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_symmetric_products(batch: int, m: int, length: int, dtype: torch.dtype) -> None:
    """A tile, six tiles of which some are cut, and less than one, beside float64.

    To one rounding.
    """
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(batch, m, length, generator=generator) / length**0.5).to(dtype)
    gram = symmetric.product(x, x, None, 1.0, 0.0)
    assert torch.equal(gram, gram.mT)
    torch.testing.assert_close(
        gram.double(), x.double() @ x.double().mT, rtol=torch.finfo(dtype).eps, atol=1e-6
    )
    square = symmetric.product(gram, gram, gram, 2.0, -0.5)
    expected = 2 * gram.double() @ gram.double() - 0.5 * gram.double()
    torch.testing.assert_close(square.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_newton_schulz_by_symmetric_products() -> None:
    torch.manual_seed(0)
    x = [torch.randn(18, 30), torch.randn(30, 18)]
    how = newton_schulz.Iteration(((3.4445, -4.7750, 2.0315),) * 2, 1e-7, torch.bfloat16)
    ours, theirs = (newton_schulz.orthogonalise(x, how, backend) for backend in ("triton", "torch"))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.02)


def test_the_tile_of_a_number() -> None:
    """For as many tiles as matrices of 500 000 rows have: the root that finds it is rounded."""
    places = torch.tensor([*range(300), 8386559, 8386560, 8386561, 8390655, 8390656])
    found = torch.zeros(len(places), 2, dtype=torch.int32)
    tiles_of[(len(places),)](places.int(), found)
    exact = [(int(((8 * t + 1) ** 0.5 - 1) / 2), t) for t in places.tolist()]
    assert found.tolist() == [[row, t - row * (row + 1) // 2] for row, t in exact]


@triton.jit
def tiles_of(places, found):
    i = tl.program_id(0)
    row, column = triton_symmetric.lower_tile(tl.load(places + i))
    tl.store(found + 2 * i, row)
    tl.store(found + 2 * i + 1, column)


def test_tensors_are_freed_with_the_optimizer() -> None:
    def trained() -> dict[str, Any]:
        made = test_freed.train(hdet.FusedAdamW, "triton", {"master_weights": "fp32"}, replicas=3)
        return {**tensors_of(*made), "optimizer": made[1]}

    assert left_alive(trained) == []
