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
from hdet.trial.displacement import PER_OCTAVE, Displacement, medians
from tests.distributed import run_ranks

BIN = 2 ** (1 / PER_OCTAVE)


def matrices(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def of(tensors: Sequence[torch.Tensor]) -> Displacement:
    return Displacement(lambda: {str(number): tensor for number, tensor in enumerate(tensors)})


def moved(tensors: Sequence[torch.Tensor], move: Callable[[], object]) -> float | None:
    displacement = of(tensors)
    move()
    [found] = medians(hdet.Replicas.single(), displacement.ratios())
    return found


@pytest.mark.parametrize(
    "shapes", [[(8, 8)] * 5, [(20, 7), (4, 3, 5, 5), (64, 64), (1, 9), (30, 2)]]
)
def test_it_is_the_median_over_matrices_within_a_bin(shapes: list[tuple[int, ...]]) -> None:
    tensors, by = matrices(*shapes), [0.01, 0.3, 0.05, 0.002, 1.5]
    first = [tensor.clone() for tensor in tensors]

    def move() -> None:
        for tensor, noise, size in zip(tensors, matrices(*shapes[::-1])[::-1], by, strict=True):
            tensor += size * noise

    found, pairs = moved(tensors, move), zip(tensors, first, strict=True)
    exact = median(float((now - then).norm() / then.norm()) for now, then in pairs)
    assert found is not None and exact / BIN <= found <= exact * BIN


def test_a_matrix_that_is_larger_than_a_sample_is_measured_at_all_of_its_ends() -> None:
    [tensor] = matrices((300, 500))
    # half of the rows by a tenth: by 0.1 / sqrt(2) of the whole
    found = moved([tensor], lambda: tensor[150:].mul_(1.1))
    assert found == pytest.approx(0.1 / math.sqrt(2), rel=0.1)


class Opaque(torch.Tensor):
    """As a tensor subclass of codes and scales."""

    def flatten(self, *_: int) -> torch.Tensor:
        raise NotImplementedError


def test_what_is_0_at_first_and_vectors_beside_matrices_do_not_count() -> None:
    tensors = [*matrices((8, 8), (8,), ()), torch.zeros(8, 8), torch.ones(8, 8, dtype=torch.int64)]
    tensors.append(torch.ones(8, 8).as_subclass(Opaque))

    def move() -> None:
        tensors[0].mul_(1.125)
        for tensor in tensors[1:]:
            tensor.add_(100)

    assert moved(tensors, move) == pytest.approx(0.125, rel=BIN - 1)
    assert moved([torch.zeros(8), torch.zeros(8, 8)], lambda: None) is None
    vectors = [*matrices((9000,)), torch.zeros(8, 8)]
    assert moved(vectors, lambda: vectors[0].mul_(1.125)) == pytest.approx(0.125, rel=BIN - 1)


@pytest.mark.parametrize(("broken", "finite"), [(1, True), (2, False)])
def test_it_is_infinite_where_half_of_the_matrices_are_not_finite(
    broken: int, finite: bool
) -> None:
    tensors = matrices((8, 8), (8, 8), (8, 8))
    by = [math.nan] * broken + [2.0] * (3 - broken)
    found = moved(tensors, lambda: [t.mul_(x) for t, x in zip(tensors, by, strict=True)])
    assert found is not None and math.isfinite(found) == finite


def of_ranks(rank: int, world: int) -> tuple[list[float | None], bool]:
    """Ranks that have two matrices and three, as pipeline stages have; or one that has all."""
    own = range(5) if world == 1 else range(2) if rank else range(2, 5)
    every = matrices(*[(8, 8)] * 5)
    displacement = of([every[number] for number in own])
    for number in own:
        every[number] *= 1 + 0.01 * 2**number
    replicas = hdet.Replicas.default() if world > 1 else hdet.Replicas.single()
    found = medians(replicas, displacement.ratios(), {})
    return found, displacement.is_pretrained(replicas)


def test_ranks_that_hold_parts_measure_what_one_measures_that_holds_all() -> None:
    alone = of_ranks(0, 1)
    assert run_ranks(of_ranks, 2) == [alone] * 2 and alone[0][1] is None


MODELS = {
    "linear": lambda: nn.Linear(40, 30),
    "conv": lambda: nn.Conv2d(16, 32, 3),
    "embedding": lambda: nn.Embedding(200, 32),
    "transformer": lambda: nn.TransformerEncoderLayer(32, 4, 64),
    "state space": lambda: made(STATES.repeat(64, 1), torch.randn(96, 64), torch.randn(64, 8)),
    "zero halves": lambda: made(torch.cat([torch.zeros(32, 40), torch.randn(32, 40)])),
    "one legendre": lambda: made(torch.outer(STATES, STATES).tril(), *torch.randn(5, 40, 30)),
}
STATES = torch.arange(1.0, 33.0).log()


def made(*tensors: torch.Tensor) -> nn.ParameterList:
    return nn.ParameterList(tensors)


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
        assert of(tensors).is_pretrained(hdet.Replicas.single()) == trained
