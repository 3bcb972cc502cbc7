"""Averages of weights over time, and the line from an origin through one: points by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import hdet
from hdet.measure.weight_line import RunningMean, WeightLine

from .helpers import same


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_average_is_the_mean_of_its_samples(dtype: torch.dtype) -> None:
    """Of contiguous and other tensors, also when one has moved."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.zeros(size, dtype=dtype) for size in ((5, 3), (), (0,))]
    tensors = [*map(torch.nn.Parameter, tensors), torch.zeros(4, 3, dtype=dtype).t()]
    average, samples = RunningMean(tensors), []
    for n in range(4):
        if n == 2:
            tensors[0].data = tensors[0].data.clone()
        for tensor in tensors:
            tensor.data.copy_(torch.randn(tensor.shape, generator=generator))
        samples.append([tensor.detach().clone() for tensor in tensors])
        average.add()
    for mean, of in zip(average.means, zip(*samples, strict=True), strict=True):
        expected = torch.stack(of).double().mean(0)
        torch.testing.assert_close(mean.double(), expected, rtol=1e-6, atol=1e-6)
    means = [mean.to(dtype, copy=True) for mean in average.means]
    average.exchange()
    assert same(tensors, means)
    average.exchange()
    assert same(tensors, samples[-1])
    average.reset()
    average.add()
    assert same([mean.to(dtype) for mean in average.means], tensors)


@pytest.mark.parametrize("masters", ["fp32", "split"])
def test_a_line_follows_masters(masters: str) -> None:
    """At a tiny rate the parameters stand still; far out on the line bfloat16 shows the way."""
    parameter = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = hdet.FusedSGD([parameter], lr=1e-4, master_weights=masters)
    line = WeightLine([parameter], lambda: optimizer.masters([parameter], 0))
    line.begin()
    for _ in range(4):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        line.mean.add()
    assert torch.equal(parameter, torch.ones_like(parameter))
    expected = torch.full((8,), 1 - 2000 * 2.5e-4)
    with line.at((2000.0,)):
        torch.testing.assert_close(parameter.detach().float(), expected, rtol=2**-8, atol=0)


RHOS = (1.0, 2.0, 0.5, 8.0, 1.0, 0.5)


def line_of(dtype: torch.dtype, **settings: Any) -> Any:
    """Tensors, their line after two samples, origin and mean by hand, on memory full of NaN."""
    torch.manual_seed(0)
    tensors = [torch.randn(5, 3).to(dtype), torch.randn(7).to(dtype)]
    line = WeightLine(tensors, **settings)
    for room in line.origin:
        room.fill_(math.nan)
    line.begin()
    seen = [[t.double().clone() for t in tensors]]
    for n in range(3):
        for t in tensors:
            t.add_(torch.randn_like(t))
        if n < 2:
            line.mean.add()
            seen.append([t.double().clone() for t in tensors])
    origin, *samples = seen
    return tensors, line, origin, [(a + b) / 2 for a, b in zip(*samples, strict=True)]


@pytest.mark.parametrize(("dtype", "place", "error"), [
    (torch.float32, "device", 1e-5), (torch.float64, "device", 1e-12),
    (torch.float32, "host", 1e-5), (torch.bfloat16, "device", 0.04),
])  # fmt: skip
def test_points_are_those_by_hand_in_any_order_and_weights_are_afterwards_what_they_were(
    dtype: torch.dtype, place: str, error: float
) -> None:
    tensors, line, origin, mean = line_of(dtype, place=place)
    before = [t.clone() for t in tensors]
    for i, rho in list(enumerate(RHOS)) * 2:  # what has been scored may be scored again
        rhos = (rho, RHOS[-i - 1])  # each tensor at its own, as with several knobs
        with line.at(rhos):
            for t, a, m, r in zip(tensors, origin, mean, rhos, strict=True):
                expected, atol = a + r * (m - a), error * max(1.0, r)
                torch.testing.assert_close(t.double(), expected, rtol=0, atol=atol)
        assert same(tensors, before)
    with pytest.raises(ZeroDivisionError), line.at((2.0, 0.5)):
        raise ZeroDivisionError
    assert same(tensors, before) and same([kept.double() for kept in line.origin], origin)


def test_a_model_that_is_cast_before_the_first_sample_is_put_back_to_the_bit() -> None:
    """Half of the digits would be lost in an average that was made for what it was before."""
    layer = torch.nn.Linear(3, 2)
    average = RunningMean(list(layer.parameters()))
    torch.nn.init.constant_(layer.double().weight, 0.1)
    average.add()
    for _ in range(2):
        average.exchange()
    assert layer.weight.unique().tolist() == [0.1]
