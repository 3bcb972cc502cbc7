"""Every way of averaging, on tensors alone: right against float64, bitwise equal on all replicas,
and deaf to a replica of weight 0; what it sends; what it refuses."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import hdet
from hdet.converge import (
    Averaging,
    Compressed,
    ExactLocal,
    Hierarchical,
    Outer,
    Overlapped,
    Plain,
    Streaming,
    Task,
)  # fmt: skip
from hdet.replicas import Replicas

from ..distributed import run_ranks
from .helpers import KINDS, account, equal, exact, held, rounding_of, task, written

WAYS: list[Averaging] = [
    Plain(), Hierarchical(2), Compressed("bf16"), Compressed("int8", 32), Streaming(3),
    Overlapped(2),
]  # fmt: skip


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
            for position in (1, 2) if isinstance(way, Overlapped) else ():
                made.after_step(position)
        else:
            made.complete(weights)
            assert made.idle
        for tensor, master in zip(tensors, masters, strict=True):
            if master is not None and master.dtype != torch.int16:
                assert torch.equal(tensor, master.bfloat16())
        reports.append((written(tensors, masters), exact(tensors, masters)))
    return reports


# The first average of Compressed is exact, Streaming's after no step is of all fragments;
# Overlapped's leaves last bits different. Two replicas are one node.
@pytest.mark.parametrize(("world", "way", "method"), [
    *((4, way, "end_cycle") for way in WAYS), *((4, way, "complete") for way in WAYS[1:]),
    *((2, way, "end_cycle") for way in WAYS if not isinstance(way, Hierarchical)),
], ids=repr)  # fmt: skip
def test_the_average_is_right_and_the_same_everywhere(world: int, way: Any, method: str) -> None:
    seeds = (0, 1, 3, 4, 5, 10)  # all kinds are among them
    ranks = run_ranks(average_cases, world, seeds, way, method)
    for case, seed in enumerate(seeds):
        values, kinds, weights = random_case(seed, world)
        inputs = [exact(*held(values[r], kinds)) for r in range(world)]
        for bits, got in (rank[case] for rank in ranks):
            if not (isinstance(way, Overlapped) and method == "end_cycle"):
                assert equal(bits, ranks[0][case][0]), (seed, "replicas differ")
            for kind, value, *inputs_of in zip(kinds, got, *inputs, strict=True):
                expected = sum(w * x for w, x in zip(weights, inputs_of, strict=True))
                size = max(float(x.abs().max()) if x.numel() else 0.0 for x in inputs_of)
                allowed = rounding_of(kind) * max(size, 1e-3) * 2
                assert torch.allclose(value, expected, rtol=0, atol=allowed), (seed, kind)


# -- what is sent, and when ----------------------------------------------------------------------

P = 4 * 2048
RING = 2 * 3 / 4 * P
DIGESTS, HEALTH = 2 * 3 / 4 * 4 * 2 * 8, 2 * 3 / 4 * 4 * 8
"""Two numbers of each of four replicas, and one."""
Sent = dict[int, list[tuple[str, float]]]
"""Collectives and bytes after each step of a cycle of four."""
WHOLE: Sent = {4: [("all_reduce", RING)]}
NODES: Sent = {4: [(name, P / 2) for name in ("reduce_scatter", "all_reduce", "all_gather")]}
HALVES: Sent = {
    2: [("all_reduce", HEALTH), ("all_reduce", RING / 2)],
    4: [("all_reduce", RING / 2)],
}
OUTER: Sent = {4: [("all_reduce", DIGESTS), ("all_reduce", RING)]}


def coded(size: float) -> Sent:
    return {4: [(name, size) for name in ("all_to_all", "all_gather")]}


SENT: list[tuple[Averaging, Sent, Sent]] = [
    (Plain(), WHOLE, WHOLE), (Hierarchical(2), NODES, NODES),
    (Compressed("bf16"), WHOLE, coded(RING / 4)),
    (Compressed("int8", 64), WHOLE, coded(RING / 8 * (1 + 4 / 64))), (Streaming(2), HALVES, HALVES),
    (Overlapped(2), WHOLE, WHOLE), (Outer(), OUTER, OUTER),
    (ExactLocal(10), {4: [("all_reduce", DIGESTS)]}, {}),
]  # fmt: skip


def sent_in_two_cycles(rank: int, world: int, way: Averaging) -> Any:
    """By cycle; and what `complete` sends after them."""
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in (1536, 512)]
    optimizer = hdet.FusedSGD(parameters, lr=0.1)
    gradients = "local" if isinstance(way, Outer) else "shared"
    made = way.build(task(parameters, optimizer=optimizer, gradients=gradients))
    cycles: list[Sent] = []
    for _ in range(2):
        cycles.append({})
        made.on_cycle_start()
        for position in range(1, 5):
            with account() as sent:
                if position == 4:
                    made.end_cycle([1 / world] * world)
                elif made.acts_after(position):
                    made.after_step(position)
            if sent:
                cycles[-1][position] = sent
    with account() as sent:
        made.complete([1 / world] * world)
    return *cycles, {4: sent}


@pytest.mark.parametrize(("way", "first", "later"), SENT, ids=lambda x: repr(x)[:20])
def test_what_a_cycle_sends_and_in_which_order(way: Averaging, first: Sent, later: Sent) -> None:
    assert run_ranks(sent_in_two_cycles, 4, way) == [(first, later, WHOLE)] * 4


def streaming(rank: int, world: int, broken: bool) -> Any:
    tensors = [torch.full(shape, float(rank)) for shape in ((700,), (50, 10), (300,))]
    tensors[2] = tensors[2].double()
    made = Streaming(4).build(task(tensors, sync_interval=10))
    if broken and rank == 1:
        tensors[0][:5] = torch.nan
    travelled, notes = [], []
    for position in range(1, 11):
        with account() as sent:
            if position == 10:
                notes += made.end_cycle([1 / world] * world)
            elif made.acts_after(position):
                notes += made.after_step(position)
        travelled.append(sum(b for _, b in sent))
    return travelled, notes, [t.unique().tolist() for t in tensors]


@pytest.mark.parametrize("broken", [False, True])
def test_fragments_have_equal_bytes_and_their_turns(broken: bool) -> None:
    """A quarter of 7200 bytes each; the first is replica 0's alone, where the other is broken."""
    note = "replica 1 left out of the average of fragment 1 of 4: not finite"
    for travelled, notes, values in run_ranks(streaming, 2, broken):
        assert notes == [note] * broken and values == [
            [0.0, 0.5] if broken else [0.5],
            [0.5],
            [0.5],
        ]
        # is it finite? Not asked of the last, whose weights the Ensemble knows
        expected = [(1816 if p < 10 else 1800) if p in (3, 5, 8, 10) else 0 for p in range(1, 11)]
        assert travelled == pytest.approx(expected, abs=16)


def played(rank: int, world: int, way: Averaging, acts: list[Any]) -> Any:
    """A tensor of the rank's number, and what is done to it: calls, or numbers to add, by rank.
    Returns its values, all notes, and whether nothing is under way."""
    tensor, notes = torch.full((400,), float(rank)), []
    made = way.build(task([tensor], sync_interval=8))
    for name, *given in acts:
        if name == "add":
            tensor += given[rank]
        else:
            notes += getattr(made, name)(*given) or []
    return tensor.unique().tolist(), notes, made.idle


HALF, FIRST = ("end_cycle", [0.5, 0.5]), ("end_cycle", [1.0, 0.0])
LEFT_OUT = ["averaged at once: replica 1 is left out"]
BROKEN = ("add", 1.0, torch.nan)


@pytest.mark.parametrize(("way", "acts", "expected"), [
    # the delta rule: the mean of the cycle's end, 0.75, and what each replica has done since
    (Overlapped(2), [("end_cycle", [0.25, 0.75]), ("add", 1, 2), ("after_step", 2), ("add", 4, 8)],
        [([5.75], [], False), ([10.75], [], False)]),
    (Overlapped(2), [HALF, ("add", 1, 1), ("after_step", 2), BROKEN, FIRST],
        [([2.5], LEFT_OUT, True)] * 2),
    (Streaming(4), [HALF, BROKEN, FIRST], [([1.5], LEFT_OUT, True)] * 2),
    # a cycle cut short: what is under way is taken before the next average begins
    (Overlapped(3), [HALF, ("add", 1, 2), HALF, ("add", 0, 0)],
        [([1.5], [], False), ([2.5], [], False)]),
    (Overlapped(3), [HALF, ("add", 1, 2), HALF, ("complete", [0.5, 0.5])],
        [([2.0], [], True)] * 2),
    # fragment 1 has had its turn after step 2, and keeps what came later; the others have not
    (Streaming(4), [("after_step", 2), ("add", 1, 2), HALF],
        [([1.5, 2.0], [], False), ([2.0, 2.5], [], False)]),
])  # fmt: skip
def test_what_is_under_way_or_not_yet_sent_is_not_lost(way: Any, acts: Any, expected: Any) -> None:
    assert run_ranks(played, 2, way, acts) == expected


def given(count: int, **changes: Any) -> Task:
    return task([torch.zeros(4)], replicas=Replicas(0, count), **changes)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Hierarchical(1), "replicas_per_node must be a whole number >= 2, got 1.*Plain"),
    (lambda: Hierarchical(3).build(given(4)), "replicas_per_node=3 must divide the 4 replicas"),
    (lambda: Hierarchical(4).build(given(4)), "leave two nodes or more.*Plain"),
    (lambda: Compressed("fp8"), 'dtype must be "bf16" or "int8", got \'fp8\''),
    (lambda: Compressed("int8", 30), "block must be a multiple of 4 from 16 to 65536, got 30"),
    (lambda: ExactLocal(0), "check_every must be a whole number of cycles >= 1, got 0"),
    (lambda: Streaming(1), "fragments must be a whole number >= 2, got 1.*Plain"),
    (lambda: Streaming(5).build(given(2)), "fragments=5 is more than the cycle's 4 steps"),
    (lambda: Overlapped(0), "steps must be a whole number >= 1, got 0.*Plain"),
    (lambda: Overlapped(4).build(given(2)), "steps=4 must be less than the cycle's 4"),
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
    assert made.end_cycle([1.0]) == made.after_step(1) == [] and made.idle and made.mean() is None
    made.complete([1.0])
    assert tensor[0] == torch.tensor(0.1) and tensor[1].isnan()
