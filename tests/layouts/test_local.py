"""Local gradients: each replica trains alone between averages; its moments are a choice."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import hdet
from benchmarks.harness import counted
from hdet.replicas.topology import WIDTH
from tests.distributed import run_ranks
from tests.layouts.common import (
    INTERVAL,
    Trace,
    adamw,
    batch,
    check,
    ensemble_of,
    flat,
    loss_of,
    model,
    train,
)  # fmt: skip

CYCLES = 3
STEPS = CYCLES * INTERVAL
POLICIES = ["keep", "average", "reset"]


def counting(sent: list[int]) -> Any:
    """DDP's own hook, and the bytes that it sends."""

    # DDP wants annotations that are types, not their names, or none
    def hook(group, bucket):  # type: ignore[no-untyped-def]
        sent.append(bucket.buffer().nbytes)
        return default_hooks.allreduce_hook(group, bucket)

    return hook


def local(rank: int, world: int, policy: str, sharded: bool) -> tuple[Trace, list[float]]:
    """And the bytes of the sums in each cycle, from its first `Ensemble.step` on."""
    net, replicas, by_ddp = model(), None, []
    wrapped: Any
    if sharded:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        wrapped = fully_shard(net, mesh=mesh["dp_shard"])
        replicas = hdet.Replicas.from_mesh(mesh, replicate="dp_replicate")
    else:
        wrapped = DDP(net)
        wrapped.register_comm_hook(dist.group.WORLD, counting(by_ddp))

    def backward(step: int, observe: Any) -> None:
        with nullcontext() if sharded else wrapped.no_sync():
            loss = loss_of(wrapped, batch(step, rank))
            loss.backward()
        observe(loss)

    settings = {"replicas": replicas, "gradients": "local", "moments": policy}
    begins, parameters = [], list(net.parameters())
    between = lambda step: begins.append(len(sent))
    with counted() as sent:
        trace = train(parameters, adamw(parameters), backward, STEPS, between, **settings)
    assert not by_ddp
    sizes = [call.sent if call.name == "all_reduce" else 0 for call in sent]
    cycles = itertools.pairwise([*begins[::INTERVAL], len(sent)])
    return trace, [sum(sizes[first:last]) for first, last in cycles]


def shared(rank: int, world: int) -> int:
    """Bytes of DDP's gradients in a cycle."""
    ddp, sent = DDP(model()), []
    ddp.register_comm_hook(dist.group.WORLD, counting(sent))
    for i in range(INTERVAL):
        loss_of(ddp, batch(i, rank)).backward()
    return sum(sent)


def train_all(rank: int, world: int) -> dict[str, Any]:
    found = {policy: local(rank, world, policy, False) for policy in POLICIES}
    return {**found, "ddp": shared(rank, world)}


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return run_ranks(train_all, 2)


@pytest.fixture(scope="module")
def shards() -> list[tuple[Trace, list[float]]]:
    return run_ranks(local, 4, "keep", True)


@pytest.mark.parametrize("policy", POLICIES)
def test_replicas_train_alone_and_equal_the_training_by_hand(runs: Any, policy: str) -> None:
    """Moments are kept, averaged or reset: else the next cycle would go elsewhere."""
    traces = [run[policy][0] for run in runs]
    check(traces, local=True, policy=policy)
    assert not torch.equal(traces[0].steps[0][0], traces[1].steps[0][0]), "gradients of its own"


def test_one_dimensional_fsdp_in_each_replica(shards: list[tuple[Trace, list[float]]]) -> None:
    check([trace for trace, _ in shards], shards=2, local=True)


def test_a_cycle_sends_what_ddp_sends_in_one_step(runs: Any, shards: Any) -> None:
    """1/T of DDP's bytes, three times as much where moments are averaged; and a row of stats a
    replica. In the first cycle three such rows more: of what is to be alike, and of the kind of
    gradients."""
    gradients, stats = runs[0]["ddp"], 2 * WIDTH * 8
    for policy in POLICIES:
        expected = gradients // INTERVAL * (3 if policy == "average" else 1) + stats
        assert runs[0][policy][1] == [expected + 3 * stats] + [expected] * (CYCLES - 1), policy
    # A rank with half of the parameters sends half of that: 4 rows of 8, half of each vector; the
    # single row and number stay on one rank.
    volumes = [sent[-1] - 2 * 3 / 4 * 2 * WIDTH * 8 for _, sent in shards]
    assert sum(volumes[:2]) == sum(volumes[2:]) == gradients // INTERVAL


def skipping(rank: int, world: int, steps: int) -> Any:
    """A GradScaler steps no optimizer where it finds an infinite gradient: in one replica's second
    step, and in its whole third cycle."""
    net = model()
    optimizer = adamw(net.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, steps, cycle_momentum=False)
    ensemble = ensemble_of(
        optimizer, scheduler=scheduler, gradients="local", moments="keep",
        divergence=hdet.Divergence(rollback="device"),
        controller=hdet.SoftmaxController(decay=None),
    )  # fmt: skip
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    cycles, weights = [], []
    for i in range(steps):
        optimizer.zero_grad()
        loss = loss_of(net, batch(i, rank))
        scaler.scale(loss * (torch.inf if rank == 1 and i in (1, 6, 7, 8) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        ensemble.step(1e9 if i in (6, 7, 8) else loss)
        cycles.append(ensemble.cycle)
        weights.append(flat(net.parameters()))
    known = ensemble.engine.rollbacks, ensemble.corrections, ensemble.history[-1]["scheduled"]
    return cycles, known, weights


def test_a_step_that_one_replica_leaves_out_counts_for_all() -> None:
    """Else cycles would end at different steps, the schedule's values differ, and the last hang."""
    (cycles, known, ours), (*others, theirs) = run_ranks(skipping, 2, 4 * INTERVAL + 1)
    assert [cycles, known] == others and cycles[-1] == 5 and known[0] == 1
    for last in (2, 5, 8, 11, 12):
        assert torch.equal(ours[last], theirs[last])
    # taken back, also where no step was done that could have begun the cycle
    assert torch.equal(ours[8], ours[5])


def skipping_the_last(rank: int, world: int, steps: int) -> Any:
    """A schedule that a framework steps before `Ensemble.step`, and that ends at 0. The second rank
    skips the first step of its second cycle, and the last of all."""
    net = model()
    optimizer = adamw(net.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    ensemble = ensemble_of(optimizer, scheduler=None, gradients="local", moments="keep")
    known = []
    for i in range(steps):
        optimizer.zero_grad()
        loss = loss_of(net, batch(i, rank))
        loss.backward()
        if rank == 0 or i not in (INTERVAL, steps - 1):
            optimizer.step()
        with ensemble.rescheduling():
            scheduler.step()
        ensemble.step(loss)
        known.append((ensemble.engine.step, ensemble.in_sync))
    assert optimizer.param_groups[0]["lr"] == 0
    return known


def test_all_know_alike_what_is_counted_and_who_is_in_sync_where_one_has_left_out_a_step() -> None:
    """Who asks `in_sync`, and averages where it says so, would else wait for those that do not."""
    one, two = run_ranks(skipping_the_last, 2, 3 * INTERVAL)
    assert one == two == [(i, i % INTERVAL == 0) for i in range(1, 3 * INTERVAL + 1)]
