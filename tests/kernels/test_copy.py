"""The scaled copy into a bucket and back."""

from __future__ import annotations

import pytest
import torch

from hdet import _C, kernels

from .cases import SIZES, Guarded
from .test_adamw import BACKENDS


@pytest.mark.parametrize("scale", [1.0, 0.25, 1 / 3])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("backend", BACKENDS)
def test_copies_are_the_product_rounded_once(backend: str, sizes: list[int], scale: float) -> None:
    device = "cuda" if backend == "cuda" else "cpu"
    sources, destinations = Guarded(sizes, 1, seed=0, device=device), Guarded(sizes, 2, seed=1, device=device)
    before = [tensor.clone() for tensor in sources.tensors]
    kernels.copy_plan(sources.tensors, destinations.tensors, backend).copy(scale)
    for source, destination, untouched in zip(sources.tensors, destinations.tensors, before, strict=True):
        assert torch.equal(destination, torch.tensor(scale, dtype=torch.float32, device=device) * source)
        assert torch.equal(source, untouched)
    sources.assert_guards()
    destinations.assert_guards()


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_zero_reads_nothing(backend: str) -> None:
    device = "cuda" if backend == "cuda" else "cpu"
    destination = torch.ones(100, device=device)
    kernels.copy_plan([torch.full((100,), float("nan"), device=device)], [destination], backend).copy(0.0)
    assert torch.equal(destination, torch.zeros(100, device=device))


@pytest.mark.parametrize("isa", _C.isa)
def test_every_variant_gives_the_same_bits(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HDET_ISA", isa)
    source = torch.randn(70_001, generator=torch.Generator().manual_seed(0))
    destination = torch.empty_like(source)
    kernels.copy_plan([source], [destination], "cpu").copy(1 / 7)
    assert torch.equal(destination, source * torch.tensor(1 / 7, dtype=torch.float32))


@pytest.mark.parametrize(
    ("sources", "destinations", "message"),
    [
        ([], [], "at least one"),
        ([torch.ones(2)], [], "as many"),
        ([torch.ones(2)], [torch.ones(3)], "destination 0 has the shape"),
        ([torch.ones(2, dtype=torch.bfloat16)], [torch.ones(2)], "source 0 has the dtype torch.bfloat16"),
        ([torch.ones(4, 3).t()], [torch.ones(3, 4)], "source 0 of shape .* is not contiguous"),
    ],
)
def test_refusals(sources: list[torch.Tensor], destinations: list[torch.Tensor], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        kernels.copy_plan(sources, destinations)
