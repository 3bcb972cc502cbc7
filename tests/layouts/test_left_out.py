"""Steps that a GradScaler leaves out, of all replicas or of one; running statistics."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import hdet
from tests.distributed import run_ranks
from tests.layouts.common import CLOSE, INTERVAL, adamw, batch, ensemble_of, flat, loss_of, model

STEPS = 7


def scaled(rank: int, world: int) -> tuple[list[int], list[torch.Tensor], list[float]]:
    """In step 2 replica 1's gradient overflows: the sum is inf, and every scaler skips the step."""
    net = model().float()
    ddp, optimizer = DDP(net), adamw(net.parameters())
    ensemble = ensemble_of(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    cycles, after, scales = [], [], []
    for i in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(ddp, [part.float() for part in batch(i, rank)])
        scaler.scale(loss * (torch.inf if (rank, i) == (1, 2) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        ensemble.step(loss)
        cycles.append(ensemble.cycle)
        scales.append(scaler.get_scale())
        after.append(flat(net.parameters()))
    return cycles, after, scales


def test_a_step_that_the_scaler_skips_counts_none() -> None:
    ranks = run_ranks(scaled, 2)
    for cycles, after, scales in ranks:
        assert cycles == [0, 0, 0, 1, 1, 1, 2], "T = 3 optimizer steps: calls 0, 1, 3 and 4, 5, 6"
        assert scales[1] == 2 * scales[2], "the scaler saw it"
        assert torch.equal(after[1], after[2]) and not torch.equal(after[2], after[3])
    for i, (one, two) in enumerate(zip(ranks[0][1], ranks[1][1], strict=True)):
        assert torch.equal(one, two) == (i in (3, 6))


def skipping(rank: int, world: int, steps: int) -> Any:
    """With gradients of its own, replica 1 skips its second step, and its whole third cycle."""
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
    last = ensemble.history[-1]
    return cycles, [last[key] for key in ("rollbacks", "corrections", "scheduled")], weights


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
        known.append((ensemble.cycle, ensemble.in_sync))
    assert optimizer.param_groups[0]["lr"] == 0
    return known


def test_all_know_alike_what_is_counted_and_who_is_in_sync_where_one_has_left_out_a_step() -> None:
    """Who asks `in_sync`, and averages where it says so, would else wait for those that do not."""
    one, two = run_ranks(skipping_the_last, 2, 3 * INTERVAL)
    steps = range(1, 3 * INTERVAL + 1)
    assert one == two == [(i // INTERVAL, i % INTERVAL == 0) for i in steps]


def with_batch_norm(rank: int, world: int, spread: float) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer, norm = adamw(net.parameters()), net[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:  # newer torch has another word for it and warns of the old one
            ddp = DDP(net, forward_sync_buffers=False)
        except TypeError:
            ddp = DDP(net, broadcast_buffers=False)
        ensemble = ensemble_of(optimizer, buffers=ddp, knobs=[hdet.LearningRate(spread)])
    steps = []
    for i in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(ddp, batch(i, rank))
        loss.backward()
        optimizer.step()
        before = flat([norm.running_mean, norm.running_var])
        ensemble.step(loss)
        known = int(norm.num_batches_tracked), ensemble.in_sync
        steps.append((before, flat([norm.running_mean, norm.running_var]), *known))
    ensemble.converge()
    assert ensemble.in_sync
    loss_of(net, batch(0, rank))  # a forward pass alone moves them
    assert not ensemble.in_sync
    ensemble.close()
    with pytest.warns(UserWarning, match="copies rank 0's buffers"):
        ensemble_of(optimizer, buffers=DDP(net))
    return steps


@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_running_statistics_are_averaged_and_their_overwriting_is_warned_of(spread: float) -> None:
    """They part without a spread, too."""
    for i, (one, two) in enumerate(zip(*run_ranks(with_batch_norm, 2, spread), strict=True)):
        assert not torch.equal(one[0], two[0]), "each replica has its own batches' statistics"
        ends = i % INTERVAL == INTERVAL - 1
        if ends:
            assert torch.equal(one[1], two[1])
            torch.testing.assert_close(one[1], (one[0] + two[0]) / 2, **CLOSE)
        assert one[2:] == two[2:] == (i + 1, ends), "known to be equal"
