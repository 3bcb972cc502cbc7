"""The engine in 2 and 4 processes: the probe, an average on demand, what a step costs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hdet
from tests.harness import Run, batch, loss_of

from ..distributed import RankError, run_ranks
from .helpers import MASTERS, all_reduces, filled


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


def written_and_converged(rank: int, world: int, other: float) -> Any:
    run = Run(rank, dtype=torch.bfloat16, optimizer=MASTERS).steps(2)
    filled(run.net, other if rank else 1.0)
    run.ensemble.converge()
    before = run.weights().float()
    masters = torch.cat([state["master_param"].flatten() for state in run.optimizer.state.values()])
    run.step()
    return before, masters, (run.weights().float() - before).abs().max().item()


@pytest.mark.parametrize(("other", "mean"), [(1.0, 1.0), (3.0, 2.0)])
def test_what_was_written_to_parameters_is_averaged(other: float, mean: float) -> None:
    for weights, masters, moved in run_ranks(written_and_converged, 2, other):
        assert (weights == mean).all() and (masters == mean).all()
        assert moved < 0.05  # and the next step goes on from there


def collectives_per_step(rank: int, world: int) -> list[int]:
    run, counts = Run(rank, controller="probe"), []
    for _ in range(11):
        with all_reduces() as calls:
            run.step()
        counts.append(len(calls))
    return counts


def test_only_the_end_of_a_cycle_communicates() -> None:
    """Step 1: are gradients shared? Steps 5 and 10: slots and one bucket. DDP's are not counted."""
    assert run_ranks(collectives_per_step, 2) == [[1, 0, 0, 0, 2, 0, 0, 0, 0, 2, 0]] * 2


def tensor_parallel_by_two(rank: int, world: int) -> Any:
    """Ranks {0, 1} and {2, 3} each hold one model in two shards; a shard may meet only its twin."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    shard = torch.nn.Parameter(torch.full((4,), float(rank % 2 + 1)))
    optimizer = torch.optim.SGD([shard], lr=0.1)
    replicas, knobs = hdet.Replicas.from_group(groups[rank % 2]), [hdet.LearningRate(0.5)]
    ensemble = hdet.Ensemble(optimizer, replicas=replicas, knobs=knobs, sync=hdet.Sync(3))
    for _ in range(3):
        shard.grad = torch.ones(4) * (rank % 2 + 1)
        optimizer.step()
        ensemble.step()
    return replicas.index, replicas.count, shard.detach()


def test_a_group_keeps_the_shards_of_other_ranks_apart() -> None:
    ranks = run_ranks(tensor_parallel_by_two, 4)
    assert [rank[:2] for rank in ranks] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    for i in (0, 1):
        assert torch.equal(ranks[i][2], ranks[i + 2][2])
        assert torch.allclose(ranks[i][2], torch.full((4,), 0.7 * (i + 1)))
