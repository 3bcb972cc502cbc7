"""hdet's own controllers and the examples keep the contract, and it notices those that do not."""

from __future__ import annotations

import random
from typing import Any

import pytest

import hdet
from hdet.testing import ControllerContract
from tests.harness import probe

from .test_examples import made


class TestSoftmax(ControllerContract):
    def make(self) -> hdet.Controller:
        return hdet.SoftmaxController(0.1, decay=None)


class TestSoftmaxWithItsOwnDecay(ControllerContract):
    make = hdet.SoftmaxController


class TestProbe(ControllerContract):
    def make(self) -> hdet.Controller:
        return probe(self.model)


class TestBestValue(ControllerContract):
    def make(self) -> hdet.Controller:
        return hdet.BestValueController(2)


class TestShadow(ControllerContract):
    def make(self) -> hdet.Controller:
        return hdet.Shadow(hdet.SoftmaxController(0.1, decay=None))


class TestPublished(ControllerContract):
    def make(self) -> hdet.Controller:
        return made("softmax", temperature=0.05)


class TestPlateau(ControllerContract):
    def make(self) -> hdet.Controller:
        return made("plateau", patience=1, least=0.1)


class TestSlope(ControllerContract):
    def make(self) -> hdet.Controller:
        return made("slope", dead=0.0)


class TestHypergradient(ControllerContract):
    def make(self) -> hdet.Controller:
        return made("hypergradient")


class Bad(hdet.Controller):
    """Halves with the number of its decisions; ``fault``: what is wrong with it."""

    name, state_keys, fault = "bad", ("seen",), ""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def decide(self, evidence: hdet.Evidence) -> list[hdet.Decision]:
        self.seen.append(len(self.seen) + 1.0)
        t = random.random() if self.fault == "random" else 1.0
        if self.fault == "losses" and None in evidence.losses:
            t = float("nan")
        return [hdet.Decision(factor=0.5 ** len(self.seen), t=t) for _ in evidence.knobs]

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state | {"seen": self.seen} if self.fault == "alias" else state

    def check_state(self, state: Any) -> dict[str, Any]:
        return super().check_state({"seen": [], **state} if self.fault == "lacks" else state)

    def load_state_dict(self, state: Any) -> None:
        if self.fault != "forgets":
            super().load_state_dict(state)


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("random", "test_decisions_are_finite_and_a_function_of_evidence_and_state_alone"),
        ("losses", "test_decisions_are_finite_and_a_function_of_evidence_and_state_alone"),
        ("alias", "test_a_run_goes_on_bitwise_from_a_state_in_json"),
        ("forgets", "test_a_run_goes_on_bitwise_from_a_state_in_json"),
        ("lacks", "test_a_state_that_lacks_a_key_is_refused_and_changes_nothing"),
    ],
)
def test_a_fault_is_found(fault: str, test: str) -> None:
    class Broken(ControllerContract):
        make = type("Broken", (Bad,), {"fault": fault})

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(Broken(), test)()
