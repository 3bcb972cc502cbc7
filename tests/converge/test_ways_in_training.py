"""The ways of averaging under an Ensemble: how a run ends, loads, and averages shards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hdet
from hdet.converge import Averaging, Compressed, ExactLocal, Plain
from hdet.replicas import Replicas
from hdet.tensors.dtensor import part_of
from tests.harness import Run, batch, loss_of, model

from ..distributed import run_ranks
from .helpers import task

WAYS: dict[str, Averaging] = {
    "plain": Plain(), "bf16": Compressed("bf16"), "int8": Compressed("int8", 16),
    "exact local": ExactLocal(check_every=3),
}  # fmt: skip


def run_of(rank: int, way: Averaging) -> Run:
    return Run(rank, optimizer=hdet.FusedAdamW, lr=5e-2, total=45, every=5, converge=way)


def trained(rank: int, world: int) -> dict[str, Any]:
    report = {}
    for name, way in WAYS.items():
        run = run_of(rank, way).steps(45)
        before, converged = run.weights(), run.ensemble.in_sync
        run.ensemble.converge()
        loss = sum(loss_of(run.net, batch(5000 + i)).item() for i in range(8)) / 8
        known = run.ensemble.mean() is not None
        report[name] = (run.weights(), before, converged, run.ensemble.in_sync, loss, known)
    return report


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return run_ranks(trained, 2)


@pytest.mark.parametrize("name", WAYS)
def test_a_run_ends_where_the_plain_one_does(runs: list[dict[str, Any]], name: str) -> None:
    weights, before, converged, after, loss, known = runs[0][name]
    assert torch.equal(weights, runs[1][name][0]) and after and known
    assert converged == (name in ("plain", "exact local"))
    assert torch.equal(before, weights)
    plain, _, _, _, reference, _ = runs[0]["plain"]
    # Of a loss that training takes from 7 to below 1. In weights: plain's last bits through 45
    # steps of Adam; the rounding of bf16 and int8.
    allowed = {"plain": 0.0, "exact local": 2e-6, "bf16": 2e-3, "int8": 5e-3}[name]
    assert reference < 1.0
    assert abs(loss - reference) <= allowed * reference
    assert float((weights - plain).norm() / plain.norm()) <= allowed


def loaded_into_a_live_run(rank: int, world: int, name: str) -> Any:
    run = run_of(rank, WAYS[name]).steps(14)
    run.ensemble.converge()
    saved, found = run.saved(), []
    for more in (12, 10, 10):  # to the first step of a cycle, or the last but one
        found.append(run.steps(more).weights())
        run.loaded(copy.deepcopy(saved))
    return found + [run.steps(12).weights()]


@pytest.mark.parametrize("name", ["int8", "exact local"])
def test_a_state_may_be_loaded_while_something_is_kept_or_under_way(name: str) -> None:
    for found in run_ranks(loaded_into_a_live_run, 2, name):
        assert torch.equal(found[0], found[3]) and torch.equal(found[1], found[2])


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


@pytest.mark.parametrize("way", [Plain(), Compressed("bf16"), Compressed("int8", 16)], ids=repr)
def test_shards_are_averaged_over_the_replicas(way: Averaging) -> None:
    ranks = run_ranks(sharded, 4, way)
    expected = [p.detach() for p in model().parameters()]
    for cycle, got in enumerate(ranks[0]):
        assert all(torch.equal(rank[cycle], got) for rank in ranks)
        expected = [p + 0.01 * 1.75 * noise(cycle, i, p.shape) for i, p in enumerate(expected)]
        off = float((got - torch.cat([p.flatten() for p in expected])).abs().max())
        # int8: two roundings of displacements below 0.1; the rest is fp32's.
        exact = not isinstance(way, Compressed) or cycle == 0
        assert off <= (1e-6 if exact else 0.1 / 127 if way.dtype == "int8" else 0.1 / 256)
