"""Faults that training survives: what is healthy goes on, what is not takes the mean."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hdet

from ..distributed import run_ranks
from .scenarios import INTERVAL, Training

BAD = 1  # the replica to which it happens


def shared_gradients(rank: int, world: int) -> dict[str, Any]:
    """A cycle for each fault, and one after each in which all is well."""
    training = Training(rank, controller=hdet.SoftmaxController(decay=None), total_steps=100)
    found = {}
    training.cycle()
    for fault in ("its loss is NaN", "it has no loss", "its parameters become inf", "it diverges"):
        for step in range(INTERVAL):
            loss: torch.Tensor | None = training.train()
            ends = step == INTERVAL - 1
            if rank == BAD and fault == "its loss is NaN" and step == 1:
                loss = torch.tensor(math.nan)
            if rank == BAD and fault == "it has no loss":
                loss = None
            if rank == BAD and fault == "it diverges":
                loss = 100 * loss
            if rank == BAD and ends:
                added = {"its parameters become inf": math.inf, "it diverges": 3}.get(fault, 0)
                next(training.net.parameters()).data.view(-1)[3] += added
            if ends:
                before = [torch.empty(len(training.numbers())) for _ in range(world)]
                dist.all_gather(before, torch.tensor(training.numbers()))
            training.ensemble.step(loss)
        found[fault] = {
            "before": before, "after": torch.tensor(training.numbers()),
            "record": training.records[-1], "next": training.cycle(),
        }  # fmt: skip
    return found


@pytest.fixture(scope="module")
def shared() -> list[dict[str, Any]]:
    return run_ranks(shared_gradients, 3)


@pytest.mark.parametrize(("fault", "averaged", "total", "note"), [
    ("its loss is NaN", [0, 2], 1, "of the average: loss not finite"),
    ("it has no loss", [0, 1, 2], 1, ": its loss is missing or not finite"),
    ("its parameters become inf", [0, 2], 2, "of the average: parameters not finite"),
    ("it diverges", [0, 2], 3, "times its peers'"),
])  # fmt: skip
def test_one_replica_under_ddp(fault, averaged, total: int, note: str, shared) -> None:
    for found in shared:
        here, record, later = found[fault], found[fault]["record"], found[fault]["next"]
        # there is something to average
        assert not any(torch.equal(here["before"][0], other) for other in here["before"][1:])
        wanted = torch.stack([here["before"][r] for r in averaged]).double().mean(0).float()
        # sums of three float32 numbers of size 1
        torch.testing.assert_close(here["after"], wanted, rtol=0, atol=1e-6)
        assert torch.equal(here["after"], shared[0][fault]["after"])
        # counted, and only in this cycle
        assert record["diverged_total"] == later["diverged_total"] == total
        missing = [r for r, loss in enumerate(record["losses"]) if loss is None]
        assert missing == record["left_out"] == ([] if fault == "it diverges" else [BAD])
        assert later["left_out"] == [] and all(map(math.isfinite, later["losses"]))
        assert any(f"replica {BAD} left out" in text and note in text for text in record["notes"])
        assert record["values"] == shared[0][fault]["record"]["values"]
        assert not record["rolled_back"]


def local_gradients(rank: int, world: int, moments: str, fault: str) -> dict[str, Any]:
    training = Training(rank, local=True, moments=moments)
    training.cycle()
    for step in range(INTERVAL):
        if rank == BAD and fault == "its rate is absurd":
            training.set_rate(30.0)
        poison = math.nan if rank == BAD and step == 1 and fault == "a batch is NaN" else 1.0
        loss = training.train(poison)
        if rank == BAD and fault == "its rate is absurd":
            training.set_rate(0.05)
        training.ensemble.step(loss)
    records, weights, state = [training.records[-1]], training.numbers(), training.state()
    records += [training.cycle(), training.cycle()]
    found = {"records": records, "weights": weights, "state": state, "last": training.numbers()}
    return {**found, "loss": float(loss)}


@pytest.mark.parametrize("fault", ["a batch is NaN", "its rate is absurd"])
@pytest.mark.parametrize("moments", ["keep", "average", "reset"])
def test_one_replica_with_gradients_of_its_own(moments: str, fault: str) -> None:
    """Its moments are as bad as its parameters: they must not lead it astray again."""
    ranks = run_ranks(local_gradients, 3, moments, fault)
    assert not abs(ranks[BAD]["loss"]) < 10, "the fault has not happened"
    for found in ranks:
        record, *later = found["records"]
        assert record["diverged_total"] == 1
        assert f"replica {BAD} left out of the average" in record["notes"][0]
        assert found["weights"] == ranks[0]["weights"] and found["last"] == ranks[0]["last"]
        assert all(map(math.isfinite, [*found["weights"], *found["state"], *found["last"]]))
        for after in later:
            assert after["diverged_total"] == 1 and all(loss < 3 for loss in after["losses"]), after


def all_explode(
    rank: int, world: int, rollback: str | None, fault: str, attempts: int = 20, lower: float = 0.5,
    settings: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """The base value is far too high from the third cycle on; or one replica's NaN gradient reaches
    everybody once, or always."""
    jump = (8, 5e4) if fault == "rate" else None
    divergence = hdet.Divergence(rollback=rollback, attempts=attempts, lower=lower)
    training = Training(rank, divergence=divergence, lr=0.02, jump=jump, **(settings or {}))
    training.cycle()
    training.cycle()
    before, momentum, restored = training.numbers(), training.state(), None
    try:
        for cycle in range(24):
            for step in range(INTERVAL):
                often = fault == "always NaN" or (fault == "NaN once" and cycle == 0)
                bad = rank == BAD and step == 2 and often
                training.ensemble.step(training.train(math.nan if bad else 1.0))
            if restored is None:
                restored = training.numbers() == before and training.state() == momentum
    except hdet.ReplicasDiverged as error:
        return {"error": str(error), "cycle": training.ensemble.cycle, "records": training.records}
    found = {"weights": training.numbers(), "values": training.ensemble.values()}
    return {**found, "restored": restored, "records": training.records}


@pytest.mark.parametrize(("fault", "rollback", "lower", "settings"), [
    ("rate", "device", 0.5, {}), ("rate", "host", 0.5, {}),
    ("rate", "host", 0.1, {"optimizer": hdet.FusedAdamW}),
    ("rate", "device", 0.5, {"local": True, "moments": "keep", "optimizer": torch.optim.AdamW}),
    ("NaN once", "device", 0.5, {}), ("NaN once", "host", 0.5, {}),
])  # fmt: skip
def test_all_replicas_are_taken_back_and_the_run_ends_finite(
    fault: str, rollback: str, lower: float, settings: dict[str, Any]
) -> None:
    ranks = run_ranks(all_explode, 2, rollback, fault, 20, lower, settings)
    for found in ranks:
        assert "error" not in found, found.get("error")
        assert found["restored"], "the anchor is where the cycle began, to the bit"
        records = found["records"]
        taken_back = [record["cycle"] for record in records if record["rolled_back"]]
        count = len(taken_back)
        assert taken_back[0] == 2 and records[-1]["rollbacks"] == count
        start = 1000.0 if fault == "rate" else 0.02
        assert found["values"]["lr"] == pytest.approx(start * lower**count)
        assert count == 1 if fault == "NaN once" else count > (5 if lower == 0.5 else 2)
        assert all(map(math.isfinite, found["weights"])) and max(records[-1]["losses"]) < 2
        assert found["weights"] == ranks[0]["weights"]


@pytest.mark.parametrize(("rollback", "cycles", "says"), [
    ("device", 3, "3 cycles in a row were rolled back"), (None, 0, "no replica has"),
])  # fmt: skip
def test_what_never_gets_better_ends_in_one_error_on_every_rank(rollback, cycles, says) -> None:
    one, two = run_ranks(all_explode, 2, rollback, "always NaN", 3)
    assert one["error"] == two["error"] and one["cycle"] == two["cycle"] == 2 + cycles
    assert one["error"].startswith("cycle ") and says in one["error"]
