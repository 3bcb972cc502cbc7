"""The in-place weighted mean of co-resident replicas."""

from __future__ import annotations

import pytest
import torch

from hdet import _C, kernels

from . import reference
from .cases import CHUNK, SIZES, Guarded
from .test_adamw import BACKENDS

LARGE = ("tiny", "several chunks")
COMBINATIONS = [
    pytest.param(sizes, count, id=f"{name}-{count}")
    for name, sizes in SIZES.items()
    for count in ((3,) if name in LARGE else (1, 2, 3, 4, 8, 11))
]


@pytest.mark.parametrize(("sizes", "count"), COMBINATIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_float64_and_all_rows_are_the_same_bits(backend: str, sizes: list[int], count: int) -> None:
    device = "cuda" if backend == "cuda" else "cpu"
    rows = [Guarded(sizes, shift=k % 3, seed=k, device=device) for k in range(count)]
    before = [[tensor.clone() for tensor in row.tensors] for row in rows]
    weights = [1.0 + k for k in range(count)]
    kernels.average_([row.tensors for row in rows], weights, backend)
    for i, mean in enumerate(rows[0].tensors):
        expected = reference.weighted_mean([row[i] for row in before], weights)
        torch.testing.assert_close(mean.double(), expected, rtol=1e-6, atol=1e-6)
        for row in rows[1:]:
            assert torch.equal(row.tensors[i], mean)
    for row in rows:
        row.assert_guards()


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_replica_keeps_its_bits(backend: str) -> None:
    x = torch.tensor([0.0, -0.0, 1e-42, 3.1, float("inf")], device="cuda" if backend == "cuda" else "cpu")
    y = x.clone()
    kernels.average_([[y]], [0.7], backend)
    assert torch.equal(x.view(torch.int32), y.view(torch.int32))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_replica_of_weight_zero_is_left_out_but_receives_the_mean(backend: str) -> None:
    rows = torch.randn(4, 3000, device="cuda" if backend == "cuda" else "cpu")
    expected = (rows[0] + rows[2]) / 2
    rows[1] = float("nan")
    rows[3] = float("inf")
    kernels.average_(rows, [1, 0, 1, 0], backend)
    for row in rows:
        torch.testing.assert_close(row, expected)


def test_matrix_and_lists_agree() -> None:
    matrix = torch.randn(3, 100)
    lists = [[row.clone()] for row in matrix]
    kernels.average_(matrix, [1, 2, 3])
    kernels.average_(lists, [1, 2, 3])
    assert torch.equal(matrix[1], lists[1][0])


def test_parameters_that_require_gradients_are_averaged() -> None:
    rows = [[torch.nn.Parameter(torch.full((5,), float(k)))] for k in range(3)]
    for backend in ("cpu", "torch"):
        kernels.average_(rows, [1, 1, 1], backend)
        assert rows[2][0].tolist() == [1.0] * 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_average_between_forward_and_backward_is_noticed(backend: str) -> None:
    row = torch.ones(4, device="cuda" if backend == "cuda" else "cpu", requires_grad=True)
    loss = (row**2).sum()
    kernels.average_([[row], [row.detach() + 1]], [1, 1], backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        kernels.average_(torch.ones(2, 3), [1, 1], backend)


def test_instruction_sets_and_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    start = torch.randn(5, 5 * CHUNK + 7)
    results = []
    for isa in _C.isa:
        for count in (1, 2):
            monkeypatch.setenv("HDET_ISA", isa)
            torch.set_num_threads(count)
            rows = start.clone()
            kernels.average_(rows, [0.3, 0.1, 0.2, 0.3, 0.1], "cpu")
            results.append(rows)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], "weights has 1 entries for 2 replicas"),
        ([1.0, float("nan")], "weights must be finite and not negative"),
        ([2.0, -1.0], "weights must be finite and not negative"),
        ([0.0, 0.0], "weights must not all be 0"),
    ],
)
def test_refused_weights(weights: list[float], message: str) -> None:
    rows = torch.randn(2, 9)
    before = rows.clone()
    with pytest.raises(ValueError, match=message):
        kernels.average_(rows, weights)
    assert torch.equal(rows, before)


@pytest.mark.parametrize(
    ("spoiled", "error", "message"),
    [
        ([torch.zeros(4).double()], TypeError, "tensor 0 of replica 1 has the dtype torch.float64"),
        ([torch.zeros(5)], ValueError, r"tensor 0 of replica 1 has the shape \(5,\), but replica 0 has \(4,\)"),
        ([torch.zeros(8)[::2]], ValueError, "tensor 0 of replica 1 .* is not contiguous"),
        ([torch.zeros(4).to_sparse()], TypeError, "tensor 0 of replica 1 has the layout torch.sparse_coo"),
        ([torch.zeros(4, device="meta")], ValueError, "tensor 0 of replica 1 is on meta"),
        ([torch.zeros(4), torch.zeros(4)], ValueError, "replica 1 has 2 tensors, but replica 0 has 1"),
        ([None], TypeError, "tensor 0 of replica 1 must be a tensor"),
    ],
)
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_refused_replicas_change_nothing(backend: str, spoiled: list, error: type[Exception], message: str) -> None:
    first = torch.arange(4.0)
    with pytest.raises(error, match=message):
        kernels.average_([[first], spoiled], [1, 1], backend)
    assert first.tolist() == [0, 1, 2, 3]


def test_refused_forms() -> None:
    for replicas in (torch.zeros(3), torch.zeros(2, 3, 4), torch.eye(3).to_sparse()):
        with pytest.raises(ValueError, match=r"one dense tensor of shape \(K, n\)"):
            kernels.average_(replicas, [1, 1, 1])
    with pytest.raises(ValueError, match="replicas is empty"):
        kernels.average_([], [])


def test_rows_that_overlap_are_refused_unchanged() -> None:
    memory = torch.randn(9)
    before = memory.clone()
    with pytest.raises(ValueError, match="tensor 0 of replica 0 and tensor 0 of replica 1 overlap"):
        kernels.average_([[memory[:6]], [memory[3:]]], [1, 1])
    assert torch.equal(memory, before)
