"""The in-place weighted mean of co-resident replicas."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from hdet import kernels

from . import reference
from .cases import BACKENDS, CHUNK, SIZES, Guarded, check_same_bits, device_of
from .problem import assert_kept, value_of
from .reference import exactly
from .table import BF16, F16, F32, STORAGE

COUNTS = (1, 2, 3, 4, 8, 11)


@pytest.mark.parametrize(
    ("sizes", "count"),
    [(SIZES[name], count) for name, count in zip(SIZES, itertools.cycle(COUNTS))],
    ids=[f"{name}-{count}" for name, count in zip(SIZES, itertools.cycle(COUNTS))],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_float64_and_all_rows_are_the_same_bits(
    backend: str, sizes: list[int], count: int
) -> None:
    check_average(sizes, STORAGE["f32"], count, [1.0 + k for k in range(count)], backend)


@pytest.mark.parametrize("storage", list(STORAGE))
def test_masters_are_averaged_and_written_with_their_parameters(storage: str) -> None:
    """On the CPU, whose bits all backends have."""
    for count in (2, 5):
        weights = [float(k != 1) + 0.1 * k for k in range(count)]
        check_average([5, 0, 4099, 1, 17, 2049], STORAGE[storage], count, weights, "cpu")


def check_average(
    sizes: list[int],
    storage: tuple[tuple[torch.dtype, torch.dtype | None], ...],
    count: int,
    weights: list[float],
    backend: str,
) -> None:
    device = device_of(backend)
    dtypes = [storage[i % len(storage)] for i in range(len(sizes))]
    params = [
        Guarded(sizes, k % 3, k, device, [param for param, _ in dtypes]) for k in range(count)
    ]
    masters = [
        Guarded(sizes, k % 2, 50 + k, device, [master for _, master in dtypes])
        for k in range(count)
    ]
    sets = list(zip(params, masters, strict=True))
    before = [
        [value_of(p, m).clone() for p, m in zip(ps.tensors, ms.tensors, strict=True)]
        for ps, ms in sets
    ]
    shares = [w / sum(weights) for w in weights]
    plan = kernels.average_plan(
        [p.tensors for p in params],
        [m.tensors for m in masters] if masters[0].given() else None,
        backend,
    )
    plan.average(shares)
    for i, (param, master) in enumerate(zip(params[0].tensors, masters[0].tensors, strict=True)):
        assert_kept(
            param,
            master,
            reference.weighted_mean([exactly(row[i]) for row in before], weights),
            f"mean of tensor {i}",
        )
        for k in range(1, count):
            assert torch.equal(params[k].tensors[i], param)
            assert master is None or torch.equal(masters[k].tensors[i], master)
    for guarded in (*params, *masters):
        guarded.assert_guards()


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_plan_takes_other_weights_in_every_call(backend: str) -> None:
    rows = torch.tensor([[1.0, 2.0], [5.0, 6.0]], device=device_of(backend))
    plan = kernels.average_plan([[row] for row in rows], None, backend)
    for weights, expected in (
        ([0.25, 0.75], [4.0, 5.0]),
        ([1.0, 0.0], [1.0, 2.0]),
        ([0.0, 1.0], [5.0, 6.0]),
    ):
        rows.copy_(torch.tensor([[1.0, 2.0], [5.0, 6.0]]))
        plan.average(weights)
        assert rows.tolist() == [expected, expected]
    for refused in ([0.5], [0.5, 0.6], [float("nan"), 0.5], [2.0, -1.0]):
        with pytest.raises(ValueError, match="weights"):
            plan.average(refused)
    assert rows.tolist() == [expected, expected]


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_replica_keeps_its_bits(backend: str) -> None:
    x = torch.tensor([0.0, -0.0, 1e-42, 3.1, float("inf")], device=device_of(backend))
    y = x.clone()
    kernels.average_([[y]], [0.7], backend)
    assert torch.equal(x.view(torch.int32), y.view(torch.int32))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_replica_of_weight_zero_is_left_out_but_receives_the_mean(
    backend: str, dtype: torch.dtype
) -> None:
    rows = torch.randn(4, 3000, device=device_of(backend)).to(dtype)
    expected = ((rows[0].float() + rows[2].float()) / 2).to(dtype)
    rows[1] = float("nan")
    rows[3] = float("inf")
    kernels.average_(rows, [1, 0, 1, 0], backend)
    for row in rows:
        torch.testing.assert_close(row, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_average_between_forward_and_backward_is_noticed(backend: str) -> None:
    row = torch.ones(4, device=device_of(backend), requires_grad=True)
    loss = (row**2).sum()
    kernels.average_([[row], [row.detach() + 1]], [1, 1], backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        kernels.average_(torch.ones(2, 3, device=device_of(backend)), [1, 1], backend)


@pytest.mark.parametrize("storage", list(STORAGE))
@pytest.mark.parametrize(  # of parameters and of masters
    ("shifts", "masters", "count"),
    [((0,), 0, 4), ((1,), 1, 9), ((0, 2), 0, 3), ((4, 12), 4, 9), ((0,), 1, 2)],
    ids=str,
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_backends_instruction_sets_and_threads_give_the_same_bits(
    backend: str,
    shifts: tuple[int, ...],
    masters: int,
    storage: str,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = [5, 0, 4 * CHUNK if storage == "mixed" else 2051, 1, 17, 40]
    dtypes = [STORAGE[storage][i % len(STORAGE[storage])] for i in range(len(sizes))]
    weights = [float(k % 3 + (k == 0)) for k in range(count)]  # some are 0

    def left_by(name: str) -> list[Tensor]:
        device, (low, high) = device_of(name), zip(*dtypes, strict=True)
        params = [Guarded(sizes, shifts[k % len(shifts)], k, device, low) for k in range(count)]
        kept = [Guarded(sizes, masters, 10 + k, device, high) for k in range(count)]
        plan = kernels.average_plan(
            [s.tensors for s in params],
            [s.tensors for s in kept] if kept[0].given() else None,
            name,
        )
        plan.average([w / sum(weights) for w in weights])
        return [s.buffer for s in (*params, *kept)]

    check_same_bits(left_by, monkeypatch, backend)


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


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_replicas_that_differ_are_refused_unchanged(backend: str) -> None:
    """By the checks of a step's: test_refusals.py::test_plans."""
    first, masters = torch.arange(4.0), [[torch.zeros(4)], []]
    with pytest.raises(ValueError, match="tensor 0 of replica 0 and tensor 0 of replica 1 overlap"):
        kernels.average_([[first[:3]], [first[1:]]], [1, 1], backend)
    with pytest.raises(ValueError, match=r"tensor 0 of replica 1 has the shape \(5,\)"):
        kernels.average_([[first], [torch.zeros(5)]], [1, 1], backend)
    assert first.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="masters of replica 1 has 0 entries"):
        kernels.average_plan([[torch.zeros(4, dtype=BF16)] for _ in masters], masters, backend)


def test_refused_forms() -> None:
    for replicas in (torch.zeros(3), torch.zeros(2, 3, 4), torch.eye(3).to_sparse()):
        with pytest.raises(ValueError, match=r"one dense tensor of shape \(K, n\)"):
            kernels.average_(replicas, [1, 1, 1])
    with pytest.raises(ValueError, match="replicas is empty"):
        kernels.average_([], [])
