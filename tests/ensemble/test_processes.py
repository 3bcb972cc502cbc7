"""The engine in 2 and 4 real processes under DDP: spread, converge, control, faults, resume."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hdet
from tests.harness import Run, batch, loss_of, model

from ..distributed import RankError, run_ranks
from .helpers import all_reduces, check_spread

# -- spread 0 is DDP ---------------------------------------------------------------------------------------------------------


def spread_zero_and_ddp(rank: int, world: int, fused: bool) -> tuple[bool, bool]:
    make = hdet.FusedAdamW if fused else torch.optim.AdamW
    run = Run(rank, spread=0.0, optimizer=make)
    net = model()
    wrapped = DistributedDataParallel(net)
    optimizer = make(net.parameters(), lr=3e-3, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, 40, cycle_momentum=False)
    rates = True
    for i in range(40):
        run.step()
        loss_of(wrapped, batch(100 * i + rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        rates &= run.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    return rates, all(torch.equal(a, b) for a, b in zip(run.net.parameters(), net.parameters(), strict=True))


@pytest.mark.parametrize(("world", "fused"), [(2, True), (3, False), (3, True)])
def test_spread_zero_is_ddp_to_the_bit(world: int, fused: bool) -> None:
    """Three replicas matter: 1/3 is not a binary fraction, so an average of equal parameters would already differ."""
    assert run_ranks(spread_zero_and_ddp, world, fused) == [(True, True)] * world


# -- spread and converge -----------------------------------------------------------------------------------------------------


def spread_and_converge(rank: int, world: int, fused: bool) -> Any:
    run = Run(rank, optimizer=hdet.FusedAdamW if fused else torch.optim.AdamW)
    return [(run.ensemble.multipliers["lr"], run.steps(1).weights(), run.ensemble.in_sync, run.rate) for _ in range(10)]


@pytest.mark.parametrize(("world", "fused"), [(2, True), (4, False)])
def test_replicas_differ_as_rho_before_and_are_equal_after_a_converge(world: int, fused: bool) -> None:
    ranks = run_ranks(spread_and_converge, world, fused)
    for step in range(10):
        rhos, weights, converged, rates = zip(*(rank[step] for rank in ranks), strict=True)
        assert len(set(rates)) == 1, "at rest every replica holds the base rate"
        for in_sync in converged:
            check_spread(rhos, weights, in_sync, step % 5 == 4)


# -- the probe ---------------------------------------------------------------------------------------------------------------


def probe_run(rank: int, world: int) -> Any:
    run = Run(rank, controller="probe", lr=1e-5, total=60, every=5).steps(60)
    return [{k: v for k, v in record.items() if not k.endswith("_ms")} for record in run.records], run.ensemble.values(), run.rate


def test_the_probe_raises_a_rate_that_is_far_too_low_and_all_ranks_agree() -> None:
    ranks = run_ranks(probe_run, 4)
    records, values, rate = ranks[0]
    assert all(rank[0] == records for rank in ranks) and values["lr"] == rate
    first, last = records[0], records[-1]
    assert len(records) == 12 and last["corrections"]["lr"] > 2
    assert first["t"]["lr"] < -2 and first["slopes"]["lr"] < 0 < first["errors"]["lr"]
    assert sorted(first["multipliers"]["lr"]) == pytest.approx([0.7, 0.9, 1.1, 1.3])


def different_batches(rank: int, world: int) -> None:
    own = [batch(rank * 100 + i) for i in range(8)]
    Run(rank, controller=lambda net: hdet.ProbeController(loss_of, own, model=net)).steps(5)


def test_probe_batches_that_differ_between_ranks_are_an_error() -> None:
    with pytest.raises(RankError, match="different probe batches"):
        run_ranks(different_batches, 2)


# -- faults ------------------------------------------------------------------------------------------------------------------


def one_bad_loss(rank: int, world: int, bad: float | None) -> Any:
    run = Run(rank, controller=hdet.SoftmaxController(1e-3, decay=None))
    for i in range(10):
        if rank == 1 and i < 5 and bad is None:
            run.backward()
            run.optimizer.step()
            run.ensemble.step()
            run.index += 1
        else:
            run.step(report=bad if rank == 1 and i == 2 else None)
    return run.records, run.weights()


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_a_replica_without_a_usable_loss_is_left_out_and_recorded(bad: float | None) -> None:
    ranks = run_ranks(one_bad_loss, 4, bad)
    first, second = ranks[0][0]
    assert first["losses"][1] is None and first["left_out"] == [1]
    assert any("replica 1" in note for note in first["notes"])
    assert all(math.isfinite(c) for c in first["corrections"].values())
    assert second["left_out"] == [], "the next cycle counts it again"
    assert all(rank[0][0]["corrections"] == first["corrections"] for rank in ranks)
    assert all(torch.equal(rank[1], ranks[0][1]) for rank in ranks)


# -- converge on demand, checkpoints -----------------------------------------------------------------------------------------


def converge_now(rank: int, world: int) -> Any:
    run = Run(rank).steps(3)
    before = run.weights()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.ensemble.state_dict()
    run.ensemble.converge()
    assert run.ensemble.in_sync
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.ensemble.state_dict()
    after = run.weights()
    run.steps(1)
    assert not run.ensemble.in_sync
    run.steps(1)
    return before, after, len(caught), run.ensemble.cycle, run.ensemble.in_sync


def test_converge_on_demand_gives_the_mean_and_the_cycle_goes_on() -> None:
    ranks = run_ranks(converge_now, 2)
    mean = (ranks[0][0] + ranks[1][0]) / 2
    for before, after, warned, cycle, converged in ranks:
        assert not torch.equal(before, after)
        assert torch.equal(after, ranks[0][1]) and torch.allclose(after, mean, rtol=1e-6, atol=1e-7)
        assert warned == 1 and cycle == 1 and converged


def written_and_converged(rank: int, world: int, equally: bool) -> Any:
    run = Run(rank, dtype=torch.bfloat16, optimizer=partial(hdet.FusedAdamW, master_weights="fp32")).steps(2)
    with torch.no_grad():
        for parameter in run.net.parameters():
            parameter.fill_(1.0 if equally else 1.0 + 2 * rank)
    run.ensemble.converge()
    before = run.weights().float()
    masters = torch.cat([state["master_param"].flatten() for state in run.optimizer.state.values()])
    run.step()
    return before, masters, (run.weights().float() - before).abs().max().item()


@pytest.mark.parametrize("equally", [True, False])
def test_what_was_written_to_parameters_with_masters_is_what_converges(equally: bool) -> None:
    for weights, masters, moved in run_ranks(written_and_converged, 2, equally):
        assert (weights == (1 if equally else 2)).all() and (masters == (1 if equally else 2)).all()
        assert moved < 0.05  # and the next step goes on from there


def straight_and_resumed(rank: int, world: int) -> bool:
    straight, first = Run(rank, controller="probe").steps(40), Run(rank, controller="probe").steps(20)
    resumed = Run(rank, controller="probe").loaded(first.saved()).steps(20)
    return torch.equal(straight.weights(), resumed.weights()) and straight.ensemble.state_dict() == resumed.ensemble.state_dict()


def test_resume_at_a_cycle_end_is_bitwise() -> None:
    assert run_ranks(straight_and_resumed, 2) == [True, True]


def controlled(rank: int) -> Run:
    return Run(rank, controller=hdet.SoftmaxController(1e-3, decay=None), lr=1e-4)


def save_state(rank: int, world: int) -> Any:
    return controlled(rank).steps(20).saved()


def load_state(rank: int, world: int, saved: Any) -> Any:
    run = controlled(rank).loaded(saved, ("ensemble", "net", "optimizer"))
    corrections, rate = run.ensemble.corrections, run.rate
    run.steps(20)
    return corrections["lr"], rate, run.ensemble.multipliers["lr"], run.weights()


def test_state_is_the_same_on_every_rank_and_continues_with_another_number_of_replicas() -> None:
    states = run_ranks(save_state, 4)
    saved = states[0]
    assert all(state["ensemble"] == saved["ensemble"] for state in states)
    resumed = run_ranks(load_state, 3, saved)
    (correction,) = saved["ensemble"]["corrections"]
    assert correction != 1.0 and {r[:2] for r in resumed} == {(correction, saved["optimizer"]["param_groups"][0]["lr"])}
    assert sorted(r[2] for r in resumed) == pytest.approx([0.7, 1.0, 1.3])
    assert all(torch.equal(r[3], resumed[0][3]) for r in resumed)


# -- what a step costs -------------------------------------------------------------------------------------------------------


def collectives_per_step(rank: int, world: int) -> list[int]:
    run = Run(rank, controller="probe")
    counts = []
    for _ in range(11):
        with all_reduces() as calls:
            run.step()
        counts.append(len(calls))
    return counts


def test_only_the_end_of_a_cycle_communicates() -> None:
    """Step 1: are gradients shared? (Settings are gathered, not summed.) Steps 5 and 10: slots and one bucket. DDP's own all-reduces run inside C++ and are not counted."""
    assert run_ranks(collectives_per_step, 2) == [[1, 0, 0, 0, 2, 0, 0, 0, 0, 2, 0]] * 2


def softmax_average(rank: int, world: int) -> Any:
    run = Run(rank, weights="softmax", spread=0.9, lr=3e-2).steps(4)
    loss = run.backward()
    run.optimizer.step()
    mine = run.weights()
    run.ensemble.step(loss)
    return mine, run.weights(), run.history["losses"]


def test_the_softmax_average_uses_the_weights_of_equation_4() -> None:
    ranks = run_ranks(softmax_average, 2)
    a, b = ranks[0][2]
    w = 1 / (1 + math.exp((a - b) / 0.1))
    assert abs(w - 0.5) > 0.01, "the case should tell weighted from uniform"
    for _, after, _ in ranks:
        assert torch.allclose(after, w * ranks[0][0] + (1 - w) * ranks[1][0], rtol=1e-5, atol=1e-6)


def tensor_parallel_by_two(rank: int, world: int) -> Any:
    """2 x 2: ranks {0, 1} and {2, 3} each hold one model in two shards; a shard may meet only its twin."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    shard = torch.nn.Parameter(torch.full((4,), float(rank % 2 + 1)))
    optimizer = torch.optim.SGD([shard], lr=0.1)
    ensemble = hdet.Ensemble(
        optimizer, replicas=hdet.Replicas.from_group(groups[rank % 2]), knobs=[hdet.LearningRate(0.5)], sync=hdet.Sync(3)
    )
    for _ in range(3):
        shard.grad = torch.ones(4) * (rank % 2 + 1)
        optimizer.step()
        ensemble.step()
    return ensemble.replicas.index, ensemble.replicas.count, shard.detach()


def test_a_group_keeps_the_shards_of_other_ranks_apart() -> None:
    ranks = run_ranks(tensor_parallel_by_two, 4)
    assert [(r[0], r[1]) for r in ranks] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert torch.equal(ranks[0][2], ranks[2][2]) and torch.equal(ranks[1][2], ranks[3][2])
    assert torch.allclose(ranks[0][2], torch.full((4,), 0.7)) and torch.allclose(ranks[1][2], torch.full((4,), 1.4))
