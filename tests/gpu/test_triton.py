"""The Triton kernels on a GPU: bits, a captured step, streams. test_table.py runs the table of cases on them."""

from __future__ import annotations

import functools

import pytest
import torch

from hdet import kernels
from hdet.kernels import StepSettings, StepTensors

from ..kernels.cases import why_not
from ..kernels.problem import final_tensors
from ..kernels.table import CASES

pytestmark = pytest.mark.gpu
on_triton = functools.partial(kernels.step_plan, backend="triton")


@pytest.fixture(autouse=True)
def triton_or_skip() -> None:
    reason = why_not("triton")
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("name", ["all float adamw", "all float lion 4 replicas", "stochastic"])
def test_bits_are_those_of_the_cpu(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    ours = final_tensors(case, on_triton, "cuda")
    theirs = final_tensors(case, functools.partial(kernels.step_plan, backend="cpu"), "cpu")
    for key, bits in ours.items():
        assert torch.equal(bits.cpu(), theirs[key]), key


def test_a_captured_step_follows_the_settings() -> None:
    p, g, step = torch.zeros(5000, device="cuda"), torch.ones(5000, device="cuda"), torch.zeros((), device="cuda")
    plan = on_triton(StepTensors("sgd", [[p]], [0], [step]))
    plan.step([g], [StepSettings(0.5)])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.step([g], [StepSettings(0.5)])
        with pytest.raises(RuntimeError, match="before the capture run one step"):
            plan.upload([StepSettings(0.25)])
    graph.replay()
    plan.upload([StepSettings(0.25)])
    graph.replay()
    assert p.unique().tolist() == [-1.25] and step.item() == 3.0


def test_a_plan_on_another_stream_than_its_own() -> None:
    p, g = torch.zeros(5000, device="cuda"), torch.ones(5000, device="cuda")
    plan = on_triton(StepTensors("sgd", [[p]], [0], [torch.zeros((), device="cuda")]))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            plan.step([g], [StepSettings(0.5)])
    del plan
    stream.synchronize()
    assert p.unique().tolist() == [-1.5]
