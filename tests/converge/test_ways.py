"""Every way of averaging, on tensors alone: right against float64, bitwise equal on all replicas,
and deaf to a replica of weight 0; what it sends; what it refuses."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import hdet
from hdet.converge import Averaging, Compressed, ExactLocal, Outer, Plain, Task
from hdet.replicas import Replicas

from ..distributed import run_ranks
from .helpers import KINDS, account, equal, exact, held, rounding_of, task, written

WAYS: list[Averaging] = [Plain(), Compressed("bf16"), Compressed("int8", 32)]


def random_case(seed: int, world: int) -> tuple[list[list[torch.Tensor]], list[str], list[float]]:
    """[replica][tensor] float64 values, the tensors' kinds, weights. The same on every rank."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    kinds = [draw.choice(KINDS) for _ in range(draw.randint(1, 6))]
    flat, square = [(0,), (), (1,), (7,), (1000,), (4097,)], [(3, 5), (64, 33)]
    shapes = [draw.choice(square if "transposed" in kind else flat + square) for kind in kinds]
    draws = lambda: [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    values = [draws() for _ in range(world)]
    weights = [draw.choice([0.0, 1.0, 1.0, 2.0]) for _ in range(world)]
    if draw.random() < 0.4 or not any(weights):
        weights = [1.0] * world
    return values, kinds, [w / sum(weights) for w in weights]


def average_cases(rank: int, world: int, seeds: Any, way: Averaging, method: str) -> Any:
    reports = []
    for seed in seeds:
        values, kinds, weights = random_case(seed, world)
        tensors, masters = held(values[rank], kinds)
        if weights[rank] == 0:
            for tensor in tensors:
                tensor.fill_(torch.nan if seed % 2 else torch.inf)
        bucket = random.Random(seed).choice([1024, 1 << 14, 1 << 20])
        made = way.build(task(tensors, masters, bucket_bytes=bucket))
        if method == "end_cycle":
            made.end_cycle(weights)
        else:
            made.complete(weights)
            assert made.idle
        for tensor, master in zip(tensors, masters, strict=True):
            if master is not None and master.dtype != torch.int16:
                assert torch.equal(tensor, master.bfloat16())
        reports.append((written(tensors, masters), exact(tensors, masters)))
    return reports


# The first average of Compressed is exact.
@pytest.mark.parametrize(("world", "way", "method"), [
    *((world, way, "end_cycle") for world in (2, 4) for way in WAYS),
    *((4, way, "complete") for way in WAYS[1:]),
], ids=repr)  # fmt: skip
def test_the_average_is_right_and_the_same_everywhere(world: int, way: Any, method: str) -> None:
    seeds = (0, 1, 3, 4, 5, 10)  # all kinds are among them
    ranks = run_ranks(average_cases, world, seeds, way, method)
    for case, seed in enumerate(seeds):
        values, kinds, weights = random_case(seed, world)
        inputs = [exact(*held(values[r], kinds)) for r in range(world)]
        for bits, got in (rank[case] for rank in ranks):
            assert equal(bits, ranks[0][case][0]), (seed, "replicas differ")
            for kind, value, *inputs_of in zip(kinds, got, *inputs, strict=True):
                expected = sum(w * x for w, x in zip(weights, inputs_of, strict=True))
                size = max(float(x.abs().max()) if x.numel() else 0.0 for x in inputs_of)
                allowed = rounding_of(kind) * max(size, 1e-3) * 2
                assert torch.allclose(value, expected, rtol=0, atol=allowed), (seed, kind)


# -- what is sent -------------------------------------------------------------------------------

P = 4 * 2048
RING = 2 * 3 / 4 * P
DIGESTS = 2 * 3 / 4 * 4 * 2 * 8
"""Two numbers of each of four replicas."""
Sent = list[tuple[str, float]]
"""Collectives and bytes of an average."""
WHOLE: Sent = [("all_reduce", RING)]
OUTER: Sent = [("all_reduce", DIGESTS), ("all_reduce", RING)]


def coded(size: float) -> Sent:
    return [(name, size) for name in ("all_to_all", "all_gather")]


SENT: list[tuple[Averaging, Sent, Sent]] = [
    (Plain(), WHOLE, WHOLE), (Compressed("bf16"), WHOLE, coded(RING / 4)),
    (Compressed("int8", 64), WHOLE, coded(RING / 8 * (1 + 4 / 64))), (Outer(), OUTER, OUTER),
    (ExactLocal(10), [("all_reduce", DIGESTS)], []),
]  # fmt: skip


def sent_in_two_cycles(rank: int, world: int, way: Averaging) -> Any:
    """By cycle; and what `complete` sends after them."""
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in (1536, 512)]
    optimizer = hdet.FusedSGD(parameters, lr=0.1)
    gradients = "local" if isinstance(way, Outer) else "shared"
    made = way.build(task(parameters, optimizer=optimizer, gradients=gradients))
    cycles: list[Sent] = []
    for act in (made.end_cycle, made.end_cycle, made.complete):
        made.on_cycle_start()
        with account() as sent:
            act([1 / world] * world)
        cycles.append(sent)
    return cycles


@pytest.mark.parametrize(("way", "first", "later"), SENT, ids=lambda x: repr(x)[:20])
def test_what_a_cycle_sends_and_in_which_order(way: Averaging, first: Sent, later: Sent) -> None:
    assert run_ranks(sent_in_two_cycles, 4, way) == [[first, later, WHOLE]] * 4


def given(count: int, **changes: Any) -> Task:
    return task([torch.zeros(4)], replicas=Replicas(0, count), **changes)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Compressed("fp8"), 'dtype must be "bf16" or "int8", got \'fp8\''),
    (lambda: Compressed("int8", 30), "block must be a multiple of 4 from 16 to 65536, got 30"),
    (lambda: ExactLocal(0), "check_every must be a whole number of cycles >= 1, got 0"),
    (lambda: Outer(rate=0.0), "rate must be"), (lambda: Outer(rate=float("nan")), "rate must be"),
    (lambda: Outer(momentum=1.0), "momentum must be"),
    (lambda: Outer().build(given(2)), "gradients='local'"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("way", [*WAYS, Outer()], ids=repr)
def test_ways_are_values_and_do_nothing_for_one_replica(way: Averaging) -> None:
    other = eval(repr(way))
    assert isinstance(way, Averaging) and way == other and hash(way) == hash(other)
    tensor = torch.tensor([0.1, torch.nan])
    made = way.build(task([tensor], replicas=Replicas.single(), gradients="local"))
    assert made.end_cycle([1.0]) == [] and made.idle and made.mean() is None
    made.complete([1.0])
    assert tensor[0] == torch.tensor(0.1) and tensor[1].isnan()
