"""The engine without tensors: evidence, corrections, missing losses, state."""

import json
import math
from typing import Any

import pytest

from hdet.controllers.softmax import SoftmaxController
from hdet.core.clock import Clock
from hdet.core.controller import Controller
from hdet.core.engine import Engine
from hdet.core.evidence import Evidence
from hdet.core.plan import Decision
from hdet.core.scale import Scale
from hdet.core.value import Value

from .controller_runs import close, value_of


class Scripted(Controller):
    """A controller that keeps what it sees and answers with given decisions."""

    def __init__(self, *decisions: Decision) -> None:
        super().__init__()
        self.decisions, self.seen = decisions, []  # type: ignore[var-annotated]

    def decide(self, evidence: Evidence) -> list[Decision]:
        self.seen.append(evidence)
        return list(self.decisions)


def engine(replicas: int = 2, controller: Controller | None = None, **settings: Any) -> Engine:
    return Engine([Value("lr", 0.3)], replicas, Clock(2), controller, **settings)


def run_cycle(engine: Engine, losses: list[float | None], **kwargs: Any) -> Any:
    while not engine.tick():
        pass
    return close(engine, losses, **kwargs)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_a_loss_that_is_not_finite_never_reaches_the_controller(bad: float | None) -> None:
    controller = Scripted(Decision())
    outcome = run_cycle(engine(3, controller), [1.0, bad, 2.0])
    assert controller.seen[0].losses == [1.0, None, 2.0]
    assert outcome.left_out == [1] and "replica 1" in outcome.notes[0]


def test_a_loop_without_losses_is_told_once_where_a_controller_reads_them() -> None:
    run = engine(2, Scripted(Decision()))
    notes = [run_cycle(run, [None, None]).notes for _ in range(2)]
    assert notes == [["no finite loss was passed to step() in this cycle: pass step(loss)"], []]
    still = Engine([Value("lr", 0.0)], 2, Clock(2), Scripted(Decision()))
    for silent in (engine(2), still):
        assert run_cycle(silent, [None, None]).notes == []


@pytest.mark.parametrize(
    "row",
    [[1.0, math.nan], [math.inf, -math.inf], [1.0, -math.inf], [1e308, 1e308], [1e308, -1e308]],
)
def test_one_bad_chunk_leaves_the_whole_probe_row_out_and_large_numbers_do_not(
    row: list[float],
) -> None:
    """Cosines need no loss; without a measurement it is the loss for which one is left out."""
    controller, bad = Scripted(Decision()), not all(map(math.isfinite, row))
    outcome = run_cycle(engine(2, controller), [None, None], measured={"probe": [[1.0, 2.0], row]})
    assert controller.seen[0].measured == {"probe": [[1.0, 2.0], None if bad else row]}
    left_out = "replica 1 left out: its probe is missing or not finite"
    assert outcome.notes == ([left_out] if bad else [])


def test_a_decay_goes_on_from_a_rate_that_was_lowered() -> None:
    """A cycle is taken back: Eq. 7 goes on from there."""
    own = Engine([Value("lr", 0.1)], 2, Clock(1, 0, 100), SoftmaxController(decay="floor"))
    run_cycle(own, [1.0, 1.0], floor=[1e-3])
    before = value_of(own, 1.0)
    own.tick()
    own.roll_back(0.1)
    assert value_of(own, 1.0) == pytest.approx(0.1 * before)
    run_cycle(own, [1.0, 1.0], floor=[1e-3])
    assert value_of(own, 1.0) == pytest.approx(0.1 * before, rel=0.2)


def test_a_cycle_taken_back_lowers_rates_alone() -> None:
    own = Engine([Value("lr", 0.1), Value("eps", 0.1, rate=False)], 2, Clock(2))
    own.roll_back(0.5)
    assert [value.correction for value in own.values] == [0.5, 1.0]


def test_multipliers_are_drawn_once_a_cycle_and_again_after_a_load() -> None:
    one, other = engine(8, seed=5), engine(8, seed=6)
    table = one.multipliers()
    assert table != other.multipliers()
    one.tick()
    assert one.multipliers() is table
    other.load_state_dict(one.state_dict())
    assert other.multipliers() == table
    assert run_cycle(one, [1.0] * 8).multipliers == table != one.multipliers()


def test_a_runaway_correction_is_held_and_noted() -> None:
    own = engine(2, Scripted(Decision(factor=1e4)))
    notes = [note for _ in range(3) for note in run_cycle(own, [1.0, 2.0]).notes]
    assert own.values[0].correction == 1e6
    assert "held at" in notes[0]


def test_the_controller_sees_the_multipliers_that_acted_and_corrections_end_at_the_bounds() -> None:
    controller = Scripted(Decision(factor=4.0), Decision(factor=0.5))
    knobs = [Value("bounded", 0.5, Scale("log", low=0.1, high=1.25)), Value("free", 0.5)]
    own = Engine(knobs, 4, Clock(1), controller, design="orthogonal")
    drawn = own.multipliers()
    outcome = run_cycle(own, [1.0] * 4)
    seen: Evidence = controller.seen[0]
    assert seen.multipliers[0] == [1.25 if rho == 1.5 else 0.5 for rho in drawn[0]]
    assert seen.multipliers[1] == drawn[1]
    assert [value.correction for value in own.values] == [1.25, 0.5]
    assert value_of(own, 1.0) == 1.25
    assert any("bounded: correction 4 held at 1.25" in note for note in outcome.notes)


def test_a_decision_moves_a_value_on_its_scale() -> None:
    knobs = [Value("a", 0.5, Scale("linear", unit=0.1))]
    own = Engine(knobs, 2, Clock(1), Scripted(Decision(factor=math.e)))
    run_cycle(own, [1.0, 2.0])
    assert value_of(own, 0.3) == pytest.approx(0.4)


# -- state -----------------------------------------------------------------------------------------


def test_state_is_plain_and_loads_with_another_number_of_replicas() -> None:
    own = engine(4, SoftmaxController(decay=None), seed=5)
    for _ in range(3):
        run_cycle(own, [1.0, 0.8, 0.9, 1.1])
    state = json.loads(json.dumps(own.state_dict()))
    other = engine(8, SoftmaxController(decay=None), seed=99)
    other.load_state_dict(state)
    assert other.state_dict() == state and own.values[0].correction != 1.0
    assert (other.cycle, other.step, other.seed) == (3, 6, 5)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.update(version=99), "version 99"),
        (lambda s: s.pop("level"), "lacks 'level'"),
        (lambda s: s.update(knobs=["wd"]), "knobs"),
        (lambda s: s.update(controller="probe"), "controller"),
        (lambda s: s["controller_state"].pop("velocities"), "velocities"),
        (lambda s: s.update(seed="x"), "seed of the ensemble's state is 'x', but a whole number"),
    ],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(
    damage: Any, message: str
) -> None:
    donor, own = (engine(2, SoftmaxController(decay=None)) for _ in range(2))
    run_cycle(donor, [1.0, 0.5])
    state, before = donor.state_dict(), own.state_dict()
    damage(state)
    with pytest.raises(ValueError, match=message):
        own.load_state_dict(state)
    assert own.state_dict() == before
