"""The engine in 2 and 4 processes: the probe, an average on demand, what a step costs."""

from __future__ import annotations

import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hdet
from tests.harness import Run, TwoReplicas, batch, loss_of

from ..distributed import RankError, run_ranks
from .helpers import on_all_ranks, told


def probe_run(rank: int, world: int) -> Any:
    run = Run(rank, controller="probe", lr=1e-5, total=60).steps()
    records = [{k: v for k, v in r.items() if not k.endswith("_ms")} for r in run.records]
    return records, run.ensemble.values(), run.rate


def test_the_probe_raises_a_rate_that_is_far_too_low_and_all_ranks_agree() -> None:
    (first, *others) = run_ranks(probe_run, 4)
    records, values, rate = first
    assert others == [first] * 3 and values["lr"] == rate
    assert len(records) == 12 and records[-1]["corrections"]["lr"] > 2
    of = {key: records[0][key]["lr"] for key in ("t", "slopes", "errors", "multipliers")}
    assert of["t"] < -2 and of["slopes"] < 0 < of["errors"]
    assert sorted(of["multipliers"]) == pytest.approx([0.7, 0.9, 1.1, 1.3])


def different_batches(rank: int, world: int) -> None:
    own = [batch(rank * 100 + i) for i in range(8)]
    Run(rank, controller=lambda net: hdet.ProbeController(loss_of, own, model=net)).steps(5)


def test_probe_batches_that_differ_between_ranks_are_an_error() -> None:
    with pytest.raises(RankError, match="different probe batches"):
        run_ranks(different_batches, 2)


def converge_now(rank: int, world: int) -> Any:
    run = Run(rank).steps(3)
    before = run.weights()
    with pytest.warns(UserWarning) as caught:
        run.ensemble.state_dict()
    run.ensemble.converge()
    assert run.ensemble.in_sync
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.ensemble.state_dict()
    after = run.weights()
    assert not run.steps(1).ensemble.in_sync and len(caught) == 1
    assert run.steps(1).ensemble.in_sync and run.ensemble.cycle == 1
    return before, after


def test_converge_on_demand_gives_the_mean_and_the_cycle_goes_on() -> None:
    (one, after), (two, other) = run_ranks(converge_now, 2)
    assert not torch.equal(one, after) and not torch.equal(two, after)
    assert torch.equal(after, other)
    assert torch.allclose(after, (one + two) / 2, rtol=1e-6, atol=1e-7)


# -- moments that nobody plans for -------------------------------------------------------------


def log_that_raises(rank: int, world: int) -> Any:
    run = Run(rank, every=2).steps(1)
    if rank == 0:
        run.ensemble._records.log = lambda record, step: (_ for _ in ()).throw(OSError("disk full"))
    assert told(run.step) == ("no error" if rank else "disk full")
    return run.ensemble.multipliers["lr"], run.ensemble.in_sync


def test_a_log_that_raises_leaves_every_replica_in_the_same_cycle() -> None:
    ranks = run_ranks(log_that_raises, 4)
    assert sorted(rho for rho, _ in ranks) == pytest.approx([0.7, 0.9, 1.1, 1.3])
    assert all(converged for _, converged in ranks)


def test_a_sparse_gradient_is_refused_before_the_step() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    ensemble = hdet.Ensemble(optimizer, replicas=TwoReplicas())
    before = table.weight.detach().clone()
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="parameter 0 in group 0 is torch.sparse_coo"):
        optimizer.step()
    assert torch.equal(table.weight, before)
    ensemble.close()


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


def test_in_sync_is_true_exactly_when_replicas_are_equal_also_when_the_spread_rests() -> None:
    ranks = run_ranks(warm_restarts, 2)
    assert 0 < sum(rho == 1.0 for _, _, rho in ranks[0]) < 24, "the case should have both"
    assert all(converged == equal for seen in ranks for converged, equal, _ in seen)


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(6, 1)
        self.weight = nn.Parameter(torch.ones(6, 6).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("scale", torch.ones(3).to(torch.float8_e5m2))
        self.register_buffer("mean", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(x @ self.weight.float())


def refused(rank: int, world: int, make: Any) -> None:
    said = "parameter 0 has dtype torch.float8_e4m3fn.*leave it out of the optimizer"
    with pytest.raises(ValueError, match=said):
        hdet.Ensemble(make(Quantised().parameters(), lr=1e-3))


@pytest.mark.parametrize("make", [torch.optim.AdamW, hdet.FusedAdamW])
def test_a_frozen_parameter_in_8_bits_is_refused_where_it_would_be_averaged(make: Any) -> None:
    run_ranks(refused, 2, make)


def test_and_stays_as_it_is_in_the_model() -> None:
    net = Quantised()
    run = Run(
        net=net, optimizer=lambda *_, **__: torch.optim.AdamW(net.adapter.parameters(), lr=1e-3),
        scheduler=None, every=10, total=1000, buffers=net, search=hdet.AutoLR(net),
        closure=True, divergence=hdet.Divergence(rollback="host"),
    )  # fmt: skip
    run.losses = lambda data: (net(data[0]) - data[1]).square().mean(1)
    (buffer,) = run.ensemble.parameters.buffers
    assert buffer is net.mean
    assert run.steps(60).search.interval.trial.first_losses
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
