"""Every controller on a loss whose best value is known to be 1: it walks there from far, stays
there, and listens near the peak only."""

from __future__ import annotations

import math

import pytest

from hdet.controllers.probe_rule import ProbeRule
from tests.core.controller_runs import bowl, end_of
from tests.core.test_controllers_base import ALL


@pytest.mark.parametrize("start", [1 / 30, 1 / 3, 3.0, 30.0])
@pytest.mark.parametrize("name", ALL)
def test_it_walks_to_the_best_value_from_far_below_and_far_above(name: str, start: float) -> None:
    assert 0.75 < end_of(bowl(ALL[name](), [start], shared=0.1))[0] < 1.35


@pytest.mark.parametrize("name", ALL)
def test_it_is_harmless_at_the_best_value(name: str) -> None:
    for seed in range(5):
        for _, _, values in bowl(ALL[name](), shared=0.1, seed=seed):
            assert 0.7 < values[0] < 1.4


def test_noise_alone_moves_it_little() -> None:
    """120 cycles of a loss that does not depend on the value."""
    ends = sorted(
        abs(math.log(end_of(bowl(ProbeRule(), depth=0.0, cycles=120, seed=seed))[0]))
        for seed in range(8)
    )
    assert ends[4] < 0.3 and ends[-1] < 1.0


def test_several_knobs_are_told_apart() -> None:
    low, high = end_of(bowl(ProbeRule(), [0.1, 10.0], replicas=8))
    assert 0.75 < low < 1.35 and 0.75 < high < 1.35


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_a_replica_without_a_loss_is_left_out_and_the_others_go_on(bad: float | None) -> None:
    def spoil(cycle: int, losses: list[float | None]) -> list[float | None]:
        return [bad if r == cycle % 8 else x for r, x in enumerate(losses)]

    assert 0.75 < end_of(bowl(ALL["softmax"](), [0.1], replicas=8, spoil=spoil))[0] < 1.35


def test_it_stays_within_its_bound() -> None:
    assert end_of(bowl(ProbeRule(bound=3.0), [0.01]))[0] == pytest.approx(0.03)
    assert end_of(bowl(ProbeRule(bound=3.0), [100.0]))[0] == pytest.approx(100 / 3)


def test_it_is_calm_in_the_schedules_warm_up_and_decay_and_then_rests() -> None:
    """Also after a load."""

    def phase(part: float) -> float:
        return min(1.0, part / 0.3, (1 - part) / 0.3)

    history = list(bowl(ProbeRule(), [1 / 30], phase=phase))
    moved = [outcome.decisions[0].factor != 1.0 for _, outcome, _ in history]
    assert not any(moved[:17]) and any(moved[18:42]) and not any(moved[45:])
    assert not history[-1][0].explores
    assert {tuple(outcome.multipliers[0]) for _, outcome, _ in history[46:]} == {(1.0,) * 4}
    engine, *_ = next(bowl(ProbeRule(), [1 / 30]))
    assert engine.explores
    engine.load_state_dict(history[-1][0].state_dict())
    assert not engine.explores and engine.multipliers() == [[1.0] * 4]


@pytest.mark.parametrize(
    "setting",
    [
        {"step": 0}, {"step": "a"}, {"step": True}, {"dead": -1}, {"dead": math.nan},
        {"bound": None}, {"bound": 1.0},
    ],
)  # fmt: skip
def test_settings_are_validated(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        ProbeRule(**setting)
