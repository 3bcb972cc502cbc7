"""How cycles end: kept, averaged late, restored from unequal replicas; what checkpoints and flags say then."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.measure.measurement import Measurement
from tests.distributed import run_ranks
from tests.harness import Run, Scripted, losses_of, model

from ..adversary.common import bits
from .runs import run

KEPT = hdet.Plan(end=hdet.Keep())
START = {"start": hdet.SnapshotOf()}
BACK = hdet.Plan(snapshots=START, judged=False, end=hdet.Restore("start"))


def planned(plans: list[hdet.Plan], ends: Any = (), **settings: Any) -> Run:
    return run(lambda model: Scripted(plans=plans, ends=ends), constant=True, total=60, **settings)


def test_a_kept_cycle_leaves_replicas_apart_and_says_so() -> None:
    run = planned([hdet.Plan(), KEPT]).steps(10)
    assert run.equal() and run.ensemble.in_sync and not run.ensemble.parted
    run.steps(10)
    assert not run.equal() and not run.ensemble.in_sync and run.ensemble.parted
    with pytest.warns(UserWarning, match="saving in the middle of a cycle"):
        run.ensemble.state_dict()
    with pytest.raises(ValueError, match="would be a mixture"):
        hdet.checkpoint.export_safetensors("a.safetensors", run.net, run.ensemble)
    run.ensemble.converge()
    assert run.equal() and run.ensemble.in_sync and not run.ensemble.parted


def test_a_spread_after_a_kept_cycle_without_one_parts_replicas() -> None:
    """Replicas that could not part were known to be equal; that knowledge ends with the cycle."""
    run = planned([hdet.Plan(), hdet.Plan(spread=False, end=hdet.Keep()), KEPT]).steps(25)
    assert not run.equal() and not run.ensemble.in_sync


def test_a_snapshot_of_a_cycle_after_a_kept_one_is_taken_at_its_first_step() -> None:
    run = planned([KEPT, hdet.Plan(snapshots=START, end=hdet.Restore("start"))]).steps(10)
    at = run.weights()
    run.steps(10)
    assert torch.equal(run.weights(), at) and run.equal()


def test_a_snapshot_lasts_as_long_as_plans_name_it() -> None:
    run = planned(
        [hdet.Plan(), hdet.Plan(snapshots=START), hdet.Plan(snapshots=START, end=hdet.Restore("start")), hdet.Plan()], together=1
    ).steps(10)
    begin = run.weights()
    for _ in range(19):
        assert not torch.equal(run.steps(1).weights(), begin)
    assert torch.equal(run.steps(1).weights(), begin)


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize(
    ("dtype", "masters"),
    [(torch.float32, None), (torch.float64, None), (torch.bfloat16, None), (torch.bfloat16, "fp32"), (torch.bfloat16, "split")],
)
def test_weights_masters_and_moments_are_taken_back_to_the_last_bit(dtype: torch.dtype, masters: str | None, place: str) -> None:
    """After a cycle: masters are beside their weights by then."""
    back = hdet.Plan(snapshots={"start": hdet.SnapshotOf(place)}, end=hdet.Restore("start"))
    optimizer = partial(hdet.FusedAdamW, master_weights=masters) if masters else torch.optim.AdamW
    run = planned([hdet.Plan(), back], together=1, lr=1e-2, dtype=dtype, optimizer=optimizer).steps(10)
    held = bits([run.weights(), run.optimizer.state_dict()["state"]])
    assert bits([run.steps(9).weights(), run.optimizer.state_dict()["state"]]) != held
    assert bits([run.steps(1).weights(), run.optimizer.state_dict()["state"]]) == held


@pytest.mark.parametrize("replicas", [1, 4])
def test_an_average_after_a_kept_cycle_is_one(replicas: int) -> None:
    run = planned([KEPT], [None, hdet.Average()], together=replicas).steps(19)
    assert run.equal() == (replicas == 1)
    run.step()
    assert run.ensemble.in_sync and run.equal()


@pytest.mark.parametrize(
    ("plan", "end", "message"),
    [
        (hdet.Plan(end=hdet.Restore("x")), None, "asks for the snapshot 'x'"), (hdet.Plan(end=hdet.Adopt(9)), None, "replica 9 to be adopted"),
        (hdet.Plan(), hdet.Restore("x"), r"asks for the snapshot 'x', but its plan keeps \[\]"), (KEPT, hdet.Adopt(-1), "replica -1 to be adopted"),
        (hdet.Plan(snapshots=START), hdet.Restore("x"), r"asks for the snapshot 'x', but its plan keeps \['start'\]"),
        (hdet.Plan(), hdet.Adopt(4), "replica 4 to be adopted, but there are 4"), (hdet.Plan(steps=0), None, "plans a cycle of 0 steps"),
        *((hdet.Plan(multipliers=[row]), None, "give 1 knobs times 4 replicas, all positive") for row in ([1.0], [1.0, 1.0, 1.0, -1.0], [1.0, 1.0, 1.0, math.nan])),
        (hdet.Plan(measure={"z": None}), None, "'scripted' measures 'z', and has no measurement of that name"),
    ],
)  # fmt: skip
def test_an_ending_that_cannot_be_is_refused_before_anything_of_it_is_done(plan: hdet.Plan, end: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned([plan], [end]).steps(10)


@pytest.mark.parametrize("row", [1.0, torch.tensor(1.0)])
def test_a_row_of_another_shape_is_refused_by_its_measurement(row: Any) -> None:
    class Rows(Measurement):
        def measure(self, cycle: int, place: int = 0) -> Any:
            return row

    def rows(net: Any) -> Scripted:
        controller = Scripted(plans=[hdet.Plan(measure={"rows": None})])
        controller.measurements = {"rows": Rows()}
        return controller

    with pytest.raises(TypeError, match="Rows.measure gave .*: a row is a tensor of one dimension"):
        run(rows, constant=True, total=60).steps(10)


def test_no_replica_with_finite_parameters_ends_a_kept_cycle_too() -> None:
    run = planned([KEPT]).steps(5)
    for k in range(4):
        with run.replica(k), torch.no_grad():
            run.net[0].weight.fill_(float("nan"))
    with pytest.raises(hdet.ReplicasDiverged):
        run.steps(5)


def test_buffers_go_back_without_anything_that_is_measured() -> None:
    net = nn.Sequential(model(), nn.BatchNorm1d(1))
    run = Run(net=net, scheduler=None, controller=Scripted(plans=[BACK]), buffers=net)
    begun = copy.deepcopy(net)
    losses_of(begun, run.batches()[0])  # a snapshot is taken after the first forward pass
    before = begun.state_dict()
    run.steps(5)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items()) and not run.optimizer.state


def noisy(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Ranks that begin apart: (weights at the beginning, weights after a restored cycle, converged?)."""
    net = model()
    with torch.no_grad():
        net[0].weight.add_(0.1 * rank)
    run = Run(rank, net=net, ddp=False, scheduler=None, controller=Scripted(plans=[BACK]), gradients="local", moments="reset")
    begin = run.weights()
    return begin, run.steps(5).weights(), run.ensemble.in_sync


def test_ranks_that_began_apart_are_equal_after_a_restore() -> None:
    (begin, one, together), (_, two, _) = run_ranks(noisy, 2)
    assert torch.equal(one, two) and torch.equal(one, begin) and together, "all have the first one's"


def test_another_way_of_averaging_is_refused_where_cycles_end_otherwise() -> None:
    with pytest.raises(ValueError, match=r"ends with Keep\(\).*leave converge out"):
        Run(scheduler=None, converge=hdet.converge.Compressed("bf16"), controller=Scripted(plans=[KEPT]))
