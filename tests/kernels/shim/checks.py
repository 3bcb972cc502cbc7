"""What the shim is for, besides the tables of the other backends: the bits of the CPU backend,
accesses, launches, copies, capture.

Not collected by itself: test_shim.py runs it in a process with the sanitizers, with `-p
tests.kernels.shim.plugin`.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hdet import _C, kernels
from hdet.kernels import StepOptions, StepSettings, tables
from hdet.kernels.native import cuda
from hdet.rules import RULES as ALL_RULES

from ..cases import CHUNK
from ..problem import Problem, final_tensors
from ..table import AVERAGES, BF16, COVERING, F32, I8, I16, NATIVE, OTHERS, U8, Case, Format
from ..test_step import assert_same_bits
from .build import RULES
from .plugin import state

counted = ctypes.CDLL(os.environ["HDET_SHIM"])
BACKENDS = ("cpu", "cuda")


@pytest.fixture(autouse=True)
def reset() -> Iterator[None]:
    vars(state).update(stream=77, capturing=False, copies=0, used=[], multiprocessors=0)
    yield
    assert counted.shim_device() == 0, "the device was not put back"


def test_this_is_the_shim() -> None:
    assert _C.compiler == "shim" and _C.cuda
    assert isinstance(kernels.select("cuda", torch.device("cpu")), cuda.CudaBackend)


def test_a_rule_of_each_kind_is_built() -> None:
    """All that kernels are compiled for is met in one of build.RULES."""

    def facts(name: str) -> set[tuple[str, object]]:
        rule = ALL_RULES[name]
        found = {"moments": len(rule.moments), "coupled": rule.coupled, "signs": all(rule.signed)}
        found |= {"kept_if": rule.kept_if is None, "exact": bool(rule.exact)}
        found |= {"sums": len(rule.trace.sums), "generic": rule.generic}
        return {*found.items(), ("gives_parameter", rule.gives_parameter)}

    assert set().union(*map(facts, ALL_RULES)) == set().union(*map(facts, RULES))


# the bits of the CPU backend


def assert_the_cpus_bits(case: Case, made: Callable[..., Any] = kernels.step_plan) -> None:
    assert_same_bits(
        *(final_tensors(case, functools.partial(made, backend=backend)) for backend in BACKENDS)
    )


# not of special values: that is arithmetic, which is the CPU's text
HERE = [case for case in (*COVERING, *NATIVE, *OTHERS) if case.rule in RULES]


@pytest.mark.parametrize("case", HERE, ids=lambda case: case.name)
def test_steps_have_the_bits_of_the_cpu(case: Case) -> None:
    assert_the_cpus_bits(case)


# accesses and launches


def launched() -> int:
    return counted.shim_launches()


def test_launches() -> None:
    problem = Problem(Case("", sizes=(5, 0, CHUNK + 1)), "cpu")
    plan = kernels.step_plan(problem.tensors, "cuda")
    for max_norm, launches in ((0.0, 2), (1.0, 3)):
        gradients, settings, _ = problem.arguments(0)
        before = launched()
        plan.step(gradients.tensors, settings, StepOptions(max_norm=max_norm))
        assert launched() - before == launches
    coded = Problem(
        Case("", sizes=(5, 0, CHUNK + 1), formats=(Format(exp_avg=U8, exp_avg_sq=U8), Format())),
        "cpu",
    )
    gradients, settings, _ = coded.arguments(0)
    plan, before = kernels.step_plan(coded.tensors, "cuda"), launched()
    plan.step(gradients.tensors, settings)
    assert launched() - before == 2, "derive, and one for all tensors"
    early, launches = counted.shim_early(), launched()
    plan.step(gradients.tensors, settings)
    assert counted.shim_early() - early == 1, "the update; what torch has launched is waited for"
    plan.step(gradients.tensors, settings, StepOptions(max_norm=1.0))
    assert counted.shim_early() - early == 3 and launched() - launches == 5
    before = launched()
    kernels.average_plan([[t] for t in torch.randn(3, 50)], backend="cuda").average([0.2, 0.3, 0.5])
    kernels.copy_plan([torch.randn(5)], [torch.randn(5)], backend="cuda").copy()
    assert launched() - before == 2
    kernels.average_plan([[torch.empty(0)]] * 2, backend="cuda").average([0.5, 0.5])
    assert launched() - before == 2, "an empty grid is an error to CUDA"


def accessed(bytes_each: int) -> int:
    return counted.shim_accesses(bytes_each)


@pytest.mark.parametrize(
    ("form", "shift", "size", "accesses"),
    [
        # g, m, v, p are read and m, v, p written: 7 accesses for a vector
        (Format(), 0, 4096, {16: 7 * 1024}),
        (Format(), 0, 12, {16: 7 * 4}),  # three groups, one of them twice
        # two parts: a head of one, 511 groups, a tail of three; the last is one
        (Format(), 3, 4097, {16: 7 * 1024, 4: 7 * 9}),
        (Format(BF16, None, BF16, BF16, BF16), 0, 4096, {16: 7 * 512}),
        # in place of the parameter the master is read
        (Format(BF16, F32, BF16), 0, 4096, {8: 2 * 1024, 16: 6 * 1024}),
        # of codes four at a time are read and written, and a last block of one is read twice
        (Format(exp_avg=U8, exp_avg_sq=U8), 0, 4096, {16: 3 * 1024, 4: 4 * 1024}),
        (Format(exp_avg=U8, exp_avg_sq=U8), 0, 4097, {16: 3 * 1024, 4: 4 * 1024 + 5, 1: 6}),
    ],
)
def test_vectors_are_used_where_they_can_be(
    form: Format, shift: int, size: int, accesses: dict[int, int]
) -> None:
    problem = Problem(Case("", sizes=(size,), formats=(form,), shifts=(shift,)), "cpu")
    gradients, settings, options = problem.arguments(0)
    before = {width: accessed(width) for width in (1, 2, 4, 8, 16)}
    kernels.step_plan(problem.tensors, "cuda").step(gradients.tensors, settings, options)
    assert {
        width: accessed(width) - count
        for width, count in before.items()
        if accessed(width) != count
    } == accesses


def test_streams_that_are_out_of_step_are_done_one_by_one() -> None:
    problem = Problem(Case("", sizes=(100,), shifts=(0, 1, 0)), "cpu")
    gradients, settings, options = problem.arguments(0)
    before = accessed(16)
    kernels.step_plan(problem.tensors, "cuda").step(gradients.tensors, settings, options)
    assert accessed(16) == before


ALL_FORMS = [
    Format(),
    Format(BF16, F32, BF16),
    Format(BF16, I16, BF16),
    Format(BF16, F32, F32),
    Format(BF16, None, BF16, BF16, BF16),
    Format(exp_avg=U8, exp_avg_sq=U8),
    Format(BF16, I16, BF16, U8, U8),
    Format(BF16, I8, BF16),
    Format(BF16, I8, BF16, U8, U8),
]


@pytest.mark.parametrize("form", ALL_FORMS, ids=str)
@pytest.mark.parametrize("stream", range(5))
def test_each_stream_may_lie_anywhere(form: Format, stream: int) -> None:
    case = Case(
        "",
        sizes=(3000, 40, 7),
        formats=(form,),
        shifts=tuple(int(place == stream) for place in range(5)),
        zero_gradients=True,
        max_norm=1.0,
        steps=2,
    )
    assert_the_cpus_bits(case)


# copies, streams and capture


def prepared() -> tuple[Problem, Any, list[Tensor], list[StepSettings]]:
    problem = Problem(Case("", sizes=(5, 40, 0), groups=2), "cpu")
    gradients, settings, _ = problem.arguments(0)
    settings = [s._replace(lr=0.1) for s in settings]
    plan = kernels.step_plan(problem.tensors, "cuda")
    plan.step(gradients.tensors, settings)
    state.copies = 0
    return problem, plan, gradients.tensors, settings


def test_what_has_not_changed_is_not_copied() -> None:
    _, plan, gradients, settings = prepared()
    plan.step(gradients, settings)
    assert state.copies == 0
    other = [s._replace(lr=s.lr * 0.5) for s in settings]
    plan.step(gradients, other)
    plan.upload(other)
    plan.step(gradients, other)
    assert state.copies == 0, "settings come along with a step"
    plan.upload(settings)
    assert state.copies == 1, "there is no step that they could come along with"
    plan.step([g.clone() for g in gradients], other)
    assert state.copies == 2
    average = kernels.average_plan([[t] for t in torch.randn(2, 50)], backend="cuda")
    average.average([0.5, 0.5])
    average.average([0.5, 0.5])
    assert state.copies == 3


def test_tables_are_kept_for_every_stream_that_uses_them() -> None:
    _, plan, gradients, settings = prepared()
    tables = len(set(state.used))
    assert tables == len(state.used) >= 5
    plan.step(gradients, settings)
    assert len(state.used) == tables
    for stream in (5, 77, 5):
        state.stream = stream
        plan.step(gradients, settings)
    assert len(state.used) == 2 * tables and {stream for stream, _ in state.used} == {77, 5}


def test_a_captured_step_copies_nothing_and_says_what_it_needs() -> None:
    problem, plan, gradients, settings = prepared()
    state.capturing = True
    plan.step(gradients, settings)
    assert state.copies == 0
    changed = [s._replace(lr=0.3) for s in settings]
    for call in (
        lambda: plan.step([g.clone() for g in gradients], settings),
        lambda: plan.step(gradients, changed),
        lambda: plan.upload(changed),
    ):
        refused = pytest.raises(
            RuntimeError, match=r"warm-up.*zero_grad\(set_to_none=False\).*write_hyperparameters"
        )
        with problem.unchanged(), refused:
            call()
    with pytest.raises(RuntimeError, match="first call, which cannot be captured"):
        kernels.step_plan(problem.tensors, "cuda")
    assert state.copies == 0
    plan.step(gradients, settings)  # the refusals have left nothing behind
    assert state.copies == 0


def test_a_norm_that_no_step_has_taken_is_not_captured() -> None:
    """Its kernel's code would be loaded under capture.

    Uploading that there is one does not load it.
    """
    problem, plan, gradients, settings = prepared()
    options = StepOptions(max_norm=1.0)
    plan.upload(settings, options)
    state.capturing = True
    launches = launched()
    refused = pytest.raises(
        RuntimeError,
        match=(
            r"takes a norm.*as no step before it did \(max_grad_norm.*before the capture run one "
            r"step"
        ),
    )
    with problem.unchanged(), refused:
        plan.step(gradients, settings, options)
    assert launched() == launches
    state.capturing = False
    plan.step(gradients, settings, options)
    state.capturing = True
    plan.step(gradients, settings, options)


def test_tables_that_a_graph_holds_outlive_their_plan() -> None:
    _, plan, gradients, settings = prepared()
    count = len(tables.captured)
    plan.step(gradients, settings)
    assert len(tables.captured) == count
    state.capturing = True
    plan.step(gradients, settings)
    plan.step(gradients, settings)
    addresses = {address for _, address in state.used}
    del plan
    assert len(tables.captured) == count + 1, "once for each plan"
    assert addresses == {table.data_ptr() for table in tables.captured[-1]}


@pytest.mark.parametrize(
    "how",
    [{"lr": 0.3}, {"weight_decay": 0.7}, {"beta1": 0.3, "beta2": 0.4}, {"multipliers": [1.7]}],
)
def test_a_replay_acts_on_what_was_uploaded(how: dict[str, Any]) -> None:
    one, two = prepared(), prepared()
    changed = [s._replace(**how) for s in one[3]]
    one[1].step(one[2], changed)
    two[1].upload(changed)
    state.capturing = True
    two[1].step(two[2], changed)  # under capture it copies nothing: it launches what a replay does
    assert_same_bits(
        {k: v.buffer for k, v in one[0].memory.items()},
        {k: v.buffer for k, v in two[0].memory.items()},
    )


def test_settings_that_came_along_are_there_for_replays_and_after_a_failure() -> None:
    problem, plan, gradients, settings = prepared()
    changed = [s._replace(lr=0.0, weight_decay=0.0) for s in settings]
    plan.plan.num_replicas = 2000
    with problem.unchanged(), pytest.raises(RuntimeError, match="too many replicas"):
        plan.step(gradients, changed)
    plan.plan.num_replicas = 1
    state.capturing = True
    with pytest.raises(RuntimeError, match="hyperparameters have changed"):  # they have not come
        plan.step(gradients, changed)
    state.capturing = False
    before = [p.clone() for p in problem.tensors.params[0]]
    plan.step(gradients, changed)
    state.capturing = True
    plan.step(gradients, changed)
    assert all(map(torch.equal, before, problem.tensors.params[0])) and state.copies == 0


@pytest.mark.parametrize(("groups", "copies"), [(8, 0), (20, 1)])
def test_more_settings_than_a_kernel_can_bring_are_copied(groups: int, copies: int) -> None:
    problem = Problem(Case("", sizes=(5,) * groups, groups=groups), "cpu")
    gradients, settings, _ = problem.arguments(0)
    plan, before = kernels.step_plan(problem.tensors, "cuda"), state.copies
    plan.step(gradients.tensors, settings)
    plan.step(gradients.tensors, [s._replace(lr=0.5) for s in settings])
    assert state.copies - before == 1 + copies


@pytest.mark.parametrize("form", [Format(), Format(exp_avg=U8, exp_avg_sq=U8)])
@pytest.mark.parametrize(("multiprocessors", "chunks"), [(0, 4), (1, 18), (132, 18)])
def test_chunks_are_as_many_as_keep_the_device_busy(
    form: Format, multiprocessors: int, chunks: int
) -> None:
    """Also those of a norm; the results are the same."""
    state.multiprocessors = multiprocessors
    case = Case("", sizes=(2 * CHUNK + 2048, 5, 0), formats=(form,), max_norm=1.0, steps=3)
    found = []

    def made(tensors: Any, backend: str) -> Any:
        plan: Any = kernels.step_plan(tensors, backend)
        found.append(plan.plan.num_chunks)
        return plan

    assert_the_cpus_bits(case, made)
    assert found == [4, chunks]


# failures


def test_a_failing_call_is_named_and_leaves_everything() -> None:
    problem, plan, _, _ = prepared()
    launches = launched()
    with problem.unchanged():
        with pytest.raises(
            RuntimeError,
            match=r"hdet: cudaSetDevice failed: reported by the shim \(cudaErrorInvalidDevice\)",
        ):
            _C.cuda_step(plan.plan, 7, 0)
        for count, wrong, what in (
            ("num_replicas", 2000, "replicas"),
            ("num_chunks", 2**31, "chunks"),
        ):
            kept = getattr(plan.plan, count)
            setattr(plan.plan, count, wrong)
            with pytest.raises(RuntimeError, match=f"too many {what} for cudaLaunchKernelEx"):
                _C.cuda_step(plan.plan, 0, 0)
            setattr(plan.plan, count, kept)
    assert launched() == launches


def test_a_changing_set_of_gradients_is_one_copy_and_nothing_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, plan, gradients, settings = prepared()
    monkeypatch.setattr(plan.memory, "place", lambda table: pytest.fail("a new table"))
    for turn in range(4):
        before = [float(step) for step in problem.steps]
        given = [None if i == turn % 2 else gradient for i, gradient in enumerate(gradients)]
        plan.step(given, [s._replace(lr=0.1 + turn) for s in settings])
        assert state.copies == turn + 1
        assert [float(step) - old for step, old in zip(problem.steps, before, strict=True)] == [
            i != turn % 2 for i in range(3)
        ]


def test_a_captured_step_is_replayed_with_its_own_gradients_and_todays_settings() -> None:
    """Also with a set of gradients of which some are None, whatever gradients later steps have."""
    problem, plan, gradients, settings = prepared()
    some = [gradients[0], None, gradients[2]]
    plan.step(some, settings)
    state.capturing = True
    plan.step(some, settings)
    captured = [part.data_ptr() for part in plan.inputs.parts()]
    state.capturing = False
    others = [g.clone() for g in gradients]
    plan.step(others, settings)
    assert plan.plan.gradients != captured[0]
    for turn in range(3):
        plan.step(
            others[:turn] + [None] + others[turn + 1 :], settings
        )  # in the table of the steps that are not captured
    before, copies = [p.clone() for p in problem.tensors.params[0]], state.copies
    plan.upload(
        [s._replace(lr=0.5, weight_decay=0.0, beta1=0.0, beta2=0.0, eps=1.0) for s in settings]
    )
    assert state.copies == copies + 2  # for steps, and for replays
    plan.plan.gradients, plan.plan.settings, plan.plan.rates = captured
    for gradient in (*others, gradients[1]):
        gradient.fill_(math.nan)
    plan._run()  # a replay
    expected = before[0] - 0.5 * settings[0].multipliers[0] * gradients[0] / (
        gradients[0].abs() + 1
    )
    torch.testing.assert_close(problem.tensors.params[0][0], expected)
    assert torch.equal(problem.tensors.params[0][1], before[1])


def test_a_captured_step_is_replayed_with_the_formats_of_its_own_gradients() -> None:
    _, plan, gradients, settings = prepared()
    state.capturing = True
    plan.step(gradients, settings)
    state.capturing = False
    captured, formats = plan.placed_chunks, plan.placed_chunks.clone()
    plan.step([g.bfloat16() for g in gradients], settings)
    assert (
        torch.equal(captured, formats)
        and plan.plan.chunks == plan.placed_chunks.data_ptr() != captured.data_ptr()
    )


def test_replays_count_the_steps_of_averages_over_time() -> None:
    """How far an average moves depends on the step, which nobody writes before a replay."""
    found = []
    for captures in (True, False):
        case = Case("", sizes=(5, CHUNK + 1), averages=AVERAGES["several"], max_norm=0.0)
        problem = Problem(case, "cpu")
        gradients, settings, _ = problem.arguments(0)
        plan = kernels.step_plan(problem.tensors, "cuda")
        plan.step(gradients.tensors, settings)
        state.capturing = captures
        plan.step(gradients.tensors, settings)
        state.capturing = False
        for _ in range(4):
            plan._run() if captures else plan.step(gradients.tensors, settings)
        emas = [ema for sets in problem.tensors.emas for own in sets for ema in own]
        found.append([*emas, *problem.ema_steps])
    assert all(map(torch.equal, *found))
