"""How far weights have moved, and whether they were trained before: from samples, over several
ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

import pytest
import torch
from torch import nn

import hdet
from hdet.trial.displacement import PER_OCTAVE, Displacement, Moved
from tests.distributed import run_ranks

BIN = 2 ** (1 / PER_OCTAVE)


def read(displacement: Displacement) -> Moved:
    return displacement.over_ranks(hdet.Replicas.single(), displacement.ratios())[0]


def matrices(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def displaced(tensors: Sequence[torch.Tensor], move: Callable[[], object]) -> Moved:
    displacement = Displacement(lambda: tensors)
    move()
    return read(displacement)


@pytest.mark.parametrize(
    "shapes", [[(8, 8)] * 5, [(20, 7), (4, 3, 5, 5), (64, 64), (1, 9), (30, 2)]]
)
def test_it_is_the_median_over_matrices_within_a_bin(shapes: list[tuple[int, ...]]) -> None:
    tensors, by = matrices(*shapes), [0.01, 0.3, 0.05, 0.002, 1.5]
    first = [tensor.clone() for tensor in tensors]

    def move() -> None:
        for tensor, noise, size in zip(tensors, matrices(*shapes[::-1])[::-1], by, strict=True):
            tensor += size * noise

    found = displaced(tensors, move).median
    exact = median(
        float((now - then).norm() / then.norm()) for now, then in zip(tensors, first, strict=True)
    )
    assert found is not None and exact / BIN <= found <= exact * BIN


def test_a_matrix_that_is_larger_than_a_sample_is_measured_at_all_of_its_ends() -> None:
    [tensor] = matrices((300, 500))

    def move() -> None:
        tensor[150:] *= 1.1  # half of the rows by a tenth: by 0.1 / sqrt(2) of the whole

    assert displaced([tensor], move).median == pytest.approx(0.1 / math.sqrt(2), rel=0.1)


def test_matrices_that_are_0_at_first_and_what_is_no_matrix_do_not_count() -> None:
    tensors = [*matrices((8, 8), (8,), ()), torch.zeros(8, 8), torch.ones(8, 8, dtype=torch.int64)]

    def move() -> None:
        tensors[0].mul_(1.125)
        for tensor in tensors[1:]:
            tensor.add_(100)

    assert displaced(tensors, move).median == pytest.approx(0.125, rel=BIN - 1)
    assert displaced([*matrices((8,)), torch.zeros(8, 8)], lambda: None).median is None


@pytest.mark.parametrize(("broken", "finite"), [(1, True), (2, False)])
def test_it_is_infinite_where_half_of_the_matrices_are_not_finite(
    broken: int, finite: bool
) -> None:
    tensors = matrices((8, 8), (8, 8), (8, 8))

    def move() -> None:
        tensors[2].mul_(2)
        for tensor in tensors[:broken]:
            tensor[0, 0] = math.nan

    found = displaced(tensors, move).median
    assert found is not None and math.isfinite(found) == finite


def of_ranks(rank: int, world: int) -> Moved:
    """Ranks that have two matrices and three, as pipeline stages have; or one that has all."""
    tensors = matrices(*[(8, 8)] * 5)[
        slice(None) if world == 1 else slice(0, 2) if rank else slice(2, 5)
    ]
    displacement = Displacement(lambda: tensors)
    for number, tensor in enumerate(tensors, 0 if rank or world == 1 else 2):
        tensor *= 1 + 0.01 * 2**number
    replicas = hdet.Replicas.default() if world > 1 else hdet.Replicas.single()
    return displacement.over_ranks(replicas, displacement.ratios())[0]


def test_ranks_that_hold_parts_measure_what_one_measures_that_holds_all() -> None:
    assert run_ranks(of_ranks, 2) == [of_ranks(0, 1)] * 2


MODELS = {
    "linear": lambda: nn.Linear(40, 30),
    "conv": lambda: nn.Conv2d(16, 32, 3),
    "lstm": lambda: nn.LSTM(20, 30),
    "embedding": lambda: nn.Embedding(200, 32),
    "transformer": lambda: nn.TransformerEncoderLayer(32, 4, 64),
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_trained_if_their_rows_differ_more_than_chance_would_have_it(
    name: str, trained: bool
) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        tensors = [p.detach() for p in MODELS[name]().parameters()]
        for matrix in [tensor for tensor in tensors if trained and tensor.dim() > 1]:
            matrix.mul_(torch.linspace(0.3, 2.0, len(matrix)).view(-1, *[1] * (matrix.dim() - 1)))
        assert displaced(tensors, lambda: None).pretrained == trained
