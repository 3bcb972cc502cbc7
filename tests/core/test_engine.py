"""The engine without tensors: evidence, corrections, missing losses, state."""

import json
import math
from typing import Any

import pytest

from hdet.controllers.softmax import SoftmaxController
from hdet.core.clock import Clock
from hdet.core.controller import Controller
from hdet.core.engine import Engine, KnobSpec
from hdet.core.evidence import Evidence
from hdet.core.plan import Decision


class Scripted(Controller):
    """A controller that keeps what it sees and answers with given decisions."""

    name = "scripted"

    def __init__(self, *decisions: Decision) -> None:
        super().__init__()
        self.decisions, self.seen = decisions, []  # type: ignore[var-annotated]

    def decide(self, evidence: Evidence) -> list[Decision]:
        self.seen.append(evidence)
        return list(self.decisions)


def run_cycle(engine: Engine, losses: list[float | None], **kwargs: Any) -> Any:
    while not engine.tick():
        pass
    return engine.close(losses, scheduled=[1.0] * len(engine.knobs), **kwargs)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_a_loss_that_is_not_finite_never_reaches_the_controller(bad: float | None) -> None:
    controller = Scripted(Decision())
    engine = Engine([KnobSpec("lr", 0.1)], 3, Clock(1), controller)
    outcome = run_cycle(engine, [1.0, bad, 2.0])
    assert controller.seen[0].losses == [1.0, None, 2.0]
    assert outcome.left_out == [1] and "replica 1" in outcome.notes[0]


@pytest.mark.parametrize(
    "row",
    [[1.0, math.nan], [math.inf, -math.inf], [1.0, -math.inf], [1e308, 1e308], [1e308, -1e308]],
)
def test_one_bad_chunk_leaves_the_whole_probe_row_out_and_large_numbers_do_not(
    row: list[float],
) -> None:
    controller, bad = Scripted(Decision()), not all(map(math.isfinite, row))
    engine = Engine([KnobSpec("lr", 0.1)], 2, Clock(1), controller)
    outcome = run_cycle(engine, [1.0, 1.0], measured={"probe": [[1.0, 2.0], row]})
    assert controller.seen[0].measured == {"probe": [[1.0, 2.0], None if bad else row]}
    assert outcome.left_out == ([1] if bad else [])


def test_what_a_replica_is_left_out_for_is_what_the_controller_reads() -> None:
    """Cosines need no loss; without them it is the loss, or the probe's row."""
    controller = Scripted(Decision())
    engine = Engine([KnobSpec("lr", 0.1)], 2, Clock(1), controller)
    outcome = run_cycle(engine, [None, None], measured={"cosines": [[0.1, 0.2], [math.nan, 0.2]]})
    assert outcome.left_out == [1] and outcome.notes == ["replica 1 left out: no finite cosines"]
    outcome = run_cycle(engine, [1.0, None], measured={"probe": [[1.0], [2.0]]})
    assert outcome.left_out == [] and outcome.notes == []


@pytest.mark.parametrize("decay", ["floor", "printed"])
def test_a_cycle_that_is_taken_back_stays_lower_under_the_softmax_controller(decay: str) -> None:
    engine = Engine(
        [KnobSpec("lr", 0.2, rate=True)],
        2,
        Clock(1, total_steps=100),
        SoftmaxController(decay=decay),
    )

    def cycle() -> float:
        run_cycle(engine, [1.0, 1.0], floor=[1e-4], peak=[1.0])
        return engine.value(0, 1.0)

    before = [cycle() for _ in range(3)][-1]
    engine.tick()
    engine.roll_back(0.1)
    assert engine.value(0, 1.0) == pytest.approx(0.1 * before)
    after = cycle()
    assert after == pytest.approx(0.1 * before, rel=0.2)  # Eq. 7 goes on from there


def test_multipliers_are_drawn_once_a_cycle_and_again_after_a_load() -> None:
    engine, other = (Engine([KnobSpec("lr", 0.3)], 8, Clock(2), seed=seed) for seed in (5, 6))
    table = engine.multipliers()
    assert table != other.multipliers()
    engine.tick()
    assert engine.multipliers() is table
    other.load_state_dict(engine.state_dict())
    assert other.multipliers() == table
    engine.tick()
    assert (
        engine.close([1.0] * 8, scheduled=[1.0]).multipliers is table
        and engine.multipliers() != table
    )


def test_a_runaway_correction_is_held_and_noted() -> None:
    engine = Engine([KnobSpec("lr", 0.3)], 2, Clock(1), Scripted(Decision(factor=1e4)))
    notes = [run_cycle(engine, [1.0, 2.0]).notes for _ in range(3)]
    assert engine.corrections == [1e6]
    assert "held at" in notes[1][0] or "held at" in notes[2][0]


@pytest.mark.parametrize(
    "decision",
    [{"factor": 0.0}, {"factor": -1.0}, {"factor": math.nan}, {"value": math.inf}, {"value": 0.0}],
)
def test_a_decision_that_would_kill_the_run_cannot_be_made(decision: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="finite and positive"):
        Decision(**decision)


def test_state_is_plain_and_loads_with_another_number_of_replicas() -> None:
    engine = Engine([KnobSpec("lr", 0.3)], 4, Clock(2), SoftmaxController(decay=None), seed=5)
    for _ in range(3):
        run_cycle(engine, [1.0, 0.8, 0.9, 1.1])
    state = json.loads(json.dumps(engine.state_dict()))
    other = Engine([KnobSpec("lr", 0.3)], 8, Clock(2), SoftmaxController(decay=None), seed=99)
    other.load_state_dict(state)
    assert other.corrections == engine.corrections != [1.0]
    assert (other.cycle, other.step, other.seed) == (3, 6, 5)
    assert other.controller.state_dict() == engine.controller.state_dict()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.update(version=99), "version 99"),
        (lambda s: s.pop("corrections"), "lacks 'corrections'"),
        (lambda s: s.update(knobs=["wd"]), "knobs"),
        (lambda s: s.update(controller="probe"), "controller"),
        (lambda s: s["controller_state"].pop("velocities"), "velocities"),
    ],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(
    damage: Any, message: str
) -> None:
    def fresh() -> Engine:
        return Engine([KnobSpec("lr", 0.3)], 2, Clock(2), SoftmaxController(decay=None))

    donor = fresh()
    run_cycle(donor, [1.0, 0.5])
    state = donor.state_dict()
    damage(state)
    engine = fresh()
    before = engine.state_dict()
    with pytest.raises(ValueError, match=message):
        engine.load_state_dict(state)
    assert engine.state_dict() == before


@pytest.mark.parametrize("knobs", [[], [KnobSpec("lr", 0.1), KnobSpec("lr", 0.2)]])
def test_knobs_must_exist_and_differ(knobs: list[KnobSpec]) -> None:
    with pytest.raises(ValueError, match="knobs"):
        Engine(knobs, 2, Clock(1))
