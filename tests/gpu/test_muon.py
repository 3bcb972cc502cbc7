"""FusedMuon on a GPU: its Triton kernel beside float64, its step beside the one on a CPU, and
without waiting."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from hdet.optim import FusedMuon, newton_schulz

from ..kernels.cases import why_not
from .test_optimizers import captured_step, refusing_to_wait

pytestmark = pytest.mark.gpu

SHAPES = [(96, 64), (64, 96), (3, 40, 72), (70,), (33, 5)]
MATRICES = 3
USUAL = (3.4445, -4.7750, 2.0315)


@pytest.fixture
def device() -> str:
    reason = why_not("triton")
    if reason is not None:
        pytest.skip(reason)
    return "cuda"


@pytest.mark.parametrize(
    ("batch", "m", "length"),
    [(1, 64, 64), (2, 35, 50), (3, 200, 808), (2, 768, 3072), (1, 1000, 1003)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_symmetric_products(
    batch: int, m: int, length: int, dtype: torch.dtype, device: str
) -> None:
    """Tiles of both sizes, cut and whole; rows that begin at multiples of 16 bytes, and others.

    To one rounding.
    """
    from hdet.kernels.triton import symmetric_products

    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(batch, m, length, generator=generator) / length**0.5).to(device, dtype)
    gram = symmetric_products.product(x, x, None, 1.0, 0.0)
    assert torch.equal(gram, gram.mT)
    near = {"rtol": torch.finfo(dtype).eps, "atol": 1e-5}
    torch.testing.assert_close(gram.double(), x.double() @ x.double().mT, **near)
    square = symmetric_products.product(gram, gram, gram, 2.0, -0.5)
    torch.testing.assert_close(
        square.double(), 2 * gram.double() @ gram.double() - 0.5 * gram.double(), **near
    )


@pytest.mark.parametrize("shape", [(768, 3072), (768, 768), (100, 60)])
def test_directions(shape: tuple[int, int], device: str) -> None:
    """In bfloat16 as near to float64's as torch's Muon is, which computes the whole products."""
    from torch.optim._muon import _zeropower_via_newtonschulz as torchs

    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    left, values, right = torch.linalg.svd(x.double(), full_matrices=False)
    s = values / values.square().sum().sqrt()
    for _ in range(5):
        s = USUAL[0] * s + USUAL[1] * s**3 + USUAL[2] * s**5
    exact = left @ torch.diag(s) @ right
    (ours,) = newton_schulz.orthogonalise(
        [x], newton_schulz.Iteration((USUAL,) * 5, 1e-7, torch.bfloat16)
    )
    ours_off, theirs_off = (
        float((made.double() - exact).norm() / exact.norm())
        for made in (ours, torchs(x, USUAL, 5, 1e-7))
    )
    assert ours_off < 1.2 * theirs_off < 0.03


def tensors(device: str, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device) for shape in SHAPES]


def made(device: str, **options: Any) -> tuple[list[Parameter], FusedMuon]:
    params = [Parameter(tensor) for tensor in tensors(device, 0)]
    groups = [
        {"params": params[:MATRICES], "use_muon": True, "higher_dims": "stack"},
        {"params": params[MATRICES:], "use_muon": False},
    ]
    return params, FusedMuon(groups, lr=0.02, adamw_lr=1e-3, **options)


def stepped(device: str, **options: Any) -> list[torch.Tensor]:
    """The parameters after some steps, which wait for nothing but the first."""
    params, optimizer = made(device, **options)
    gradients = [tensors(device, seed) for seed in range(1, 6)]

    def step(given: list[torch.Tensor]) -> None:
        for param, gradient in zip(params, given, strict=True):
            param.grad = gradient
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.step()

    step(gradients[0])
    with nullcontext() if device == "cpu" else refusing_to_wait():
        for given in gradients[1:]:
            step(given)
    return [param.detach().cpu() for param in params]


@pytest.mark.parametrize(
    "options", [{}, {"max_grad_norm": 1.0}, {"moment_dtype": torch.bfloat16}], ids=str
)
def test_the_steps_of_a_cpu_without_waiting(options: dict[str, Any], device: str) -> None:
    for ours, theirs in zip(
        *(stepped(place, ns_dtype=torch.float32, **options) for place in (device, "cpu")),
        strict=True,
    ):
        torch.testing.assert_close(
            ours,
            theirs,
            rtol=1e-3 if options else 1e-4,
            atol=1e-3 if "moment_dtype" in options else 1e-4,
        )


def test_a_step_with_codes_never_waits(device: str) -> None:
    found = stepped(device, max_grad_norm=1.0, moment_dtype="8bit")
    assert all(param.isfinite().all() for param in found)


@pytest.mark.parametrize(
    "options", [{}, {"moment_dtype": "8bit", "ns_dtype": torch.float16}, {"ema": 0.9}], ids=str
)
def test_a_captured_step_has_the_bits_of_others(options: dict[str, Any], device: str) -> None:
    """Rates, decay and momentum change between replays."""
    found = []
    for captures in (True, False):
        params, optimizer = made(device, **options)
        for param, gradient in zip(params, tensors(device, 1), strict=True):
            param.grad = gradient
        optimizer.step()
        graph = captured_step(optimizer) if captures else None
        if not captures:
            optimizer.step()
        for turn in range(1, 4):
            optimizer.param_groups[0].update(lr=0.02 / turn, momentum=0.5 + 0.1 * turn)
            optimizer.param_groups[0]["weight_decay"] = 0.1 * turn
            for param, gradient in zip(params, tensors(device, 1 + turn), strict=True):
                param.grad.copy_(gradient)
            if graph is None:
                optimizer.step()
            else:
                optimizer.write_hyperparameters()
                graph.replay()
        emas = [state["ema"] for state in optimizer.state.values() if "ema" in state]
        found.append([tensor.detach().cpu() for tensor in (*params, *emas)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
