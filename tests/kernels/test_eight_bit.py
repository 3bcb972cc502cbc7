"""Codes of 8 bits: the table against the paper's, the nearest code, and that values which were
codes become the same codes.

Steps with such moments are in the table of cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hdet import _C, kernels
from hdet.kernels import StepSettings, StepTensors, numbers

from . import reference
from .cases import BACKENDS, CHUNK, device_of
from .table import F32

SIGNED = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def spread(count: int, signed: bool, seed: int = 0) -> Tensor:
    """Numbers over eight decades; a number in ten is 0."""
    generator = torch.Generator().manual_seed(seed)
    values = 10 ** (-8 * torch.rand(count, generator=generator)) * (
        torch.rand(count, generator=generator) > 0.1
    )
    return (
        values * (torch.randint(0, 2, (count,), generator=generator) * 2 - 1) if signed else values
    )


@SIGNED
def test_the_table_is_the_papers(signed: bool) -> None:
    table, thresholds = (
        torch.tensor(of(signed), dtype=torch.float64)
        for of in (numbers.magnitudes, numbers.thresholds)
    )
    assert len(table) == (128 if signed else 256) == len(thresholds) + 1
    torch.testing.assert_close(table, reference.tree(signed), rtol=2.0**-24, atol=0)
    assert ((table[:-1] < thresholds) & (thresholds < table[1:]))[0 if signed else 1 :].all()
    assert signed or thresholds[0] == 0, "a second moment that is not 0 never becomes 0"
    assert _C.CODE_BLOCK == numbers.CODE_BLOCK
    assert numbers.codebook().shape == (2, _C.CODEBOOK_BYTES)
    # a part, 128 for each exponent, has one threshold at most, and the first one reaches down to 0
    edges = (torch.arange(21 * 128 + 2) << 16) + (106 << 23)
    parts = torch.bucketize(thresholds.float(), edges.int().view(F32), right=True).clamp(min=1)
    assert parts.unique().numel() == len(thresholds)


def around_thresholds(signed: bool, power: float) -> Tensor:
    """Numbers next to those whose power is a threshold, and others from 0 to 1, of both signs;
    blocks begin with 1, so that their scale is 1."""
    edges = torch.tensor(numbers.thresholds(signed), dtype=torch.float64) ** (1 / power)
    near = (edges.float().view(torch.int32)[:, None] + torch.arange(-3, 4)).clamp(min=0)
    dense = torch.rand(20_000, generator=torch.Generator().manual_seed(2))
    small = 2.0 ** -(torch.arange(18.0, 60.0) ** (1 / power))
    values = torch.cat([near.int().view(F32).flatten(), dense, dense**8, dense**16, small])
    values = torch.cat([values, -values])
    blocks = torch.ones(-(-len(values) // 255), 256)
    blocks.view(-1)[torch.arange(blocks.numel()) % 256 != 0] = torch.cat(
        [values, values.new_ones(-len(values) % 255)]
    )
    return blocks.flatten()


@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_find_the_codes_of_all_numbers(backend: str) -> None:
    """Without what moments were before, they are the gradient and its square."""
    device = device_of(backend)
    for signed, power, rule in ((True, 1, "sgd"), (False, 2, "adamw")):
        gradient = around_thresholds(signed, power)
        expected, scales = numbers.encode(gradient**power, signed)
        zeros = [torch.zeros_like(expected, device=device) for _ in range(2)]
        ones = [torch.ones_like(scales, device=device) for _ in range(2)]
        count = 1 if signed else 2
        tensors = StepTensors(
            rule,
            [[torch.zeros_like(gradient, device=device)]],
            [0],
            [torch.zeros((), device=device)],
            [[moment] for moment in zeros[:count]],
            scales=[[scale] for scale in ones[:count]],
        )
        kernels.step_plan(tensors, backend).step(
            [gradient.to(device)], [StepSettings(lr=0.0, beta1=0.0, beta2=0.0)]
        )
        found = zeros[0 if signed else 1].cpu()
        assert torch.equal(found, expected)
        assert signed or found.unique().numel() == 256


@SIGNED
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 5000])
def test_every_number_gets_the_nearest_code(count: int, signed: bool) -> None:
    values = spread(count, signed)
    codes, scales = numbers.encode(values, signed)
    assert (
        codes.shape == values.shape
        and codes.dtype == torch.uint8
        and scales.shape == (-(-count // 256),)
    )
    reference.assert_coded(codes, scales, reference.exactly(values.double()), "", signed)
    exact = reference.decoded(codes, scales, signed)
    torch.testing.assert_close(
        numbers.decode(codes, scales, signed).double(), exact, rtol=2.0**-22, atol=0
    )


@pytest.fixture(params=[False, True], ids=["", "subnormal numbers are 0"])
def flushing(request: pytest.FixtureRequest) -> Iterator[bool]:
    torch.set_flush_denormal(request.param)
    yield request.param
    torch.set_flush_denormal(False)


@SIGNED
def test_values_of_codes_become_the_same_codes(signed: bool, flushing: bool) -> None:
    """All codes, with scales of every exponent from the least one on and with mantissas at random:
    bit for bit."""
    generator = torch.Generator().manual_seed(1)
    exponents = torch.arange(127 - 104, 255).repeat(8)
    scales = (
        ((exponents << 23) + torch.randint(0, 1 << 23, exponents.shape, generator=generator))
        .to(torch.int32)
        .view(F32)
    )
    codes = torch.arange(256).repeat(len(scales)).to(torch.uint8)
    codes[codes == 128] = 0 if signed else 128  # minus zero, which no number becomes
    values = numbers.decode(codes, scales, signed)
    again, scales_again = numbers.encode(values, signed)
    assert torch.equal(again, codes) and torch.equal(scales_again, scales)


@SIGNED
@pytest.mark.parametrize(
    "largest", [0.0, 2.0**-149, 2.0**-126, 2.0**-105, 1e-20, 1.0, 3e38, math.inf, math.nan]
)
def test_what_is_decoded_stays_what_it_is(largest: float, signed: bool) -> None:
    """Also where nearly all is subnormal; and NaN is a whole block's, whose neighbours keep their
    values."""
    values = spread(700, signed) * (largest if math.isfinite(largest) else 1.0)
    values[300] = largest
    codes, scales = numbers.encode(values, signed)
    decoded = numbers.decode(codes, scales, signed)
    block = slice(256, 512)
    assert bool(decoded[block].isnan().all()) != math.isfinite(largest)
    assert not decoded[:256].isnan().any() and not decoded[512:].isnan().any()
    again = numbers.encode(decoded, signed)
    assert torch.equal(again[0], codes) and all(
        a == b or (a.isnan() and b.isnan()) for a, b in zip(again[1], scales, strict=True)
    )
    if math.isfinite(largest):
        assert decoded[300] == largest or largest < numbers.LEAST_SCALE, "the largest is exact"
        assert signed or torch.equal(decoded == 0, values == 0)


@pytest.mark.parametrize("size", [3e-7, 3e38])
@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_store_what_they_read(backend: str, size: float, flushing: bool) -> None:
    """A momentum that stays: SGD with momentum 1 and a gradient of zeros leaves codes and
    scales, bit for bit."""
    device = device_of(backend)
    codes, scales = (t.to(device) for t in numbers.encode(spread(CHUNK + 300, True) * size, True))
    param = torch.ones(CHUNK + 300, device=device)
    tensors = StepTensors(
        "sgd",
        [[param]],
        [0],
        [torch.ones((), device=device)],
        [[codes.clone()]],
        scales=[[scales.clone()]],
    )
    kernels.step_plan(tensors, backend).step(
        [torch.zeros_like(param)], [StepSettings(lr=1.0, momentum=1.0)]
    )
    assert torch.equal(tensors.moments[0][0], codes)  # type: ignore[arg-type]
    assert torch.equal(tensors.scales_of(0)[0], scales)  # type: ignore[arg-type]
    torch.testing.assert_close(param, 1 - numbers.decode(codes, scales, True))
