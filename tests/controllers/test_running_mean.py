"""The averaged weights at which a probe scores replicas."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import hdet
from hdet.controllers.running_mean import RunningMean

from ..ensemble.helpers import same


def mean_of(tensors: Sequence[torch.Tensor]) -> RunningMean:
    return RunningMean(tensors, lambda: [None] * len(tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_average_is_the_mean_of_its_samples(dtype: torch.dtype) -> None:
    """Of contiguous and other tensors, also when one has moved."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.zeros(size, dtype=dtype) for size in ((5, 3), (), (0,))]
    tensors = [*map(torch.nn.Parameter, tensors), torch.zeros(4, 3, dtype=dtype).t()]
    average, samples = mean_of(tensors), []
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


@pytest.mark.parametrize("masters", ["fp32", "split"])
def test_an_average_follows_masters(masters: str) -> None:
    """At a tiny rate the parameters stand still, and the masters move."""
    parameter = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = hdet.FusedSGD([parameter], lr=1e-4, master_weights=masters)
    average = RunningMean([parameter], lambda: optimizer.masters([parameter], 0))
    for _ in range(4):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        average.add()
    assert torch.equal(parameter, torch.ones_like(parameter))
    expected = torch.full((8,), 1 - 2.5e-4)
    torch.testing.assert_close(average.means[0], expected, rtol=0, atol=1e-6)


def test_a_model_that_is_cast_before_the_first_sample_is_put_back_to_the_bit() -> None:
    """Half of the digits would be lost in an average that was made for what it was before."""
    layer = torch.nn.Linear(3, 2)
    average = mean_of(list(layer.parameters()))
    torch.nn.init.constant_(layer.double().weight, 0.1)
    average.add()
    for _ in range(2):
        average.exchange()
    assert layer.weight.unique().tolist() == [0.1]
