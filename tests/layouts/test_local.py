"""Local gradients: each replica trains alone between averages, and what becomes of its moments is a choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import hdet
from tests.distributed import run_ranks
from tests.layouts.common import CLOSE, INTERVAL, Trace, adamw, batch, check, ensemble_of, flat, loss_of, model

CYCLES = 3
STEPS = CYCLES * INTERVAL
POLICIES = ["keep", "average", "reset"]
COLLECTIVES = ["all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"]  # fmt: skip


class Traffic:
    """Bytes that this rank put into collectives between replicas. Replica r has the ranks r * members .. (r + 1) * members - 1."""

    def __init__(self, members: int) -> None:
        self.members, self.bytes = members, 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        def counting(collective: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                groups = [a for a in (*args, *kwargs.values()) if isinstance(a, dist.ProcessGroup)]
                ranks = dist.get_process_group_ranks(groups[0] if groups else None)
                if len({rank // self.members for rank in ranks}) > 1:
                    sent = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
                    self.bytes += min(tensor.nbytes for tensor in sent)
                return collective(*args, **kwargs)

            return call

        present = [name for name in COLLECTIVES if hasattr(dist, name)]
        with mock.patch.multiple(dist, **{name: counting(getattr(dist, name)) for name in present}):
            yield

    def hook(self, group, bucket):  # type: ignore[no-untyped-def]  # DDP wants annotations that are types, not their names, or none
        """DDP's own, counted."""
        self.bytes += bucket.buffer().nbytes
        return default_hooks.allreduce_hook(group, bucket)


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """First and second moments and the count of steps; nothing if they are still to be made."""
    states = list(optimizer.state.values())
    return states and [*(flat(state[key] for state in states) for key in ("exp_avg", "exp_avg_sq")), states[0]["step"].clone()]


def local(rank: int, world: int, policy: str, sharded: bool) -> dict[str, Any]:
    net, replicas, members = model(), None, 1
    wrapped: Any
    if sharded:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        wrapped = fully_shard(net, mesh=mesh["dp_shard"])
        replicas, members = hdet.Replicas.from_mesh(mesh, replicate="dp_replicate"), 2
    else:
        wrapped = DDP(net)
    traffic = Traffic(members)
    optimizer = adamw(net.parameters())
    trace = Trace([], [])
    settings = {"replicas": replicas, "gradients": "local", "moments": policy}
    ensemble = ensemble_of(optimizer, log=lambda record, step: trace.records.append(record), **settings)
    if not sharded:
        wrapped.register_comm_hook(dist.group.WORLD, traffic.hook)  # which no_sync never calls
    volumes, before, after = [], [], []
    for i in range(STEPS):
        with traffic.counted():
            optimizer.zero_grad()
            with nullcontext() if sharded else wrapped.no_sync():
                loss = loss_of(wrapped, batch(i, rank))
                loss.backward()
            optimizer.step()
        gradient, stepped = flat(p.grad for p in net.parameters()), flat(net.parameters())
        before.append(moments(optimizer))
        with traffic.counted():
            ensemble.step(loss)
        trace.steps.append((gradient, stepped, flat(net.parameters())))
        if i % INTERVAL == INTERVAL - 1:
            after.append(moments(optimizer))
            volumes.append(traffic.bytes)
    return {"trace": trace, "volumes": volumes, "before": before, "after": after, "private": ensemble.private_state}


def shared(rank: int, world: int) -> int:
    """Bytes of DDP's gradients in a cycle."""
    net, traffic = model(), Traffic(1)
    ddp = DDP(net)
    ddp.register_comm_hook(dist.group.WORLD, traffic.hook)
    for i in range(INTERVAL):
        loss_of(ddp, batch(i, rank)).backward()
    return traffic.bytes


def train_all(rank: int, world: int) -> dict[str, Any]:
    return {policy: local(rank, world, policy, False) for policy in POLICIES} | {"ddp": shared(rank, world)}


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return run_ranks(train_all, 2)


@pytest.fixture(scope="module")
def shards() -> list[dict[str, Any]]:
    return run_ranks(local, 4, "keep", True)


@pytest.mark.parametrize("policy", POLICIES)
def test_replicas_train_alone_and_equal_the_training_by_hand(runs: list[dict[str, Any]], policy: str) -> None:
    check([run[policy]["trace"] for run in runs], local=True, policy=policy)


def test_one_dimensional_fsdp_in_each_replica(shards: list[dict[str, Any]]) -> None:
    check([run["trace"] for run in shards], shards=2, local=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_moments_are_kept_averaged_or_reset(runs: list[dict[str, Any]], policy: str) -> None:
    one, two = (run[policy] for run in runs)
    assert one["private"] == two["private"] == (policy == "keep")
    for cycle in range(CYCLES):
        last = (cycle + 1) * INTERVAL - 1
        assert not torch.equal(one["before"][last][0], two["before"][last][0]), "each has seen gradients of its own"
        for run in (one, two):
            before, after = run["before"][last], run["after"][cycle]
            if policy == "keep":
                assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
            if policy == "reset":
                assert before and not after, "made anew by the next step, the count of steps too"
        if policy == "average":
            for k in (0, 1):
                mean = (one["before"][last][k] + two["before"][last][k]) / 2
                torch.testing.assert_close(one["after"][cycle][k], mean, **CLOSE)
                assert torch.equal(one["after"][cycle][k], two["after"][cycle][k])


def test_a_cycle_sends_what_ddp_sends_in_one_step(runs: list[dict[str, Any]], shards: list[dict[str, Any]]) -> None:
    """1/T of DDP's bytes, and the stats: 3 N numbers, N more where moments are averaged, so that peers know to have the same ones; these
    then make it three times as much. The first cycle checks the start as well."""
    gradients = runs[0]["ddp"]
    for policy in POLICIES:
        first, *later = (b - a for a, b in zip([0, *runs[0][policy]["volumes"]], runs[0][policy]["volumes"], strict=False))
        expected = gradients // INTERVAL * (3 if policy == "average" else 1)
        stats = 2 * (4 if policy == "average" else 3) * 8
        assert later == [expected + stats] * (CYCLES - 1), policy
        assert first < expected + 2000
    # A rank with half of the parameters sends half of that: 4 rows of 8, half of each vector; the single row and number stay on one rank.
    volumes = [rank["volumes"][-1] - rank["volumes"][-2] - 2 * 3 * 8 for rank in shards]
    assert sum(volumes[:2]) == sum(volumes[2:]) == gradients // INTERVAL


# -- steps that one replica leaves out -------------------------------------------------------------------------------------


def skipping(rank: int, world: int, steps: int) -> Any:
    """A GradScaler steps no optimizer where it finds an infinite gradient: in one replica's second step, and in its whole third cycle."""
    net = model()
    optimizer = adamw(net.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, steps, cycle_momentum=False)
    ensemble = ensemble_of(
        optimizer, scheduler=scheduler, gradients="local", moments="keep", divergence=hdet.Divergence(rollback="device"),
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
    assert ensemble.history is not None
    return cycles, ensemble.engine.rollbacks, ensemble.corrections, ensemble.history["scheduled"], weights


def test_a_step_that_one_replica_leaves_out_counts_for_all() -> None:
    """Else cycles would end at different steps, the schedule's values that the controller sees differ, and the last average hang."""
    one, two = run_ranks(skipping, 2, 4 * INTERVAL + 1)
    assert one[:4] == two[:4] and one[0][-1] == 5 and one[1] == 1
    for last in (2, 5, 8, 11, 12):
        assert torch.equal(one[4][last], two[4][last])
    assert torch.equal(one[4][8], one[4][5]), "taken back, also where no step was done that could have begun the cycle"
