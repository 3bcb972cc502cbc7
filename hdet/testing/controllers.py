"""What a controller promises."""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from ..converge.sync import Sync
from ..core.controller import Controller
from ..core.evidence import Evidence
from ..core.plan import Decision
from ..optim import FusedAdamW
from .runs import Loop

__all__ = ["ControllerContract"]

REPLICAS, EVERY, CYCLES = 4, 3, 8
EXAMPLES = settings(
    max_examples=8, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
LOSS = st.one_of(st.floats(0.1, 10), st.sampled_from([math.nan, math.inf, 1e30, 0.0, None]))
LOSSES = st.lists(st.lists(LOSS, min_size=REPLICAS, max_size=REPLICAS), min_size=3, max_size=CYCLES)
Losses = Sequence[Sequence[float | None]]
"""[cycle][replica]: the training loss; None: there is none."""
Call = tuple[dict[str, Any], list[dict[str, Any]]]
"""What a controller was given, and what it has decided; read from JSON."""


class ControllerContract:
    """The promises of a `hdet.Controller`, on runs of four replicas with losses of all kinds.

    Attributes:
        make: makes the controller. A method may use ``self.model``, which the run trains.

    Example::

        import hdet.testing

        class TestPublished(hdet.testing.ControllerContract):
            make = hdet.SoftmaxController
    """

    make: Callable[..., Controller]
    model: nn.Module

    @EXAMPLES
    @given(losses=LOSSES, seed=st.integers(0, 9))
    def test_decisions_are_finite_and_a_function_of_evidence_and_state_alone(
        self, losses: Losses, seed: int
    ) -> None:
        """Another object decides the same bitwise, as on another rank; no random state is used."""
        run, calls = self._start()
        for row in losses:
            run.step(EVERY, row)
            assert all(math.isfinite(x) and x > 0 for x in run.ensemble.values().values())
        numbers = [x for _, decided in calls for one in decided for x in one.values()]
        assert all(math.isfinite(x) for x in numbers if isinstance(x, float))
        random.seed(seed)
        before = random.getstate(), torch.get_rng_state().tolist()
        assert self._decided_again(self._started(run), calls) == [decided for _, decided in calls]
        assert (random.getstate(), torch.get_rng_state().tolist()) == before

    @EXAMPLES
    @given(losses=LOSSES, at=st.integers(0, CYCLES))
    def test_a_run_goes_on_bitwise_from_a_state_in_json(self, losses: Losses, at: int) -> None:
        """In a new controller, and in one that has seen another run. A state is a copy."""
        run, calls = self._start()
        for row in losses[:at]:
            run.step(EVERY, row)
        state, done = run.controller.state_dict(), len(calls)
        text = json.dumps(state)
        for row in losses[at:]:
            run.step(EVERY, row)
        assert json.dumps(state) == text, "a state changes after it was taken"
        for seen in ([], calls):
            controller = self._started(run)
            self._decided_again(controller, seen)
            controller.load_state_dict(json.loads(text))
            found = self._decided_again(controller, calls[done:])
            assert found == [decided for _, decided in calls[done:]]
            assert json.dumps(controller.state_dict()) == json.dumps(run.controller.state_dict())

    def test_a_state_that_lacks_a_key_is_refused_and_changes_nothing(self) -> None:
        run, _ = self._start()
        run.step(3 * EVERY, [1.0, 2.0, 3.0, 4.0])
        before = json.dumps(state := run.controller.state_dict())
        for key in state.keys() - {"frozen"}:
            with pytest.raises(ValueError, match=key):
                run.controller.load_state_dict({name: state[name] for name in state if name != key})
            assert json.dumps(run.controller.state_dict()) == before

    def _start(self) -> tuple[Loop, list[Call]]:
        calls: list[Call] = []

        def make(model: nn.Module) -> Controller:
            self.model = model
            made = self.make()
            made.learn = functools.partial(_noted, calls, made.learn)  # type: ignore[method-assign]
            return made

        return Loop(FusedAdamW, Sync(EVERY), REPLICAS, make), calls

    def _started(self, run: Loop) -> Controller:
        controller = self.make()
        controller.start(run.ensemble.run)
        return controller

    def _decided_again(self, controller: Controller, calls: Sequence[Call]) -> list[Any]:
        decided = [controller.learn(Evidence(**evidence)) for evidence, _ in calls]
        return [json.loads(json.dumps(list(map(asdict, one)))) for one in decided]


def _noted(calls: list[Call], learn: Any, evidence: Evidence) -> list[Decision]:
    given = json.dumps(asdict(evidence))
    decided: list[Decision] = learn(evidence)
    calls.append((json.loads(given), json.loads(json.dumps(list(map(asdict, decided))))))
    return decided
