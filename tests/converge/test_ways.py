"""Every way of averaging, on tensors: right against float64, bitwise equal on
all replicas, and deaf to a replica of weight 0; what it sends. (Runs: test_contract.py.)"""

from __future__ import annotations

import random
import re
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hdet
from benchmarks.harness import counted
from hdet.converge import Averaging, Compressed, ExactLocal, Outer, Plain
from hdet.replicas import Replicas
from hdet.replicas.topology import WIDTH
from hdet.tensors.dtensor import part_of
from tests.harness import model

from ..distributed import run_ranks
from .helpers import KINDS, equal, exact, held, rounding_of, task, written

Sent = list[tuple[str, float]]
"""Collectives and bytes of an average."""


PLAIN = Outer(1.0, 0.0)
"""Its equation is that of a plain average."""


class WayInfo(NamedTuple):
    """What is expected of a way."""

    way: Averaging
    first: Sent
    """What the first average sends of `P` bytes on each of four ranks."""
    later: Sent
    half_step: float = 0.0
    """Of a rounded displacement, as a part of the largest one; the first average is exact."""
    keeps_back: bool = False
    """Does it keep something back for the next average?"""
    averages_any: bool = True
    """Any tensors, of shared gradients, without an optimizer of its own?"""
    step: Outer = PLAIN
    """By the mean displacement: of a plain average, by all of it."""


P = 4 * 2048
RING = 2 * 3 / 4 * P
DIGESTS = ("all_reduce", 2 * 3 / 4 * 4 * WIDTH * 8)
"""A row of each of four replicas."""
WHOLE: Sent = [("all_reduce", RING)]


def coded(size: float) -> Sent:
    return [(name, size) for name in ("all_to_all", "all_gather")]


WAYS = {
    "plain": WayInfo(Plain(), WHOLE, WHOLE),
    "bf16": WayInfo(Compressed("bf16"), WHOLE, coded(RING / 4), 2.0**-9, True),
    "int8": WayInfo(Compressed("int8", 16), WHOLE, coded(RING / 8 * (1 + 4 / 16)), 0.5 / 127, True),
    "exact local": WayInfo(ExactLocal(3), [DIGESTS], [], averages_any=False),
    **{
        name: WayInfo(way, [DIGESTS, *WHOLE], [DIGESTS, *WHOLE], averages_any=False, step=way)
        for name, way in (
            ("outer", Outer()),
            ("heavy ball", Outer(0.5, 0.8, nesterov=False)),
            ("no momentum", Outer(0.7, 0.0)),
        )
    },
}
OF_ANY = [name for name, info in WAYS.items() if info.averages_any]
STEPS = [name for name, info in WAYS.items() if info.step is not PLAIN]


# -- what comes of it ----------------------------------------------------------------------------


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


def turned(weights: list[float], turn: int) -> list[float]:
    """Each average leaves out another replica."""
    return weights[turn:] + weights[:turn]


def average_cases(rank: int, world: int, seeds: Any, name: str, method: str) -> Any:
    """[case][average]: what was asked, what came, and all bits."""
    reports = []
    for seed in seeds:
        values, kinds, first_weights = random_case(seed, world)
        tensors, masters = held(values[rank], kinds)
        bucket = random.Random(seed).choice([1024, 1 << 14, 1 << 20])
        given: dict[str, Any] = {"bucket_bytes": bucket}
        if name in STEPS:  # all but the last, which stands for a buffer
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
            optimizer.param_groups[0]["params"][:] = tensors[:-1] or tensors
            given |= {"optimizer": optimizer, "gradients": "local"}
        made = WAYS[name].way.build(task(tensors, masters, **given))
        reports.append([])
        for turn in range(4):
            weights = turned(first_weights, turn)
            made.on_cycle_start()
            generator = torch.Generator().manual_seed(1000 * turn + rank)
            for i, value in enumerate(exact(tensors, masters) if turn else []):
                move = torch.randn(value.shape, generator=generator, dtype=torch.float64)
                (new,), (kept,) = held([value + 0.01 * move], [kinds[i]])
                tensors[i].copy_(new)
                if kept is not None:
                    masters[i].copy_(kept)
            before = exact(tensors, masters)
            if weights[rank] == 0:
                for tensor in tensors:
                    tensor.fill_(torch.nan if (seed + turn) % 2 else torch.inf)
            getattr(made, method)(weights)
            assert made.idle == (not WAYS[name].keeps_back or turn == 0 or method == "complete")
            for tensor, master in zip(tensors, masters, strict=True):
                if master is not None and master.dtype != torch.int16:
                    assert torch.equal(tensor, master.bfloat16())
            reports[-1].append((before, exact(tensors, masters), written(tensors, masters)))
    return reports


@pytest.mark.parametrize(("world", "name", "method"), [
    *((world, name, "end_cycle") for world in (2, 4) for name in OF_ANY),
    *((4, name, "complete") for name in OF_ANY[1:]),
    *((world, name, "end_cycle") for world in (1, 2) for name in STEPS),
])  # fmt: skip
def test_the_average_is_right_and_the_same_everywhere(world: int, name: str, method: str) -> None:
    seeds = (0, 1, 3, 4, 5, 10)  # all kinds are among them
    ranks = run_ranks(average_cases, world, seeds, name, method)
    # A displacement, below 0.05 with what was kept back, is rounded once, and their sum once more;
    # the next average gives back what this one has kept: as much again.
    rounded = 4 * 0.05 * WAYS[name].half_step if method == "end_cycle" else 0.0
    step = WAYS[name].step
    for case, seed in enumerate(seeds):
        values, kinds, first_weights = random_case(seed, world)
        begin, momenta = values[0], [torch.zeros_like(value) for value in values[0]]
        for turn in range(4):
            weights = turned(first_weights, turn)
            before, after, bits = zip(*(rank[case][turn] for rank in ranks), strict=True)
            assert all(equal(own, bits[0]) for own in bits), (seed, turn, "replicas differ")
            for i, (kind, value, *inputs) in enumerate(zip(kinds, after[0], *before, strict=True)):
                expected = sum(w * x for w, x in zip(weights, inputs, strict=True))
                is_stepped = step is not PLAIN and turn and i < max(1, len(kinds) - 1)
                if is_stepped:  # replicas have begun alike; DiLoCo's equation
                    d = begin[i] - expected
                    momenta[i] = step.momentum * momenta[i] + d
                    d = d + step.momentum * momenta[i] if step.nesterov else momenta[i]
                    expected = begin[i] - step.rate * d
                size = max(float(x.abs().max()) if x.numel() else 0.0 for x in inputs)
                allowed = rounding_of(kind) * max(size, 1e-3) * (8 if is_stepped else 2)
                allowed += rounded if turn else 0.0
                off = (value - expected).abs()
                assert bool((off <= allowed).all()), (seed, turn, kind)
            begin = after[0]  # each is written as its format has it; the next cycle begins there


def noise(cycle: int, i: int, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * cycle + i))


def sharded(rank: int, world: int, way: Averaging) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    net: Any = fully_shard(model(), mesh=mesh)
    replicas = Replicas.from_mesh(mesh, replicate="dp_replicate")
    made = way.build(task(list(net.parameters()), replicas=replicas))
    found = []
    for cycle in range(2):
        with torch.no_grad():
            for i, p in enumerate(net.parameters()):
                own = part_of(noise(cycle, i, p.shape), p)
                p.to_local().add_(0.01 * (1 + replicas.index) * own)
        made.end_cycle([0.25, 0.75])
        if cycle == 0:
            made.complete([0.5, 0.5])
            made.end_cycle([0.5, 0.5])
        found.append(torch.cat([p.full_tensor().flatten() for p in net.parameters()]).detach())
    return found


@pytest.mark.parametrize("name", OF_ANY)
def test_shards_are_averaged_over_the_replicas(name: str) -> None:
    ranks = run_ranks(sharded, 4, WAYS[name].way)
    expected = [p.detach() for p in model().parameters()]
    for cycle, got in enumerate(ranks[0]):
        assert all(torch.equal(rank[cycle], got) for rank in ranks)
        expected = [p + 0.01 * 1.75 * noise(cycle, i, p.shape) for i, p in enumerate(expected)]
        off = float((got - torch.cat([p.flatten() for p in expected])).abs().max())
        # two roundings of displacements below 0.1; the rest is fp32's
        assert off <= (2 * 0.1 * WAYS[name].half_step * cycle or 1e-6)


# -- what is sent --------------------------------------------------------------------------------


def sent_in_two_cycles(rank: int, world: int, name: str) -> Any:
    """By cycle; and what `complete` sends after them."""
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in (1536, 512)]
    optimizer = hdet.FusedSGD(parameters, lr=0.1)
    gradients = "local" if name in STEPS else "shared"
    made = WAYS[name].way.build(task(parameters, optimizer=optimizer, gradients=gradients))
    cycles: list[Sent] = []
    for act in (made.end_cycle, made.end_cycle, made.complete):
        made.on_cycle_start()
        with counted() as calls:
            act([1 / world] * world)
        # torch 2.13 has other names for two of them
        names = (re.sub("_single|_into_tensor", "", call.name) for call in calls)
        cycles.append(list(zip(names, (call.sent for call in calls), strict=True)))
    return cycles


@pytest.mark.parametrize("name", WAYS)
def test_what_a_cycle_sends_and_in_which_order(name: str) -> None:
    expected = [WAYS[name].first, WAYS[name].later, WHOLE]
    assert run_ranks(sent_in_two_cycles, 4, name) == [expected] * 4
