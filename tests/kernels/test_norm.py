"""The global norm that a step takes of its gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hdet import kernels
from hdet.kernels import StepOptions, StepSettings

from .cases import BACKENDS, CHUNK, SIZES, Guarded, check_same_bits, device_of, of_sgd
from .table import BF16, F16, F32

MEASURE = StepOptions(max_norm=math.inf)


def norm_of(gradients: list[Tensor], backend: str) -> Tensor:
    """That of a step that moves nothing."""
    plan = kernels.step_plan(of_sgd([g.clone() for g in gradients]), backend)
    plan.step(gradients, [StepSettings(0.0)], MEASURE)
    return plan.norm


ONE = ((F32,), (BF16,), (F16,))


@pytest.mark.parametrize(
    ("sizes", "dtypes"),
    [
        *((SIZES[name], (F16, F32, BF16)) for name in SIZES),
        *((SIZES["vector edges"] + SIZES["block edges"], dtypes) for dtypes in ONE),
        (SIZES["chunk edges"], (F32,)),
    ],
    ids=[*SIZES, "f32", "bf16", "f16", "chunk edges of f32"],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_is_the_root_of_the_sum_of_squares_rounded_once(
    backend: str, sizes: list[int], dtypes: tuple[torch.dtype, ...]
) -> None:
    tensors = Guarded(
        sizes,
        1,
        seed=0,
        device=device_of(backend),
        dtypes=[dtypes[i % len(dtypes)] for i in range(len(sizes))],
    )
    exact = math.sqrt(math.fsum(float((t.double() ** 2).sum()) for t in tensors.tensors))
    norm = norm_of(tensors.tensors, backend)
    assert norm.dtype == F32 and norm.dim() == 0 and norm.device == tensors.buffer.device
    assert abs(norm.item() - exact) <= 2.0**-24 * exact * (1 + 1e-6)
    tensors.assert_guards()


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_each_tensor(backend: str) -> None:
    """Unscaled, rounded once; 0 where there is no gradient. One that is not finite is not in the
    others' norms."""
    device = device_of(backend)
    generator = torch.Generator().manual_seed(0)
    sizes = [3, 0, 2 * CHUNK + 5, 1, 4 * CHUNK]
    gradients = [torch.randn(n, generator=generator).to(device) for n in sizes]
    exact = [float(g.double().norm()) / 4 for g in gradients]
    plan = kernels.step_plan(of_sgd([g.clone() for g in gradients]), backend)
    scaled = StepOptions(torch.full((1,), 4.0, device=device), max_norm=1.0)
    plan.step(gradients, [StepSettings(0.0)], scaled)
    norms = plan.gradient_norms()
    assert norms.dtype == F32 and norms.device == gradients[0].device
    assert norms.tolist() == pytest.approx(exact, rel=2.0**-23)
    gradients[2][7] = math.inf
    plan.step([*gradients[:4], None], [StepSettings(0.0)], scaled)
    expected = [exact[0], 0.0, math.inf, exact[3], 0.0]
    assert plan.gradient_norms().tolist() == pytest.approx(expected, rel=2.0**-23)
    assert plan.skipped.item() == 1


@pytest.mark.parametrize(
    "exponent", [-149, -126, -100, -70, -60, -50, -45, -40, 0, 40, 60, 63, 64, 100, 122]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_of_every_size_count_in_full(backend: str, exponent: int) -> None:
    """Alone; beside much smaller ones, and beside zeros, in every chunk and in some."""
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(2 * CHUNK + 3, generator=generator, dtype=torch.float64)
    alone = wide * 2.0**exponent
    beside = torch.where(torch.arange(len(wide)) % 3 == 0, alone, alone * 2.0**-20)
    few = torch.where(torch.arange(len(wide)) < 40, alone, 0.0)
    alike = [torch.full((2000,), x.item() * 2.0**exponent) for x in wide[:8]]  # rounded alike, too
    lost = torch.ones(1 << 14, dtype=torch.float64) * 2.0**exponent  # if summed in float32
    lost[0] *= 1e4
    for numbers in (alone, beside, few, lost, *alike):
        x = numbers.float()
        exact = math.sqrt(math.fsum((x.double() ** 2).tolist()))
        norm = norm_of([x.to(device_of(backend))], backend)
        assert norm.item() == torch.tensor(exact, dtype=torch.float64).float().item()
    assert norm_of([few.float().to(device_of(backend)) * 0], backend).item() == 0


@pytest.mark.parametrize(
    ("dtype", "bad"), [(F32, math.inf), (F32, math.nan), (BF16, -math.inf), (F16, math.nan)]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_is_not_finite_where_one_element_is_not(
    backend: str, dtype: torch.dtype, bad: float
) -> None:
    x = torch.ones(2 * CHUNK + 3, device=device_of(backend), dtype=dtype)
    for place in (0, CHUNK, 2 * CHUNK + 2):
        x.fill_(1)
        x[place] = bad
        assert not norm_of([x], backend).isfinite()
    x.fill_(1)
    assert norm_of([x], backend).isfinite()


def test_instruction_sets_and_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x = [torch.randn(5 * CHUNK + 7), torch.randn(33).bfloat16(), torch.randn(3 * CHUNK).half()]
    check_same_bits(lambda backend: [norm_of(x, "cpu")], monkeypatch, threads=(1, 2, 5))
