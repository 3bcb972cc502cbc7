"""Compressed averages: rounded, equal to the bit on all, and nothing is lost in the long run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hdet.converge.compressed import BFloat16, Compressed, Int8

from ..distributed import run_ranks
from .helpers import KINDS, equal, exact, held, rounding_of, task, written

CODINGS = [Compressed("bf16"), Compressed("int8", 64)]


SHAPES = [(300,), (40, 7), (5000,), (), (33, 31), (2049,), (30, 20), (70, 30), (21, 50)]


def drawn(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def averages(rank: int, world: int, way: Compressed, weights: list[float], bucket: int) -> Any:
    """Three averages; of the last two, whose displacements are known, what was asked and came."""
    tensors, masters = held([drawn(i, shape) for i, shape in enumerate(SHAPES)], KINDS)
    made = way.build(task(tensors, masters, bucket_bytes=bucket))
    made.end_cycle([1 / world] * world)  # sets the reference
    assert made.idle
    report = []
    for step in (1, 2):
        for i, value in enumerate(exact(tensors, masters)):
            own = value + 0.01 * drawn(100 * step + rank, SHAPES[i])
            if weights[rank] == 0:
                own.fill_(torch.nan if step == 1 else torch.inf)
            (new,), (kept,) = held([own], [KINDS[i]])
            tensors[i].copy_(new)
            if kept is not None:
                masters[i].copy_(kept)
        before = exact(tensors, masters)
        made.end_cycle(weights)
        assert not made.idle
        report.append((before, exact(tensors, masters), written(tensors, masters)))
    return report


@pytest.mark.parametrize("way", CODINGS, ids=repr)
@pytest.mark.parametrize(
    ("weights", "bucket"),
    [([0.5, 0.5], 1 << 13), ([0.25] * 4, 1 << 20), ([0.5, 0.0, 0.25, 0.25], 1 << 15)],
    ids=str,
)
def test_an_average_is_within_its_rounding_and_the_same_everywhere(way, weights, bucket) -> None:
    ranks = run_ranks(averages, len(weights), way, weights, bucket)
    half_step = 2.0**-9 if way.dtype == "bf16" else 0.5 / 127
    for step, (_, after, bits) in enumerate(ranks[0]):
        assert all(equal(rank[step][2], bits) for rank in ranks)
        for kind, got, *before in zip(KINDS, after, *(r[step][0] for r in ranks), strict=True):
            expected = sum(w * b for w, b in zip(weights, before, strict=True) if w)
            # Each displacement, below 0.05 with what was kept back, is rounded once, and their sum
            # once more; the second average gives back what the first has kept: as much again.
            allowed = 2 * 2 * half_step * 0.05 + 2 * rounding_of(kind) * float(expected.abs().max())
            assert float((got - expected).abs().max()) <= allowed, (step, kind)


def long_run(rank: int, world: int) -> Any:
    """Beside a large displacement, which swings, a constant one far below its rounding."""
    tensor = torch.zeros(64)
    made = Compressed("int8", 64).build(task([tensor]))
    made.end_cycle([1 / world] * world)
    for step in range(200):
        tensor[0] += 1.0 if step % 2 == 0 else -1.0
        tensor[1:] += 1e-4 * (1 + rank)
        made.end_cycle([1 / world] * world)
    return tensor[1:].mean().item()


def test_what_rounding_takes_away_arrives_later() -> None:
    """1e-4 beside 1 is below int8's half step, 0.5 / 127: alone it would never arrive."""
    for arrived in run_ranks(long_run, 2):
        # all of it but the two errors that are kept back, each of half a step or less
        assert abs(arrived - 200 * 1.5e-4) <= 2 / 127


def forgets(rank: int, world: int, left_out: bool) -> Any:
    """Replica 1 moves by 1e-3 beside 1, which its error keeps back; what of it arrives later."""
    tensor = torch.zeros(64)
    made = Compressed("int8", 64).build(task([tensor]))
    made.end_cycle([0.5, 0.5])
    tensor[0], tensor[1:] = 1.0, 1e-3 * rank
    made.end_cycle([0.5, 0.5])
    found = [tensor.clone()]
    if left_out:
        if rank == 1:
            tensor.fill_(torch.nan)
        made.end_cycle([1.0, 0.0])
    for _ in range(3):
        made.end_cycle([0.5, 0.5])
    return [*found, tensor]


@pytest.mark.parametrize("left_out", [False, True])
def test_a_replica_of_weight_zero_forgets_its_error(left_out: bool) -> None:
    for at_once, later in run_ranks(forgets, 2, left_out):
        assert at_once.tolist() == [1.0] + [0.0] * 63
        assert later.tolist() == pytest.approx([1.0] + [0.0 if left_out else 5e-4] * 63, rel=1e-2)


@pytest.mark.parametrize("codec", [BFloat16(), Int8(16)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_codec_rounds_to_nearest(codec: Any, dtype: Any) -> None:
    generator, exponents = torch.Generator().manual_seed(0), torch.logspace(-30, 30, 3, dtype=dtype)
    rows = torch.randn(3, 64, generator=generator, dtype=dtype) * exponents.unsqueeze(1)
    rows[0, :16] = 0.0
    rows[0, 16:32] = 1e-44  # its scale would be 0 in fp32
    decoded = codec.decode(codec.encode(rows), torch.empty_like(rows))
    if isinstance(codec, BFloat16):
        bound = rows.abs() * 2.0**-8
    else:
        bound = rows.view(3, -1, 16).abs().amax(-1).repeat_interleave(16, 1) / 253.9
    assert bool(((decoded - rows).abs() <= bound.clamp(min=2e-44)).all())
