"""Every decision of every controller is made again, offline, from what was recorded as JSON,
bitwise."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.trial.rule import Trial
from tests.harness import model, probe

from .runs import run

Make = Callable[[nn.Module], hdet.Controller]
MAKES: dict[str, tuple[Make, dict[str, Any]]] = {
    "softmax": (lambda m: hdet.SoftmaxController(0.01, decay=None), {}),
    "softmax, its own decay": (lambda m: hdet.SoftmaxController(0.01, decay="floor"), {}),
    "best value": (
        lambda m: hdet.BestValueController(2),
        {"knobs": [hdet.LearningRate(multipliers=[0.1, 0.5, 1, 5])], "constant": True},
    ),
    "probe": (lambda m: probe(m, 10**7), {"lr": 1e-5}),
    "probe, cycles taken back": (
        lambda m: probe(m, 10**7),
        {"lr": 0.1, "divergence": hdet.Divergence(rollback="device", rise_bound=1.1, attempts=100)},
    ),
    "a search, then a probe": (
        lambda m: probe(m, 10**7),
        {"search": hdet.AutoLR, "together": 1, "lr": 1e-5},
    ),
    "a shadow": (lambda m: hdet.Shadow(probe(m, 10**7)), {"lr": 1e-5}),
}


def differences(again: hdet.Controller, records: list[Any]) -> Iterator[str]:
    """What ``again``, started with the run's `Ensemble.run`, does not plan and decide as it was
    recorded. As JSON has them: tuples are lists there, and floats are exact."""
    for n, line in enumerate(records):
        record, pairs = line["record"], dict[str, Any]()
        if n == 0 and record["begin"]:
            again.restart()
        if line["trial"] is not None:
            trial, total = line["trial"]["trial"], line["trial"]["total_steps"]
            pairs["trial"] = Trial.from_dict(trial).interval(total).to_dict(), line["trial"]
        if not record["observed"]:
            pairs["plan"] = asdict(again.plan()), record["plan"]
        if record["rolled_back"]:
            again.restart()
        evidence = record["evidence"] and hdet.Evidence(**record["evidence"])
        if record["observed"] and evidence:
            again.observe(evidence)
        elif evidence:
            decided = again.learn(evidence)
            pairs["decisions"] = [asdict(one) for one in decided], record["decisions"]
        for what, (now, then) in pairs.items():
            if json.dumps(now, sort_keys=True) != json.dumps(then, sort_keys=True):
                yield f"{what} of cycle {record['cycle']}: {now} now, {then} then"


@pytest.mark.parametrize("name", MAKES)
def test_a_recorded_run_is_decided_again_bitwise(name: str) -> None:
    """And a decision in which the last bit is another one is noticed."""
    make, settings = MAKES[name]
    ran = run(make, **settings).steps()
    records = json.loads(json.dumps(ran.records))

    def found() -> list[str]:
        again = make(model())
        again.start(ran.ensemble.run)
        return list(differences(again, records))

    cycles = [record["record"] for record in records]
    count = sum(cycle["evidence"] is not None for cycle in cycles)
    assert count >= (1 if "search" in name else 10) and found() == []
    assert any(cycle["rolled_back"] for cycle in cycles) or "taken back" not in name
    assert any(record["trial"] for record in records) == ("search" in name)
    decisions = [decision for cycle in cycles for decision in cycle["decisions"]]
    if moved := [decision for decision in decisions if decision["factor"] != 1]:
        moved[0]["factor"] *= 1 + 2**-52
        assert len(found()) == 1
    assert moved or name in ("a shadow", "softmax, its own decay", "a search, then a probe")


# -- in the shadow: it decides, is recorded, and touches nothing -----------------------------------

SHOWN = ["softmax", "softmax, its own decay", "best value", "probe"]


@pytest.mark.parametrize("name", SHOWN)
def test_the_run_is_bitwise_the_one_without_it(name: str) -> None:
    make, settings = MAKES[name]
    plain: dict[str, Any] = {"total": 60, **settings}
    ours = run(lambda model: hdet.Shadow(make(model)), **plain)
    alone = run(lambda model: None, **plain)
    assert [float(ours.step()) for _ in range(60)] == [float(alone.step()) for _ in range(60)]
    assert all(map(torch.equal, ours.all_weights(), alone.all_weights()))
    assert ours.ensemble.values() == alone.ensemble.values()
    assert ours.ensemble.corrections == {"lr": 1.0} and len(ours.records) == len(alone.records)


def test_what_it_would_have_decided_is_in_the_record() -> None:
    make, settings = MAKES["probe"]
    ran = run(lambda model: hdet.Shadow(make(model)), **settings).steps()
    notes = [note for note in ran.notes() if "would move the value: times" in note]
    assert notes and any(record["slopes"]["lr"] is not None for record in ran.records)
    shadow = ran.controller
    assert isinstance(shadow, hdet.Shadow) and len(shadow.decisions) == 1
