"""What a controller promises."""

from __future__ import annotations

import json
import math
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from ..controllers.measurement import Measurement
from ..core.controller import Controller
from ..core.replay import replay
from ..converge.sync import Sync
from ..ensemble import Ensemble
from ..knobs import LearningRate
from ..optim import FusedAdamW
from ..replicas.coresident import CoresidentReplicas

__all__ = ["ControllerContract"]

REPLICAS = 4
CYCLES = 8
EXAMPLES = settings(
    max_examples=8, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
LOSSES = st.one_of(st.floats(0.1, 10), st.sampled_from([math.nan, math.inf, 1e30, 0.0, None]))
RUNS = st.lists(st.lists(LOSSES, min_size=REPLICAS, max_size=REPLICAS), min_size=3, max_size=CYCLES)
"""[cycle][replica]: the training loss of a replica; None: it has none."""


class ControllerContract:
    """The promises of a `hdet.Controller`, on runs of four replicas with losses of all kinds.

    Attributes:
        make: makes the controller. A method may use ``self.model``, which the run trains.

    Example::

        class TestHalver(hdet.testing.ControllerContract):
            make = Halver
    """

    make: Callable[..., Controller]
    model: nn.Module

    @EXAMPLES
    @given(losses=RUNS)
    def test_whatever_the_losses_are_values_stay_finite(self, losses: Losses) -> None:
        run = self._start().train(losses)
        assert all(math.isfinite(value) and value > 0 for row in run.values for value in row)
        for record in run.records:
            found = [x for key in ("slopes", "errors", "t") for x in record[key].values()]
            assert all(x is None or math.isfinite(x) for x in found), record

    @EXAMPLES
    @given(losses=RUNS, seed=st.integers(0, 9))
    def test_decisions_are_a_function_of_evidence_and_state(
        self, losses: Losses, seed: int
    ) -> None:
        """Another object decides the same bitwise, as on another rank; no random state is used."""
        run = self._start().train(losses)
        records = json.loads(json.dumps(run.records))
        random.seed(seed), torch.manual_seed(seed)
        before = random.getstate(), torch.get_rng_state()
        assert list(replay(self._started(run.ensemble), records)) == []
        assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])

    @EXAMPLES
    @given(losses=RUNS, at=st.integers(0, CYCLES))
    def test_a_run_goes_on_bitwise_from_a_state_in_json(self, losses: Losses, at: int) -> None:
        """In a new controller, and in one that has seen another run. A state is a copy."""
        run = self._start().train(losses[:at])
        state = run.controller.state_dict()
        text = json.dumps(state)
        run.train(losses[at:])
        assert json.dumps(state) == text, "a state changes after it was taken"
        records = json.loads(json.dumps(run.records))
        for seen in ([], records):
            controller = self._started(run.ensemble)
            list(replay(controller, seen))
            controller.load_state_dict(json.loads(text))
            assert list(replay(controller, records[at:])) == []
            assert json.dumps(controller.state_dict()) == json.dumps(run.controller.state_dict())

    def test_a_state_that_lacks_a_key_is_refused_and_changes_nothing(self) -> None:
        controller = self._start().train([[1.0, 2.0, 3.0, 4.0]] * 3).controller
        before = json.dumps(controller.state_dict())
        for key in controller.state_dict().keys() - {"frozen"}:
            damaged = {name: x for name, x in controller.state_dict().items() if name != key}
            with pytest.raises(ValueError, match=key):
                controller.load_state_dict(damaged)
            assert json.dumps(controller.state_dict()) == before

    def test_it_has_a_name_of_its_own_and_a_report_in_words(self) -> None:
        controller = self._start().controller
        assert controller.name not in ("", "Controller") and isinstance(controller.report(), str)
        assert all(isinstance(of, Measurement) for of in controller.measurements.values())

    # -- runs --------------------------------------------------------------------------------------

    def _start(self) -> ToyRun:
        run = ToyRun()
        self.model = run.model
        run.attach(self.make())
        return run

    def _started(self, ensemble: Ensemble) -> Controller:
        controller = self.make()
        controller.start(ensemble.run)
        return controller


Losses = Sequence[Sequence[float | None]]


class ToyRun:
    """Cycles of three steps of four co-resident replicas, whose losses are made up."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model: nn.Module = nn.Linear(4, 1)
        self.replicas = CoresidentReplicas(self.model, REPLICAS)
        self.records: list[dict[str, Any]] = []
        self.values: list[list[float]] = []

    def attach(self, controller: Controller) -> None:
        self.controller = controller
        optimizer = self.optimizer = FusedAdamW(self.model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.01, total_steps=3 * CYCLES, cycle_momentum=False
        )
        self.ensemble = Ensemble(
            optimizer, scheduler, knobs=[LearningRate(0.3)], replicas=self.replicas, sync=Sync(3),
            controller=controller, log=lambda record, step: self.records.append(record),
        )  # fmt: skip

    def train(self, losses: Losses) -> ToyRun:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of replicas that are left out
            for row in losses:
                self._cycle(row)
        return self

    def _cycle(self, losses: Sequence[float | None]) -> None:
        for _ in range(3):
            self.optimizer.zero_grad()
            for k, loss in enumerate(losses):
                with self.replicas.use(k):
                    self.model(torch.ones(4)).square().sum().backward()
                    if loss is not None:
                        self.ensemble.observe(loss)
            self.optimizer.step()
            self.ensemble.step()
        self.values.append(list(self.ensemble.values().values()))
