"""The AdamW step of every backend against float64, at every edge; see test_shim.py for the CUDA sources on the host."""

from __future__ import annotations

import struct

import pytest
import torch

from hdet import _C, kernels
from hdet.kernels import AdamWSettings, AdamWTensors

from . import reference
from .cases import CHUNK, SIZES, Guarded, usable

SETTINGS = AdamWSettings(lr=0.02, multiplier=1.3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, maximize=False)
BACKENDS = ["cpu", "torch"] + ([] if usable("cuda") else ["cuda"])


@pytest.mark.skipif(usable("cuda") is not None, reason=str(usable("cuda")))
def test_the_cuda_backend_is_in_the_tables_of_this_folder() -> None:
    assert "cuda" in BACKENDS


class Problem:
    """Parameters, moments and gradients in guarded memory."""

    def __init__(self, sizes: list[int], shifts: tuple[int, int, int, int] = (0, 0, 0, 0), device: str = "cpu") -> None:
        self.params, self.gradients = Guarded(sizes, shifts[0], 1, device), Guarded(sizes, shifts[1], 2, device)
        self.exp_avgs, self.exp_avg_sqs = Guarded(sizes, shifts[2], 3, device).zero(), Guarded(sizes, shifts[3], 4, device).zero()
        self.steps = [torch.tensor(0.0) for _ in sizes]
        self.tensors = AdamWTensors(self.params.tensors, self.exp_avgs.tensors, self.exp_avg_sqs.tensors, self.steps, [0] * len(sizes))

    def new_gradients(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for gradient in self.gradients.tensors:
            gradient.copy_(torch.randn(gradient.shape, generator=generator))

    def buffers(self) -> list[torch.Tensor]:
        return [x.buffer.clone() for x in (self.params, self.exp_avgs, self.exp_avg_sqs)] + [torch.stack(self.steps)]

    def assert_guards(self) -> None:
        for guarded in (self.params, self.gradients, self.exp_avgs, self.exp_avg_sqs):
            guarded.assert_guards()


def run(problem: Problem, backend: str, steps: int = 3, settings: AdamWSettings = SETTINGS) -> list[list[torch.Tensor]]:
    """Gradients of all steps, [tensor][step]."""
    plan = kernels.adamw_plan(problem.tensors, backend)
    seen: list[list[torch.Tensor]] = [[] for _ in problem.steps]
    for step in range(steps):
        problem.new_gradients(100 + step)
        for history, gradient in zip(seen, problem.gradients.tensors, strict=True):
            history.append(gradient.clone())
        plan.step(problem.gradients.tensors, [settings])
    return seen


@pytest.mark.parametrize("shifts", [(0, 0, 0, 0), (1, 1, 1, 1), (0, 1, 2, 3)], ids=["aligned", "odd", "each its own"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_float64(backend: str, sizes: list[int], shifts: tuple[int, int, int, int]) -> None:
    problem = Problem(sizes, shifts, "cuda" if backend == "cuda" else "cpu")
    before = [param.clone() for param in problem.params.tensors]
    gradients = run(problem, backend)
    s = SETTINGS
    for param, start, history in zip(problem.params.tensors, before, gradients, strict=True):
        expected = reference.adamw(start, history, s.lr * s.multiplier, s.beta1, s.beta2, s.eps, s.weight_decay)
        torch.testing.assert_close(param.double(), expected, rtol=1e-6, atol=1e-6)
    problem.assert_guards()
    assert [step.item() for step in problem.steps] == [3.0] * len(sizes)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "change", [{"beta1": 0.0}, {"beta1": 0.6, "beta2": 0.0}, {"weight_decay": 0.0}, {"lr": 0.0}, {"multiplier": 0.0}, {"eps": 0.5}]
)
def test_unusual_hyperparameters(backend: str, change: dict[str, float]) -> None:
    s = SETTINGS._replace(**change)
    problem = Problem([37], device="cuda" if backend == "cuda" else "cpu")
    before = problem.params.tensors[0].clone()
    gradients = run(problem, backend, settings=s)
    expected = reference.adamw(before, gradients[0], s.lr * s.multiplier, s.beta1, s.beta2, s.eps, s.weight_decay)
    torch.testing.assert_close(problem.params.tensors[0].double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_maximize_is_the_step_with_negated_gradients(backend: str) -> None:
    device = "cuda" if backend == "cuda" else "cpu"
    up, down = Problem([50], device=device), Problem([50], device=device)
    kernels.adamw_plan(up.tensors, backend).step(up.gradients.tensors, [SETTINGS._replace(maximize=True)])
    kernels.adamw_plan(down.tensors, backend).step([-g for g in down.gradients.tensors], [SETTINGS])
    assert torch.equal(up.params.buffer, down.params.buffer)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_row_has_its_own_hyperparameters_and_step(backend: str) -> None:
    device = "cuda" if backend == "cuda" else "cpu"
    sizes = [7, 0, CHUNK + 2, 5]
    together = Problem(sizes, device=device)
    for step, value in zip(together.steps, [4.0, 0.0, 0.0, 4.0], strict=True):
        step.fill_(value)
    settings = [SETTINGS, SETTINGS._replace(lr=0.5, weight_decay=0.0)]
    tensors = AdamWTensors(together.params.tensors, together.exp_avgs.tensors, together.exp_avg_sqs.tensors, together.steps, [0, 1, 1, 0])
    kernels.adamw_plan(tensors, backend).step(together.gradients.tensors, settings)
    for row, members in enumerate([[0, 3], [1, 2]]):
        alone = Problem(sizes, device=device)
        for i in members:
            alone.steps[i].fill_(4.0 if row == 0 else 0.0)
            one = AdamWTensors(
                [alone.params.tensors[i]], [alone.exp_avgs.tensors[i]], [alone.exp_avg_sqs.tensors[i]], [alone.steps[i]], [0]
            )
            kernels.adamw_plan(one, backend).step([alone.gradients.tensors[i]], [settings[row]])
            assert torch.equal(alone.params.tensors[i], together.params.tensors[i])
    assert [step.item() for step in together.steps] == [5.0, 1.0, 1.0, 5.0]


def test_instruction_sets_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for isa in _C.isa:
        monkeypatch.setenv("HDET_ISA", isa)
        problem = Problem([1, 3, 16, 17, 1000, CHUNK + 13], (0, 1, 2, 3))
        run(problem, "cpu", steps=5)
        results.append(problem.buffers())
    assert len(results) == len(_C.isa) >= 1
    for result in results[1:]:
        for one, other in zip(results[0], result, strict=True):
            assert torch.equal(one, other)


def test_unknown_instruction_set_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HDET_ISA", "z80")
    problem = Problem([100])
    before = problem.buffers()
    plan = kernels.adamw_plan(problem.tensors, "cpu")
    with pytest.raises(ValueError, match="HDET_ISA=z80 is not available here; choose one of: .*baseline"):
        plan.step(problem.gradients.tensors, [SETTINGS])
    assert all(torch.equal(one, other) for one, other in zip(before, problem.buffers(), strict=True))


def test_threads_give_the_same_bits() -> None:
    sizes = [3, 5 * CHUNK + 1, 0, 17, 2 * CHUNK, 40]  # enough for a parallel region
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        problem = Problem(sizes, (1, 1, 1, 1))
        run(problem, "cpu")
        problem.assert_guards()
        results.append(problem.buffers())
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], result, strict=True))


def test_chunks_of_a_tensor_past_two_to_the_31_elements() -> None:
    elements = [5, 2**33 + 3, 0, 1]
    table = torch.zeros(_C.count_chunks(elements) * _C.CHUNK_BYTES, dtype=torch.uint8)
    _C.write_chunks(table.data_ptr(), elements, [0, 1, 1, 2])
    chunks = list(struct.iter_unpack("=qqiiii", bytes(table.numpy().tobytes())))
    assert len(chunks) == 1 + 2**33 // CHUNK + 1 + 1
    assert chunks[0] == (0, 0, 0, 5, 0, 0)
    assert chunks[-2] == (2**33, 5 + 2**33, 1, 3, 1, 0)
    assert chunks[-1] == (0, 8 + 2**33, 3, 1, 2, 0)
    assert sum(chunk[3] for chunk in chunks) == sum(elements)


def _noncontiguous(p: Problem) -> None:
    p.gradients.tensors[0] = torch.randn(40)[::4]


def _wrong_dtype(p: Problem) -> None:
    p.gradients.tensors[0] = p.gradients.tensors[0].bfloat16()


def _wrong_shape(p: Problem) -> None:
    p.gradients.tensors[0] = p.gradients.tensors[0].view(2, 5)


def _sparse(p: Problem) -> None:
    p.gradients.tensors[0] = torch.eye(10)[0].to_sparse()


def _meta(p: Problem) -> None:
    p.gradients.tensors[0] = torch.empty(10, device="meta")


def _missing(p: Problem) -> None:
    p.gradients.tensors[0] = None  # type: ignore[call-overload]


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (_noncontiguous, ValueError, r"gradient of parameter 0 of shape \(10,\) is not contiguous"),
        (_wrong_dtype, TypeError, "gradient of parameter 0 has the dtype torch.bfloat16; only torch.float32"),
        (_wrong_shape, ValueError, r"gradient of parameter 0 has the shape \(2, 5\), but the parameter has \(10,\)"),
        (_sparse, TypeError, "gradient of parameter 0 has the layout torch.sparse_coo"),
        (_meta, ValueError, "gradient of parameter 0 is on meta"),
        (_missing, TypeError, "gradient of parameter 0 must be a tensor, not NoneType"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_refused_gradients_change_nothing(backend: str, spoil, error: type[Exception], message: str) -> None:
    problem = Problem([10, 6])
    plan = kernels.adamw_plan(problem.tensors, backend)
    before = problem.buffers()
    spoil(problem)
    with pytest.raises(error, match=message):
        plan.step(problem.gradients.tensors, [SETTINGS])
    assert all(torch.equal(one, other) for one, other in zip(before, problem.buffers(), strict=True))


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("name", ["lr", "multiplier", "beta1", "beta2", "eps", "weight_decay"])
@pytest.mark.parametrize("value", [float("nan"), -0.1, float("inf")])
def test_refused_hyperparameters_change_nothing(backend: str, name: str, value: float) -> None:
    problem = Problem([10])
    plan = kernels.adamw_plan(problem.tensors, backend)
    before = problem.buffers()
    with pytest.raises(ValueError, match=name.rstrip("12")):
        plan.step(problem.gradients.tensors, [SETTINGS._replace(**{name: value})])
    assert all(torch.equal(one, other) for one, other in zip(before, problem.buffers(), strict=True))


def test_refused_plans() -> None:
    def tensors(**change: object) -> AdamWTensors:
        p = Problem([10, 6]).tensors
        return AdamWTensors(**{**vars(p), **change})

    x = torch.zeros(10)
    for change, error, message in [
        ({"params": [x.double(), torch.zeros(6)]}, TypeError, "parameter 0 has the dtype torch.float64"),
        ({"params": [torch.zeros(20)[::2], torch.zeros(6)]}, ValueError, "parameter 0 .* is not contiguous"),
        ({"params": [x, torch.zeros(6, device="meta")]}, ValueError, "parameter 1 is on meta, but the first tensor is on cpu"),
        ({"exp_avgs": [x, torch.zeros(5)]}, ValueError, "exp_avg of parameter 1 has the shape"),
        ({"exp_avg_sqs": [x]}, ValueError, "exp_avg_sqs has 1 entries, but there are 2 parameters"),
        ({"steps": [torch.tensor(0), torch.tensor(0.0)]}, TypeError, "step of parameter 0"),
        ({"rows": [0, 2]}, ValueError, "rows must number the settings from 0"),
        ({"params": [3, x]}, TypeError, "parameter 0 must be a tensor, not int"),
    ]:
        with pytest.raises(error, match=message):
            kernels.adamw_plan(tensors(**change))
