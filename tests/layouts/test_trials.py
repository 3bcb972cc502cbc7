"""Trials of sharded replicas: the arms are those of one process, whatever a rank holds of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hdet
from hdet.measure.trials import Trials
from tests.distributed import run_ranks
from tests.ensemble.test_trials import SCORES, STEPS, Tries
from tests.layouts.common import CLOSE, RATE, batch, flat, loss_of, model


def trained(net: Any, replicas: hdet.Replicas | None, shards: list[int]) -> tuple[list[float], torch.Tensor]:
    """Losses of the arms, and the weights of the last one, as which the run goes on."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    with torch.no_grad():
        loss_of(net, batch(0, shards[0]))  # an evaluation before, which leaves the parameters of FSDP gathered
    controller = Tries(Trials(net), end=hdet.Restore("arm 2"))
    ensemble = hdet.Ensemble(optimizer, None, total_steps=100, replicas=replicas, controller=controller)
    for step in range(STEPS + SCORES):

        def losses(step: int = step) -> torch.Tensor:
            return torch.stack([loss_of(net, batch(step, shard)) for shard in shards])

        losses().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(1.0, closure=losses)
    rows = controller.told[0]
    return [sum(column) / len(rows) for column in list(zip(*rows, strict=True))[1:]], flat(net.parameters())


def on_a_mesh(rank: int, world: int, shape: tuple[int, ...]) -> tuple[list[float], torch.Tensor]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])
    net = model()
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    return trained(net, None if len(shape) == 1 else hdet.Replicas.from_mesh(mesh), [rank])


@pytest.mark.parametrize("shape", [(2, 2), (4,)], ids=["two replicas", "one replica"])
def test_arms_of_sharded_replicas_are_those_of_one_process(shape: tuple[int, ...]) -> None:
    losses, weights = trained(model(), hdet.Replicas.single(), [0, 1, 2, 3])
    for found, own in run_ranks(on_a_mesh, 4, shape):
        assert found == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(own, weights, **CLOSE)


def beside(rank: int, world: int, controlled: bool) -> list[torch.Tensor]:
    """This rank's shards after each step of a run, with trials beside it."""
    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (world,)))  # its own parameters stay gathered after a forward pass without a backward
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    parameters = [p.detach().to_local() for p in optimizer.param_groups[0]["params"]]
    controller = Tries(Trials(net)) if controlled else None
    ensemble = hdet.Ensemble(optimizer, None, knobs=[hdet.LearningRate(0)], total_steps=100, controller=controller)
    found = []
    for step in range(STEPS + SCORES + 2):
        loss = loss_of(net, batch(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(loss.detach(), closure=lambda step=step: loss_of(net, batch(step, rank)))
        found.append(torch.cat([p.flatten() for p in parameters]))
    return found


def test_trials_beside_a_sharded_run_leave_no_trace() -> None:
    """Scoring an arm leaves its parameters gathered; the run's next forward pass took them for its own."""
    for plain, ours in zip(run_ranks(beside, 2, False), run_ranks(beside, 2, True), strict=True):
        assert [step for step, (a, b) in enumerate(zip(plain, ours, strict=True)) if not torch.equal(a, b)] == []
