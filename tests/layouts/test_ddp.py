"""Two replicas under DDP, the ways people run it, against the training by hand or DDP's own."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

import hdet
from tests.distributed import run_ranks
from tests.layouts.common import (
    CLOSE,
    INTERVAL,
    Trace,
    adamw,
    batch,
    check,
    ensemble_of,
    flat,
    loss_of,
    model,
    parts_and_meets,
    train,
)  # fmt: skip

STEPS = 7


def wrapped(way: str, net: nn.Module) -> Any:
    ddp = DDP(net)
    if way == "bf16_hook":
        # DDP allows it by name on NCCL alone; gloo adds bfloat16 too.
        hook = lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket)
        ddp.register_comm_hook(dist.group.WORLD, hook)
    return torch.compile(ddp, backend="aot_eager") if way == "compile" else ddp


def accumulate(ddp: Any, observe: Any, data: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Micro-batches of 6 and 2 rows: the cycle's loss is still that of the whole batch."""
    (x1, x2), (y1, y2) = (part.split([6, 2]) for part in data)
    for x, y, synchronise in ((x1, y1, ddp.no_sync()), (x2, y2, nullcontext())):
        with synchronise:
            loss = loss_of(ddp, (x, y))
            (loss * len(x) / 8).backward()
        observe(loss, weight=len(x))


def run(rank: int, way: str) -> Trace:
    net = model()
    ddp = wrapped(way, net)

    def backward(step: int, observe: Any) -> None:
        if way == "accumulated":
            accumulate(ddp, observe, batch(step, rank))
        else:
            loss = loss_of(ddp, batch(step, rank))
            loss.backward()
            observe(loss)

    return train(list(net.parameters()), adamw(net.parameters()), backward, STEPS)


def train_all(rank: int, world: int, ways: list[str]) -> dict[str, Trace]:
    return {way: run(rank, way) for way in ways}


EXACT, HOOK = ["plain", "accumulated", "compile"], "bf16_hook"


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Trace]]:
    return run_ranks(train_all, 2, [*EXACT, HOOK])


@pytest.mark.parametrize("way", EXACT)
def test_equals_the_training_by_hand(runs: list[dict[str, Trace]], way: str) -> None:
    check([run[way] for run in runs])


@pytest.mark.parametrize("way", [*EXACT, HOOK])
def test_gradients_stay_shared_and_parameters_part_and_meet(runs: Any, way: str) -> None:
    parts_and_meets([run[way] for run in runs])


def scaled(rank: int, world: int) -> tuple[list[int], list[torch.Tensor], list[float]]:
    """In step 2 replica 1's gradient overflows: the sum is inf, and every scaler skips the step."""
    net = model().float()
    ddp = DDP(net)
    optimizer = adamw(net.parameters())
    ensemble = ensemble_of(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    cycles, after, scales = [], [], []
    for i in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(ddp, [part.float() for part in batch(i, rank)])
        scaler.scale(loss * (float("inf") if (rank, i) == (1, 2) else 1.0)).backward()
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
    steps[-1] = (*steps[-1][:3], ensemble.in_sync)
    loss_of(net, batch(0, rank))  # a forward pass alone moves them
    assert not ensemble.in_sync
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ensemble.close()
        ensemble_of(optimizer, buffers=DDP(net))
    return steps, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_running_statistics_are_averaged_and_their_overwriting_is_warned_of(spread: float) -> None:
    """They part without a spread, too."""
    (first, said), (second, _) = run_ranks(with_batch_norm, 2, spread)
    for i, (one, two) in enumerate(zip(first, second, strict=True)):
        assert not torch.equal(one[0], two[0]), "each replica has its own batches' statistics"
        ends = i % INTERVAL == INTERVAL - 1
        if ends:
            assert torch.equal(one[1], two[1])
            torch.testing.assert_close(one[1], (one[0] + two[0]) / 2, **CLOSE)
        assert one[2] == two[2] == i + 1
        assert one[3] == two[3] == (ends or i == STEPS - 1), "known to be equal"
    assert any("copies rank 0's buffers" in message for message in said)
