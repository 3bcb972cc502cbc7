"""Moments nobody plans for: errors inside a step, converge() at odd times, groups that are gone."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hdet
from hdet.converge import average_tensors
from hdet.run.cycle_stats import local_replicas
from tests.harness import Run, TwoReplicas, model, sgd

from ..distributed import run_ranks
from .helpers import filled, on_all_ranks, told


def test_past_the_end_of_the_schedule_the_rate_stays_the_corrected_one() -> None:
    run = Run(total=4, every=2)
    run.ensemble.engine.corrections = [0.5]
    rate = run.steps(4).rate
    with pytest.raises(ValueError, match="Tried to step 5 times"):
        run.step()
    assert run.rate == rate == run.ensemble.values()["lr"]


def log_that_raises(rank: int, world: int) -> Any:
    run = Run(rank, every=2).steps(1)
    if rank == 0:
        run.ensemble.records.log = lambda record, step: (_ for _ in ()).throw(OSError("disk full"))
    assert told(run.step) == ("no error" if rank else "disk full")
    return run.ensemble.multipliers["lr"], run.ensemble.in_sync


def test_a_log_that_raises_leaves_every_replica_in_the_same_cycle() -> None:
    ranks = run_ranks(log_that_raises, 4)
    assert sorted(rho for rho, _ in ranks) == pytest.approx([0.7, 0.9, 1.1, 1.3])
    assert all(converged for _, converged in ranks)


def test_a_sparse_gradient_is_refused_before_the_step() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    hdet.Ensemble(optimizer, replicas=TwoReplicas())
    before = table.weight.detach().clone()
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="parameter 0 in group 0 is torch.sparse_coo"):
        optimizer.step()
    assert torch.equal(table.weight, before)


def converge_after(rank: int, world: int, what: str) -> Any:
    """(in sync, equal) before and after."""
    run = Run(rank, spread=0.0 if what == "noise" else 0.3)
    if what == "noise":
        hdet.warm_noise_(run.net.parameters(), nu=0.1)
    else:  # between the optimizer's step and the Ensemble's
        run.steps(1).backward()
        run.optimizer.step()
    before = run.ensemble.in_sync, on_all_ranks(run.weights())
    run.ensemble.converge()
    return *before, run.ensemble.in_sync, on_all_ranks(run.weights())


@pytest.mark.parametrize("what", ["noise", "inside a step"])
def test_converge_sees_what_it_has_not_made(what: str) -> None:
    assert run_ranks(converge_after, 2, what) == [(False, False, True, True)] * 2


def warm_restarts(rank: int, world: int) -> Any:
    schedule = partial(torch.optim.lr_scheduler.CosineAnnealingWarmRestarts, T_0=8)
    run = Run(
        rank, optimizer=torch.optim.SGD, lr=0.05, scheduler=schedule, total=24, every=2,
        controller="probe",
    )  # fmt: skip
    seen = []
    for _ in range(24):
        equal = on_all_ranks(run.steps(1).weights())
        seen.append((run.ensemble.in_sync, equal, run.ensemble.multipliers["lr"]))
    return seen


def test_converged_is_true_exactly_when_replicas_are_equal_also_when_the_spread_rests_and_returns() -> (  # noqa: E501
    None
):
    ranks = run_ranks(warm_restarts, 2)
    assert 0 < sum(rho == 1.0 for _, _, rho in ranks[0]) < 24, "the case should have both"
    assert all(converged == equal for seen in ranks for converged, equal, _ in seen)


def converge_with_a_broken_replica(rank: int, world: int) -> Any:
    run = Run(rank, every=4).steps(2)
    if rank == 1:
        filled(run.net, float("inf"), parameters=1)
    with pytest.warns(UserWarning, match="replica 1 left out of the average"):
        run.ensemble.converge()
    return bool(run.weights().isfinite().all()), run.steps(2).history["notes"]


def test_a_replica_left_out_by_converge_is_in_the_next_record() -> None:
    for finite, notes in run_ranks(converge_with_a_broken_replica, 2):
        assert finite and any("replica 1 left out of the average" in note for note in notes)


def backward_through_averaged(rank: int, world: int) -> str:
    weight = nn.Parameter(torch.ones(3))
    loss = (weight * weight).sum()
    average_tensors([weight], hdet.Replicas.from_group())
    return told(loss.backward)


def test_a_backward_pass_through_weights_from_before_an_average_is_an_error() -> None:
    said = run_ranks(backward_through_averaged, 2)
    assert all("modified by an inplace operation" in text for text in said)


def test_a_foreign_optimizers_masters_are_not_taken_for_ours() -> None:
    own = list(model().parameters())
    optimizer = torch.optim.AdamW(own)
    optimizer.state[own[0]]["master_param"] = torch.full_like(own[0], 5.0)
    (replica,) = local_replicas(hdet.Replicas.single(), optimizer, own)
    assert replica.masters() == [None] * len(own)


def test_without_a_scheduler_a_correction_does_not_look_like_a_falling_schedule() -> None:
    optimizer = sgd()
    ensemble = hdet.Ensemble(optimizer, replicas=TwoReplicas(), sync=hdet.Sync(1))
    before = ensemble.schedule.peaks()
    ensemble.engine.corrections = [3.0]
    optimizer.step()
    ensemble.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3)
    assert ensemble.schedule.peaks() == before == [[0.1]] and ensemble.schedule.floors() == [0.0]


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(6, 1)
        self.weight = nn.Parameter(torch.ones(6, 6).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("scale", torch.ones(3).to(torch.float8_e5m2))
        self.register_buffer("mean", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(x @ self.weight.float())


@pytest.mark.parametrize("make", [torch.optim.AdamW, hdet.FusedAdamW])
def test_a_frozen_parameter_in_8_bits_is_refused_in_the_optimizer(make: Any) -> None:
    said = "parameter 0 has dtype torch.float8_e4m3fn.*leave it out of the optimizer"
    with pytest.raises(ValueError, match=said):
        hdet.Ensemble(make(Quantised().parameters(), lr=1e-3))


def test_and_stays_as_it_is_in_the_model() -> None:
    net = Quantised()
    run = Run(
        net=net, optimizer=lambda *_, **__: torch.optim.AdamW(net.adapter.parameters(), lr=1e-3),
        scheduler=None, every=10, total=1000, buffers=net, controller=hdet.AutoLR(net),
        closure=True, divergence=hdet.Divergence(rollback="host"),
    )  # fmt: skip
    run.losses = lambda data: (net(data[0]) - data[1]).square().mean(1)
    (buffer,) = run.ensemble.parameters.buffers
    assert buffer is net.mean
    assert run.steps(60).controller.interval.trial.first_losses
    assert torch.equal(net.weight.float(), torch.ones(6, 6))


def destroyed(rank: int, world: int, again: bool, folder: str) -> list[str]:
    def begin() -> None:  # another group, of which the Ensemble knows nothing
        store = dist.FileStore(str(Path(folder, str(rank))), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    run = Run(rank).steps(3)
    dist.barrier()
    dist.destroy_process_group()
    if again:
        begin()
    run.wrapped = run.net
    said = [told(act) for act in (lambda: run.steps(2), run.ensemble.converge)]
    run.ensemble.close()
    if not again:
        begin()
    return said


@pytest.mark.parametrize("again", [False, True])
def test_a_process_group_destroyed_under_a_live_ensemble_is_named(again: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for rank, said in enumerate(run_ranks(destroyed, 2, again, folder)):
            for text in said:
                assert f"the process group of replica {rank} has been destroyed" in text
                assert "make a new one" in text
