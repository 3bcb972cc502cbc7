"""Questions, which a controller asks while it learns: answered alike on all ranks, from weights that are afterwards what they were."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import hdet
from hdet.measure import Measurement
from tests.distributed import run_ranks
from tests.harness import Run, losses_of, model, taught

from .asking import Asking
from .runs import run


def asking(**settings: Any) -> Run:
    return run(Asking, together=1, constant=True, total=60, **settings)


def test_answers_are_those_of_the_weights_and_decide() -> None:
    ran = asking(spread=0.0)
    for _ in range(3):
        ran.steps(10)
        with torch.no_grad():
            here = float(losses_of(ran.net, taught(0)).double().mean())
            for p in ran.net.parameters():
                p.mul_(1.02)
            larger = float(losses_of(ran.net, taught(0)).double().mean())
            for p in ran.net.parameters():
                p.div_(1.02)
        answers, decision = ran.history["record"]["answers"], ran.history["record"]["decisions"][0]
        assert answers == [pytest.approx(here, rel=1e-5), pytest.approx(larger, rel=1e-5)]
        assert decision["factor"] == pytest.approx(1.1 if answers[1] < answers[0] else 1 / 1.1)


def test_an_answer_that_is_missing_in_a_record_is_a_difference() -> None:
    ran = asking().steps()
    records = json.loads(json.dumps([record["record"] for record in ran.records]))
    assert list(hdet.replay(Asking(model()), records)) == []
    records[3]["answers"].pop()
    (difference,) = hdet.replay(Asking(model()), records)
    assert difference.startswith("cycle 3: LossAt(") and "was not asked when this run was recorded" in difference


def two_ranks(rank: int, world: int) -> Any:
    ran = run(Asking, together=1, rank=rank, constant=True, total=60).steps()
    return ran.weights().tolist(), [record["record"]["answers"] for record in ran.records], ran.ensemble.corrections


def test_ranks_get_the_same_answers() -> None:
    one, two = run_ranks(two_ranks, 2)
    assert one == two and all(len(answers) == 2 for answers in one[1]) and one[2] != {"lr": 1.0}


def test_a_decision_at_freeze_after_still_asks_and_later_ones_do_not() -> None:
    ran = run(lambda net: Asking(net, freeze_after=0.5), together=1, constant=True, total=60).steps()
    assert [len(record["record"]["answers"]) for record in ran.records] == [2, 2, 2, 0, 0, 0]


class Other(hdet.Question):
    """Nobody has an answer to it."""


class Unmeasured(Asking):
    def plan(self, now: hdet.Moment) -> hdet.Plan:
        return hdet.Plan()


class Silent(Asking):
    def __init__(self, net: Any) -> None:
        super().__init__(net)
        self.measurements = {"scaled": Measurement()}


class Wrong(Asking):
    def decide(self, evidence: hdet.Evidence) -> Any:
        yield Other("scaled")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Unmeasured, r"'asking' asks LossAt\(.*, which its plan does not measure"),
        (Silent, "Measurement answers no questions"),
        (Wrong, "it answers LossAt, got Other"),
    ],
)
def test_questions_without_an_answer_are_refused_and_weights_stay(make: Any, message: str) -> None:
    ran = run(make, together=1, constant=True, total=60).steps(9)
    seen: list[torch.Tensor] = []
    ran.optimizer.register_step_post_hook(lambda *_: seen.append(ran.weights()))
    with pytest.raises(ValueError, match=message):
        ran.step()
    assert torch.equal(ran.weights(), seen[-1])


def test_an_error_of_the_losses_passes_and_weights_stay() -> None:
    calls: list[torch.Tensor] = []

    def losses(net: Any, data: Any) -> torch.Tensor:
        calls.append(ran.weights())
        if len(calls) == 2:
            raise RuntimeError("mine")
        return losses_of(net, data)

    ran = run(lambda net: Asking(net, losses=losses), together=1, constant=True, total=60).steps(9)
    with pytest.raises(RuntimeError, match="mine"):
        ran.step()
    assert torch.equal(ran.weights(), calls[0]) and not torch.equal(calls[1], calls[0])
