"""Averages of weights over time, and the line through an origin and an average: points by hand, what is left untouched."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import hdet
from hdet.measure.weight_line import RunningMean, WeightLine

from ..distributed import run_ranks

# -- the average over a cycle --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_average_is_the_mean_of_its_samples(dtype: torch.dtype) -> None:
    """Of contiguous and other tensors, also when one has moved."""
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size in ((5, 3), (), (0,))
    ] + [torch.zeros(4, 3, dtype=dtype).t()]
    average = RunningMean(tensors)
    samples = []
    for n in range(4):
        with torch.no_grad():
            if n == 2:
                tensors[0].data = tensors[0].data.clone()
            for tensor in tensors:
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
        samples.append([tensor.detach().double().clone() for tensor in tensors])
        average.add()
    for mean, of in zip(average.means, zip(*samples, strict=True), strict=True):
        torch.testing.assert_close(mean.double(), torch.stack(of).mean(0), rtol=1e-6, atol=1e-6)
    means = [mean.clone() for mean in average.means]
    average.exchange()
    assert all(
        torch.equal(tensor, mean.to(dtype)) for tensor, mean in zip(tensors, means, strict=True)
    )
    average.exchange()
    assert all(
        torch.equal(tensor.double(), last)
        for tensor, last in zip(tensors, samples[-1], strict=True)
    )
    average.reset()
    average.add()
    assert all(
        torch.equal(mean, tensor.to(mean.dtype))
        for mean, tensor in zip(average.means, tensors, strict=True)
    )


def test_the_average_is_over_all_that_it_follows() -> None:
    torch.manual_seed(0)
    one, two = torch.randn(7), torch.randn(7)
    average = RunningMean([one])
    average.follow([two])
    average.add()
    one.add_(1)
    average.add()
    torch.testing.assert_close(average.means[0], (one - 1 + two + one + two) / 4)


@pytest.mark.parametrize("masters", ["fp32", "split"])
def test_a_line_follows_masters(masters: str) -> None:
    """At a tiny rate the parameters stand still."""
    parameter = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = hdet.FusedSGD([parameter], lr=1e-4, master_weights=masters)
    line = WeightLine([parameter], lambda: optimizer.masters([parameter], 0))
    line.begin()
    values = []
    for _ in range(4):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        line.mean.add()
        values.append(1 - 1e-4 * (len(values) + 1))
    assert torch.equal(parameter, torch.ones_like(parameter))
    with line.at((2000.0,)):  # far out on it, where bfloat16 shows the displacement
        torch.testing.assert_close(
            parameter.detach().float(),
            torch.full((8,), 1 + 2000 * (sum(values) / 4 - 1)),
            rtol=2**-8,
            atol=0,
        )


# -- the line ------------------------------------------------------------------------------------------------------------

RHOS = (1.0, 2.0, 0.5, 8.0, 1.0, 0.5)


def line_of(
    of: torch.dtype, step: float, **settings: Any
) -> tuple[list[torch.Tensor], WeightLine, list[torch.Tensor], list[torch.Tensor]]:
    """Tensors, their line after two samples, the origin and the mean by hand (in float64), on memory that is full of NaN."""
    torch.manual_seed(0)
    tensors = [torch.randn(5, 3).to(of), torch.randn(7).to(of)]
    line = WeightLine(tensors, **settings)
    for room in line.origin:
        room.fill_(math.nan)
    origin = [t.double().clone() for t in tensors]
    line.begin()
    seen = []
    for _ in range(2):
        for t in tensors:
            t.add_(step * torch.randn_like(t))
        line.mean.add()
        seen.append([t.double().clone() for t in tensors])
    for t in tensors:
        t.add_(step * torch.randn_like(t))
    return tensors, line, origin, [(a + b) / 2 for a, b in zip(*seen, strict=True)]


@pytest.mark.parametrize(
    ("dtype", "settings", "error"),
    [
        (torch.float32, {}, 1e-5),
        (torch.float64, {}, 1e-12),
        (torch.float32, {"place": "host"}, 1e-5),
        (torch.bfloat16, {}, 0.04),
    ],
)
def test_points_are_those_by_hand_in_any_order_and_weights_are_afterwards_what_they_were(
    dtype: torch.dtype, settings: dict[str, Any], error: float
) -> None:
    tensors, line, origin, mean = line_of(dtype, 1.0, **settings)
    before = [t.clone() for t in tensors]
    for _ in range(2):  # what has been scored may be scored again
        for i, rho in enumerate(RHOS):
            rhos = (rho, RHOS[-i - 1])  # each tensor at its own, as with several knobs
            with line.at(rhos):
                for t, a, m, r in zip(tensors, origin, mean, rhos, strict=True):
                    torch.testing.assert_close(
                        t.double(), a + r * (m - a), rtol=0, atol=error * max(1.0, r)
                    )
            assert all(map(torch.equal, tensors, before))
    assert all(torch.equal(kept.double(), a) for kept, a in zip(line.origin, origin, strict=True))


def test_an_error_inside_leaves_weights_and_origin_alone() -> None:
    tensors, line, origin, _ = line_of(torch.float32, 1.0)
    before = [t.clone() for t in tensors]
    with pytest.raises(ZeroDivisionError), line.at((2.0, 0.5)):
        raise ZeroDivisionError
    assert all(map(torch.equal, tensors, before))
    assert all(torch.equal(kept, a.float()) for kept, a in zip(line.origin, origin, strict=True))


def shared(rank: int, world: int) -> Any:
    torch.manual_seed(rank)
    tensors = [torch.randn(3, 4), torch.randn(0), torch.randn(5)]
    line = WeightLine(tensors)
    line.begin()
    for t in tensors:
        t.add_(torch.randn_like(t))
    line.mean.add()
    own = ends(line, tensors)
    line.share(hdet.Replicas.default())
    return own, ends(line, tensors)


def ends(line: WeightLine, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The origin, and the way from there to the mean."""
    at = []
    for rho in (1.0, 2.0):
        with line.at((rho,) * len(tensors)):
            at.append([t.clone() for t in tensors])
    return [
        *(2 * mean - beyond for mean, beyond in zip(*at, strict=True)),
        *(beyond - mean for mean, beyond in zip(*at, strict=True)),
    ]


def test_replicas_share_one_line() -> None:
    ranks = run_ranks(shared, 3)
    for i, first in enumerate(ranks[0][1]):
        mean = torch.stack([own[i].double() for own, _ in ranks]).mean(0)
        torch.testing.assert_close(first.double(), mean, rtol=1e-6, atol=1e-6)
        assert all(torch.equal(first, now[i]) for _, now in ranks)


def test_a_model_that_is_cast_before_the_first_sample_is_put_back_to_the_bit() -> None:
    """Half of the digits would be lost in an average that was made for what it was before."""
    layer = torch.nn.Linear(3, 2)
    average = RunningMean(list(layer.parameters()))
    layer.double()
    with torch.no_grad():
        layer.weight.fill_(0.1)
    average.add()
    for _ in range(2):
        average.exchange()
    assert layer.weight.unique().tolist() == [0.1]
