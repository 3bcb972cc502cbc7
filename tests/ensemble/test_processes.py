"""The engine in 2 and 4 real processes: the probe, an average on demand, what a step costs. (Trajectories: tests/reference.)"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hdet
from tests.harness import Run, batch, loss_of

from ..distributed import RankError, run_ranks
from .helpers import all_reduces


def probe_run(rank: int, world: int) -> Any:
    run = Run(rank, controller="probe", lr=1e-5, total=60, every=5).steps(60)
    return (
        [{k: v for k, v in record.items() if not k.endswith("_ms")} for record in run.records],
        run.ensemble.values(),
        run.rate,
    )


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
    run = Run(
        rank, dtype=torch.bfloat16, optimizer=partial(hdet.FusedAdamW, master_weights="fp32")
    ).steps(2)
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


def tensor_parallel_by_two(rank: int, world: int) -> Any:
    """2 x 2: ranks {0, 1} and {2, 3} each hold one model in two shards; a shard may meet only its twin."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    shard = torch.nn.Parameter(torch.full((4,), float(rank % 2 + 1)))
    optimizer = torch.optim.SGD([shard], lr=0.1)
    ensemble = hdet.Ensemble(
        optimizer,
        replicas=hdet.Replicas.from_group(groups[rank % 2]),
        knobs=[hdet.LearningRate(0.5)],
        sync=hdet.Sync(3),
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
    assert torch.allclose(ranks[0][2], torch.full((4,), 0.7)) and torch.allclose(
        ranks[1][2], torch.full((4,), 1.4)
    )
