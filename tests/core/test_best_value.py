"""BestValueController on the real engine: what it chooses, what it follows, when it rests."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hdet.controllers.best_value import BestValueController
from hdet.core.clock import Clock
from hdet.core.engine import CycleOutcome, Engine
from hdet.core.evidence import Run
from hdet.core.scale import Scale
from hdet.core.spread import Grid
from hdet.core.value import Value
from tests.core.controller_runs import close

GIVEN = Grid(multipliers=[1.0, 0.5, 0.1, 5.0])
Loss = Callable[[float], float | None]


class Made:
    """A run whose losses are functions of the values that replicas try."""

    def __init__(
        self,
        grids: Sequence[Grid] = (GIVEN,),
        *,
        count: int = 4,
        scale: Scale | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        values = [Value(f"k{k}", grid, scale) for k, grid in enumerate(grids)]
        self.controller = BestValueController(**settings)
        self.engine = Engine(values, count, Clock(1), self.controller, seed)
        floors = [0.0] * len(values)
        facts = Run(self.engine.clock, self.engine.knobs, count, floors, seed=seed)
        self.controller.start(facts)
        self.broken: int | None = None
        """A replica that has no loss."""

    def cycle(self, loss: Loss, **schedule: Any) -> CycleOutcome:
        """``loss``: of the first knob's value."""
        self.engine.tick()
        [value, *_], [row, *_] = self.engine.values, self.engine.multipliers()
        tried = [value.scale.fanned(value.base_value(), rho) for rho in row]
        losses = [None if r == self.broken else loss(x) for r, x in enumerate(tried)]
        return close(self.engine, losses, **schedule)

    def cycles(self, count: int, loss: Loss) -> list[CycleOutcome]:
        return [self.cycle(loss) for _ in range(count)]

    @property
    def base(self) -> float:
        value = self.engine.values[0]
        value.correct()
        return value.base_value()


def bowl(best: float) -> Loss:
    return lambda value: math.log(value / best) ** 2


@pytest.mark.parametrize("best", [1.0, 0.5, 0.1, 5.0])
@pytest.mark.parametrize("count", [4, 8])
def test_the_base_value_moves_to_the_best_value_in_one_decision(best: float, count: int) -> None:
    """Each is tried by as many replicas, by others in each cycle; afterwards they are near it."""
    run = Made(count=count)
    before = run.cycles(4, bowl(best))
    assert run.base == best
    tables = [outcome.multipliers[0] for outcome in before]
    assert all(sorted(row) == sorted([*GIVEN.listed] * (count // 4)) for row in tables)
    assert len(set(map(tuple, tables))) > 1
    assert f"{best:g} was better" in before[-1].notes[0] and not any(o.notes for o in before[:-1])
    after = [outcome.multipliers[0] for outcome in run.cycles(4, lambda value: 1.0)]
    assert all(sorted(row) == [0.9] * (count // 2) + [1.1] * (count // 2) for row in after)
    assert len(set(map(tuple, after))) > 1 and run.base == best


def test_it_takes_several_decisions_to_follow_further() -> None:
    run = Made(spread=0.2, cycles=2)
    run.cycles(2 + 4 * 2, bowl(8.0))
    assert run.base == pytest.approx(5 * 1.2**3), "one step above the best, and one back is worse"


@pytest.mark.parametrize("lost", [None, math.nan])
def test_a_value_with_a_loss_that_is_missing_never_wins(lost: float | None) -> None:
    """Also of one of its replicas in one cycle."""
    run, losses = Made(count=8), iter([lost, *[0.0] * 99])
    run.cycles(4, lambda value: next(losses) if value == 5 else 1 + bowl(0.5)(value))  # type: ignore[operator]
    assert run.base == 0.5
    run = Made()
    for value in GIVEN.listed:  # each in another cycle
        last = run.cycle(lambda tried: lost if tried == value else bowl(5.0)(tried))  # noqa: B023
    assert run.base == 1.0 and "no value had finite losses" in last.notes[-1]
    run = Made()
    run.cycles(8, lambda value: lost)
    assert run.base == 1.0 and not run.controller.has_chosen
    run.cycles(4, bowl(0.5))
    assert run.base == 0.5


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("count", "bases"), [(4, (1.0, 0.5)), (8, (0.5,))])
def test_a_replica_that_never_has_a_loss_decides_nothing(
    count: int, bases: Sequence[float], seed: int
) -> None:
    """The best wins or, where nobody else has tried its values, none; and no half is better."""
    run = Made(count=count, seed=seed)
    run.broken = 1
    run.cycles(4, bowl(0.5))
    chosen = run.base
    run.cycles(8, lambda value: 1.0)
    assert run.base == chosen and chosen in bases


@pytest.mark.parametrize("lost", [0.9, 1.1])
@pytest.mark.parametrize("count", [2, 4, 9])
def test_of_halves_a_loss_that_is_missing_is_no_evidence(count: int, lost: float) -> None:
    """It neither keeps its half from winning nor makes the other one win. Of two replicas such a
    cycle does not count."""

    def base_after(loss: Loss, *is_lost: bool) -> float:
        run = Made([Grid(0.1)], count=count)
        for is_lost_now in is_lost:
            run.broken = run.engine.multipliers()[0].index(lost) if is_lost_now else None
            run.cycle(loss)
        return run.base

    assert base_after(lambda value: 1.0, *[True] * 4) == 1.0
    for best, half in ((0.5, 0.9), (5.0, 1.1)):
        assert base_after(bowl(best), False, True, True, False, False, False) == half


@pytest.mark.parametrize("highest", [3.0, 3.99, 4.9])
@pytest.mark.parametrize("best", [0.1, 0.5, 5.0])
def test_a_value_that_a_bound_holds_back_can_win_under_a_schedule_that_moves(
    best: float, highest: float
) -> None:
    """Also where the bound makes two of them one in some cycles."""
    grid = Grid(multipliers=[0.1, 0.5, 4.0, 5.0])
    run = Made([grid], scale=Scale("log", low=0.01, high=highest), spread=0)
    for scheduled in (1.0, 0.99, 0.97, 0.95):
        run.engine.values[0].follow([scheduled])
        run.cycle(bowl(best), scheduled=[scheduled], peak=[1.0])
    assert run.base == pytest.approx(min(best, highest) * scheduled, rel=0.02)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_of_another_number_of_replicas_it_watches_anew(count: int) -> None:
    """Where the grid has other points then."""
    run, other = Made([Grid(ratio=8.0)], spread=0), Made([Grid(ratio=8.0)], count=count, spread=0)
    run.cycles(2, bowl(8.0))
    with other.engine.taken_over(json.loads(json.dumps(run.engine.state_dict()))):
        pass
    other.cycles(3, bowl(8.0))
    assert other.base == 1.0
    other.cycles(1, bowl(8.0))
    assert other.base == pytest.approx(8.0)


def test_halves_differ_by_chance_in_the_part_of_decisions_that_is_said() -> None:
    draw, run, decisions = random.Random(0), Made([Grid(0.1)], cycles=4), 1500
    outcomes = run.cycles(4 * decisions, lambda value: draw.gauss(0, 1))
    moves = sum(outcome.decisions[0].factor != 1 for outcome in outcomes)
    expected = decisions * 2 / 2**4
    assert abs(moves - expected) < 5 * math.sqrt(expected)
    assert {outcome.decisions[0].factor for outcome in outcomes} == {0.9, 1.0, 1.1}


def test_noise_of_the_data_is_averaged_out() -> None:
    """Of a value that is better by one standard deviation of a cycle's loss."""
    found = []
    for seed in range(100):
        draw, run = random.Random(seed), Made(seed=seed)
        run.cycles(4, lambda value: draw.gauss(0.0 if value == 5 else 1.0, 1.0))  # noqa: B023
        found.append(run.base)
    assert found.count(5.0) > 75


@pytest.mark.parametrize("best", [0.3, 0.4, 0.5])
@pytest.mark.parametrize("kind", ["log", "linear", "horizon"])
def test_the_base_value_becomes_the_replicas_on_each_scale(kind: str, best: float) -> None:
    run = Made([Grid(values=[0.3, 0.4, 0.5])], scale=Scale(kind, 0.2), count=3)
    run.engine.values[0].follow([0.4])
    for _ in range(4):
        run.cycle(lambda value: abs(value - best), scheduled=[0.4])
    assert run.base == pytest.approx(best)


def test_a_knob_with_a_spread_keeps_it_and_waits_for_the_one_that_chooses() -> None:
    run = Made([Grid(0.3), GIVEN], count=4)
    first, second = run.cycles(4, bowl(9.0))[-1].decisions
    assert first.factor == 1.0 and second.factor != 1.0
    rows = run.engine.multipliers()
    assert [sorted(row) for row in rows] == [[0.7, 0.7, 1.3, 1.3], [0.9, 0.9, 1.1, 1.1]]
    assert run.cycles(4, bowl(9.0))[-1].decisions[0].factor == 1.3


def test_an_odd_replica_trains_at_the_base_value() -> None:
    assert sorted(Made([Grid(0.2)], count=5).engine.multipliers()[0]) == [0.8, 0.8, 1, 1.2, 1.2]


def test_with_spread_0_it_chooses_once_and_rests() -> None:
    run = Made(spread=0)
    run.cycles(4, bowl(0.5))
    assert run.controller.idle and not run.engine.explores and run.base == 0.5
    assert "rests" in run.controller.report()


def test_what_was_watched_at_another_base_value_does_not_count() -> None:
    """A cycle was rolled back, or somebody has set the value."""
    run = Made()
    run.cycles(3, bowl(5.0))
    run.engine.roll_back(0.5)
    assert [o.decisions[0].factor for o in run.cycles(4, bowl(0.25))] == [1, 1, 1, 0.5]


def test_only_cycles_near_the_peak_count_and_past_it_replicas_train_alike() -> None:
    run, high = Made(), {"peak": [1.0]}
    for _ in range(6):
        run.cycle(bowl(5.0), scheduled=[0.2], **high)
    assert run.engine.explores and not run.controller.window
    for _ in range(3):
        run.cycle(bowl(5.0), scheduled=[1.0], **high)
    with pytest.warns(UserWarning, match="'BestValueController' has seen 4 cycles near it"):
        run.cycle(bowl(5.0), scheduled=[0.5], **high)
    assert run.controller.idle and not run.engine.explores and run.base == 0.5


def test_replicas_that_train_alike_until_the_schedule_rises_again_say_nothing() -> None:
    """CosineAnnealingWarmRestarts: a cycle begins far from the peak, and ends near it."""
    run, high = Made(), {"peak": [1.0]}
    run.cycle(bowl(5.0), scheduled=[1.0], **high)
    with pytest.warns(UserWarning, match="has seen 4 cycles near it"):
        run.cycle(bowl(5.0), scheduled=[0.5], **high)
    for scheduled in (0.5, 1.0, 1.0, 1.0):
        run.cycle(bowl(5.0), scheduled=[scheduled], **high)
    assert len(run.controller.window) == 3 and not run.controller.has_chosen
    run.cycle(bowl(5.0), scheduled=[1.0], **high)
    assert run.base == 5.0


@pytest.mark.parametrize("watched", range(1, 8))
def test_a_state_goes_on_with_another_number_of_replicas(watched: int) -> None:
    """Also from the middle of what is watched: groups are known by their values."""
    few, many = Made(count=4), Made(count=8)
    few.cycles(watched, bowl(0.5))
    state = json.loads(json.dumps(few.engine.state_dict()))
    with many.engine.taken_over(state):
        pass
    many.engine.values[0].correction = few.engine.values[0].correction
    for run in (few, many):
        run.cycles(8 - watched, bowl(0.5))
    assert many.base == few.base == 0.5
    assert many.controller.state_dict() == few.controller.state_dict()


@pytest.mark.parametrize(
    "damage", [{"window": [[[[1.0]]]]}, {"window": 3}, {"corrections": [0.0]}, {"cycle": -1}]
)
def test_a_damaged_state_is_refused(damage: dict[str, Any]) -> None:
    run = Made()
    run.cycles(3, bowl(0.5))
    with pytest.raises(ValueError, match=f"{next(iter(damage))}.*damaged"):
        run.controller.load_state_dict({**run.controller.state_dict(), **damage})
