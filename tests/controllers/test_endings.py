"""How cycles end: kept, averaged late, restored from unequal replicas; what checkpoints and flags say then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from tests.controllers.runs import Run, batch, build, loss_of
from tests.distributed import run_ranks


class Planned(hdet.Controller):
    """Cycle by cycle these plans, and these endings after them; the last ones for ever."""

    name = "planned"
    needs_replicas = False

    def __init__(self, plans: list[hdet.Plan], ends: list[Any] | None = None) -> None:
        super().__init__()
        self.plans, self.ends = plans, ends or [None]

    def plan(self, now: hdet.Moment) -> hdet.Plan:
        return self.plans[min(now.cycle, len(self.plans) - 1)]

    def learn(self, evidence: hdet.Evidence) -> hdet.Learned:
        end = self.ends[min(evidence.cycle, len(self.ends) - 1)]
        return hdet.Learned([hdet.Decision() for _ in evidence.knobs], end)


KEPT = hdet.Plan(end=hdet.Keep())
START = {"start": hdet.SnapshotOf()}


def planned(plans: list[hdet.Plan], ends: list[Any] | None = None, **settings: Any) -> Run:
    return Run(lambda model: Planned(plans, ends), constant=True, steps=60, **settings)


def sets(run: Run) -> list[list[torch.Tensor]]:
    assert run.replicas is not None
    return run.replicas.sets(list(run.model.parameters()))


def equal(run: Run) -> bool:
    first, *others = sets(run)
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_a_kept_cycle_leaves_replicas_apart_and_says_so() -> None:
    run = planned([hdet.Plan(), KEPT]).train(10)
    assert equal(run) and run.ensemble.in_sync and not run.ensemble.parted
    run.train(10)
    assert not equal(run) and not run.ensemble.in_sync and run.ensemble.parted
    with pytest.warns(UserWarning, match="saving in the middle of a cycle"):
        run.ensemble.state_dict()
    with pytest.raises(ValueError, match="would be a mixture"):
        hdet.checkpoint.RunState(run.model, run.ensemble).state_dict()
    run.ensemble.converge()
    assert equal(run) and run.ensemble.in_sync and not run.ensemble.parted


def test_a_spread_after_a_kept_cycle_without_one_parts_replicas() -> None:
    """Replicas that could not part were known to be equal; that knowledge ends with the cycle."""
    run = planned([hdet.Plan(), hdet.Plan(spread=False, end=hdet.Keep()), KEPT]).train(25)
    assert not equal(run) and not run.ensemble.in_sync


def test_a_snapshot_of_a_cycle_after_a_kept_one_is_taken_at_its_first_step() -> None:
    run = planned([KEPT, hdet.Plan(snapshots=START, end=hdet.Restore("start"))]).train(10)
    at = [t.clone() for t in sets(run)[0]]
    run.train(10)
    assert all(map(torch.equal, sets(run)[0], at)) and equal(run)


@pytest.mark.parametrize("replicas", [1, 4])
def test_an_average_after_a_kept_cycle_is_one(replicas: int) -> None:
    run = planned([KEPT], [None, hdet.Average()], replicas=replicas).train(10)
    before = [t.clone() for t in run.weights()] if replicas == 1 else [torch.stack(own).mean(0) for own in zip(*sets(run), strict=True)]
    run.train(9)
    if replicas > 1:
        assert not equal(run)
    run.train(1)
    assert run.ensemble.in_sync and (replicas == 1 or equal(run)) and len(before) == 4


@pytest.mark.parametrize(
    ("plan", "end", "message"),
    [
        (hdet.Plan(end=hdet.Restore("x")), None, "asks for the snapshot 'x'"), (hdet.Plan(end=hdet.Adopt(9)), None, "replica 9 to be adopted"),
        (hdet.Plan(), hdet.Restore("x"), "asks for the snapshot 'x'"), (KEPT, hdet.Adopt(-1), "replica -1 to be adopted"),
    ],
)  # fmt: skip
def test_an_ending_that_cannot_be_is_refused_before_anything_of_it_is_done(plan: hdet.Plan, end: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned([plan], [end]).train(10)


def test_no_replica_with_finite_parameters_ends_a_kept_cycle_too() -> None:
    run = planned([KEPT]).train(5)
    with torch.no_grad():
        for own in sets(run):
            own[0].fill_(float("nan"))
    with pytest.raises(hdet.ReplicasDiverged):
        run.train(5)


def test_buffers_go_back_without_anything_that_is_measured() -> None:
    net = nn.Sequential(build(), nn.BatchNorm1d(1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    controller = Planned([hdet.Plan(5, snapshots=START, judged=False, end=hdet.Restore("start"))])
    ensemble = hdet.Ensemble(optimizer, None, total_steps=50, controller=controller, sync=hdet.Sync(buffers=net))
    before = {key: value.clone() for key, value in net.state_dict().items()}
    for step in range(5):
        loss = loss_of(net, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(loss)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items()) and not optimizer.state


def noisy(rank: int, world: int, plans: Callable[[], list[hdet.Plan]]) -> tuple[list[float], list[float], bool]:
    """Ranks that begin apart: (weights at the beginning, weights after a restored cycle, converged?)."""
    model = build()
    with torch.no_grad():
        model[0].weight.add_(0.1 * rank)  # type: ignore[index,union-attr,operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ensemble = hdet.Ensemble(
        optimizer, None, sync=hdet.Sync(5, gradients="local", moments="reset"), total_steps=50, controller=Planned(plans())
    )
    begin = model[0].weight.flatten().tolist()  # type: ignore[index,union-attr,operator]
    for step in range(5):
        loss = loss_of(model, batch(10 * step + rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(loss)
    return begin, model[0].weight.flatten().tolist(), ensemble.in_sync  # type: ignore[index,union-attr,operator]


def restored() -> list[hdet.Plan]:
    return [hdet.Plan(snapshots=START, judged=False, end=hdet.Restore("start"))]


def test_ranks_that_began_apart_are_equal_after_a_restore() -> None:
    (begin, one, together), (_, two, _) = run_ranks(noisy, 2, restored)
    assert one == two == begin and together, "all have the first one's"


def test_another_way_of_averaging_is_refused_where_cycles_end_otherwise() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.raises(ValueError, match=r"ends with Keep\(\).*leave converge out"):
        hdet.Ensemble(
            optimizer, None, total_steps=50, sync=hdet.Sync(5, converge=hdet.converge.Compressed("bf16")), controller=Planned([KEPT])
        )


def test_a_decision_at_freeze_after_still_reads_the_line() -> None:
    """The reading is due at 26 % of the run, in a cycle that ends at 30 %, and nothing may move after that."""
    run = Run(lambda model: hdet.LineController(model, freeze_after=0.3), replicas=1, lr=1e-4, steps=400, interval=40).train()
    assert [record["t"]["lr"] is not None for record in run.history if record["step"] == 120] == [True]
