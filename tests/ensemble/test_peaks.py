"""The peak of a schedule, and what a rollback does to a rise under way."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import hdet
from hdet.core.clock import Clock
from hdet.core.engine import Engine, KnobSpec


class _Doubles(hdet.Controller):
    name = "doubles"

    def decide(self, evidence: hdet.Evidence) -> list[hdet.Decision]:
        return [hdet.Decision(factor=8.0, ramp=8)]


def test_a_lambda_schedule_s_peak_is_its_highest_factor_s() -> None:
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p], lr=1.0)
    noam = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.008 * min((step + 1) / 10, (10 / (step + 1)) ** 0.5))
    ensemble = hdet.Ensemble(optimizer, noam, total_steps=200)
    assert ensemble.schedule.peaks_and_floors()[0] == [pytest.approx(0.008)]


def test_a_rollback_lowers_what_is_in_force_and_not_what_was_on_its_way() -> None:
    engine = Engine([KnobSpec("lr", 0.0)], 1, Clock(2, total_steps=100), _Doubles())
    engine.tick(), engine.tick()
    engine.close([1.0], scheduled=[1.0])
    assert engine.corrections == [8.0] and engine.in_force(0) == pytest.approx(8 ** (1 / 8))
    before = engine.in_force(0)
    engine.roll_back(0.5)
    assert engine.in_force(0) == pytest.approx(before / 2)


@pytest.mark.parametrize(
    "ramps", [[[1.0, "x", 0]], [[1.0, 0, 0], [1.0, 0, 0]], [[0.0, 0, 0]], [[math.inf, 0, 0]], [[1.0, -1, 0]], [[1.0, 0]], [1.0]]
)
def test_a_damaged_easing_is_refused_before_anything_changes(ramps: list[Any]) -> None:
    engine = Engine([KnobSpec("lr", 0.0)], 1, Clock(2, total_steps=100), _Doubles())
    state = {**engine.state_dict(), "ramps": ramps, "corrections": [3.0]}
    with pytest.raises(ValueError, match="ramps"):
        engine.load_state_dict(state)
    assert engine.corrections == [1.0]
