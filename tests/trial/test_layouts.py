"""Trials of sharded replicas: decisions are those of one process, whatever a rank holds, and the
run does not feel them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hdet
from hdet.trial.rule import RateInterval
from tests.distributed import run_ranks
from tests.layouts.common import batch, loss_of, model

from .common import ALL, training

SHAPES = {"FSDP2": (2,), "HSDP": (2, 2)}


def trained(
    net: Any, replicas: hdet.Replicas | None, shards: list[int], searches: bool = True
) -> tuple[list[torch.Tensor], RateInterval]:
    """This rank's weights after each step from a trial's first one on, and what a shadow finds."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    with torch.no_grad():  # an evaluation before, which leaves the parameters of FSDP gathered
        loss_of(net, batch(0, shards[0]))
    auto = hdet.AutoLR(net, report_only=True)
    losses_at = lambda step: torch.stack([loss_of(net, batch(step, shard)) for shard in shards])
    settings = {"knobs": [hdet.LearningRate(0.0)], "replicas": replicas}
    search = auto if searches else None
    loop = training(net, losses_at, ALL + 3, optimizer=optimizer, search=search, **settings)
    shards_of = lambda: [getattr(p, "to_local", p.detach)() for p in net.parameters()]
    return [torch.cat([own.flatten().clone() for own in shards_of()]) for _ in loop], auto.interval


def on_a_mesh(rank: int, world: int, name: str) -> tuple[RateInterval, list[int]]:
    """What is found, and the steps in which the run is not the plain one."""
    found, shape = [], SHAPES[name]
    names = ("dp_replicate", "dp_shard")[-len(shape) :]
    for searches in (True, False):
        mesh, net = init_device_mesh("cpu", shape, mesh_dim_names=names), model()
        fully_shard(net[0], mesh=mesh)
        # its own parameters stay gathered after a forward pass without a backward
        fully_shard(net, mesh=mesh)
        replicas = None if len(shape) == 1 else hdet.Replicas.from_mesh(mesh)
        found.append(trained(net, replicas, [rank], searches))
    (ours, interval), (plain, _) = found
    pairs = enumerate(zip(ours, plain, strict=True))
    return interval, [step for step, pair in pairs if not torch.equal(*pair)]


@pytest.mark.parametrize("name", SHAPES)
def test_sharded_replicas_find_what_one_process_finds_and_leave_no_trace(name: str) -> None:
    world = math.prod(SHAPES[name])
    _, alone = trained(model(), hdet.Replicas.single(), [*range(world)])
    ranks = run_ranks(on_a_mesh, world, name)
    first, losses = ranks[0][0], [arm.loss for arm in alone.trial.arms]
    assert alone.moves and all(each == (first, []) for each in ranks)
    assert [arm.loss for arm in first.trial.arms] == pytest.approx(losses, rel=1e-9)
    assert first.low == pytest.approx(alone.low, rel=1e-6)
    # Of parts, each of which is one matrix: a median over other numbers than those of one process.
    moved = [found.trial.arms[1].displacement for found in (first, alone)]
    assert moved[0] == pytest.approx(moved[1], rel=0.5)
