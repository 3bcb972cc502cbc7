"""What a plan keeps: taken when it is named first, to the last bit, given up when it is not; and endings that are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import hdet
from hdet.core.plan import Ending
from hdet.run.snapshot import Snapshots
from tests.harness import Run, model


def kept(net: torch.nn.Module, optimizer: torch.optim.Optimizer, **wanted: Any) -> Snapshots:
    snapshots = Snapshots(list(net.parameters()), optimizer, net)
    snapshots.begin_cycle({"it": hdet.SnapshotOf(**wanted)})
    snapshots.on_cycle_start()
    return snapshots


@pytest.mark.parametrize("masters", ["fp32", "split"])
def test_masters_are_taken_back_to_the_last_bit(masters: str) -> None:
    net = model().bfloat16()
    optimizer = hdet.FusedAdamW(net.parameters(), lr=1e-2, master_weights=masters)
    for p in net.parameters():
        p.grad = torch.full_like(p, 0.1)
    optimizer.step()  # masters are beside their weights now
    parameters = list(net.parameters())
    snapshots = kept(net, optimizer)
    begin = [(p.detach().clone(), m.clone()) for p, m in zip(parameters, optimizer.masters(parameters), strict=True)]
    for _ in range(3):
        optimizer.step()
    snapshots.restore("it")
    for p, m, (value, master) in zip(parameters, optimizer.masters(parameters), begin, strict=True):
        assert m is not None and torch.equal(p, value) and torch.equal(m, master)
        assert float(torch.as_tensor(optimizer.state[p]["step"]).reshape(-1)[0]) == 1


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_parameters_come_back_to_the_bit_wherever_they_are_kept(place: str, dtype: torch.dtype) -> None:
    net = model().to(dtype)
    snapshots = kept(net, torch.optim.SGD(net.parameters(), lr=0.1), place=place)
    begin = [p.detach().clone() for p in net.parameters()]
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(3)
    snapshots.restore("it")
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), begin, strict=True))
    snapshots.begin_cycle({})
    with pytest.raises(ValueError, match="there is no snapshot 'it', only "):
        snapshots.restore("it")


class Ends(hdet.Controller):
    """Each cycle with this plan; then this."""

    name = "ends"
    needs_replicas = False

    def __init__(self, end: Ending | None = None, **plan: Any) -> None:
        super().__init__()
        self.end, self.planned = end, hdet.Plan(**plan)

    def plan(self, now: hdet.Moment) -> hdet.Plan:
        return self.planned

    def learn(self, evidence: hdet.Evidence) -> hdet.Learned:
        return hdet.Learned([hdet.Decision()], self.end)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ends(hdet.Restore("x")), r"asks for the snapshot 'x', but its plan keeps \[\]"),
        (lambda: Ends(hdet.Restore("x"), snapshots={"y": hdet.SnapshotOf()}), r"asks for the snapshot 'x', but its plan keeps \['y'\]"),
        (lambda: Ends(hdet.Adopt(2)), "replica 2 to be adopted, but there are 2"),
        (lambda: Ends(steps=0), "plans a cycle of 0 steps"),
        (lambda: Ends(multipliers=[[1.0]]), "give 1 knobs times 2 replicas, all positive"),
        (lambda: Ends(multipliers=[[1.0, -1.0]]), "give 1 knobs times 2 replicas, all positive"),
        (lambda: Ends(multipliers=[[1.0, math.nan]]), "give 1 knobs times 2 replicas, all positive"),
        (lambda: Ends(measure={"z": None}), "'ends' measures 'z', and has no measurement of that name"),
    ],
)
def test_plans_and_endings_that_cannot_be_are_refused_by_name(make: Callable[[], Ends], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Run(together=2, controller=lambda net: make()).steps(6)


def test_a_snapshot_is_taken_before_the_first_step_of_the_cycle_that_names_it_first() -> None:
    class Late(Ends):
        def plan(self, now: hdet.Moment) -> hdet.Plan:
            names: Mapping[str, hdet.SnapshotOf] = {"late": hdet.SnapshotOf()} if 1 <= now.cycle <= 2 else {}
            return hdet.Plan(snapshots=names, end=hdet.Restore("late") if now.cycle == 2 else hdet.Average())

    run = Run(0, controller=Late(), every=5).steps(5)
    begin = run.weights()
    for _ in range(9):
        run.step()
        assert not torch.equal(run.weights(), begin)
    assert torch.equal(run.steps(1).weights(), begin)
