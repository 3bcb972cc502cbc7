"""hdet/core against the reference's numbers: spread, softmax controller, both gammas, and the engine driven with made-up losses."""

import math

import pytest

from hdet.core import engine as engine_module
from hdet.core.clock import Clock
from hdet.core.engine import Engine, KnobSpec
from hdet.core.rules import SoftmaxController, softmax
from hdet.core.spread import assignment, multipliers
from tests.reference import make_golden, method, simulator
from tests.reference.simulator import Settings

close = pytest.approx


@pytest.mark.parametrize("case", make_golden.read("multipliers"), ids=lambda case: f"{case['count']}-{case['spread']:.2f}")
def test_multipliers(case):
    ours = multipliers(case["count"], case["spread"])
    assert ours == close(case["multipliers"], rel=1e-15, abs=1e-16)
    if case["spread"] == 0 or case["count"] == 1:
        assert ours == [1.0] * case["count"]  # exactly: spread 0 must be plain data-parallel training


@pytest.mark.parametrize("case", make_golden.read("gammas"))
def test_gammas(case):
    printed = softmax.gamma_printed(case["div_factor"], case["final_div_factor"], case["intervals"])
    assert printed == close(case["printed"], rel=1e-12)
    assert softmax.gamma_floor(case["base"], case["floor"], case["intervals"]) == close(case["corrected"], rel=1e-12)


@pytest.mark.parametrize("case", make_golden.read("softmax"), ids=lambda case: f"{case['count']} replicas")
def test_softmax_signal_and_update(case):
    velocity, base = 0.0, case["start"]
    for cycle in case["cycles"]:
        weights = softmax.softmax_weights(cycle["losses"], case["sigma"])
        delta = softmax.signal(weights, cycle["rates"])
        velocity, base = softmax.momentum_update(
            velocity, delta, base, momentum=case["beta"], step_size=case["step_size"], gamma=case["gamma"]
        )
        assert weights == close(cycle["weights"], rel=1e-12)
        assert delta == close(cycle["delta"], rel=1e-9, abs=1e-18)
        assert (velocity, base) == close((cycle["velocity"], cycle["base"]), rel=1e-11)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_assignments_are_fresh_permutations(count):
    orders = [assignment(0, cycle, knob, count) for cycle in range(12) for knob in ("lr", "weight_decay")]
    assert all(method.is_reassignment(order, count) for order in orders)
    assert assignment(0, 3, "lr", count) == assignment(0, 3, "lr", count)
    if count > 2:
        assert len({tuple(order) for order in orders}) > 3
        assert [assignment(1, cycle, "lr", count) for cycle in range(12)] != [assignment(0, cycle, "lr", count) for cycle in range(12)]


TRAJECTORIES = make_golden.read("trajectories")


@pytest.mark.parametrize("name", [name for name, run in TRAJECTORIES.items() if run["settings"]["controller"]])
def test_engine_follows_the_golden_trajectory(name, monkeypatch):
    """The controller's whole run: the golden losses go in, the golden corrections and base values must come out."""
    run = TRAJECTORIES[name]
    settings = Settings(**run["settings"])
    monkeypatch.setattr(engine_module, "assignment", lambda seed, cycle, knob, count: simulator.order(settings, cycle))
    controller = SoftmaxController(settings.sigma, settings.step_size, settings.momentum, settings.decay)
    clock = Clock(settings.interval, settings.warmup, settings.steps)
    engine = Engine([KnobSpec("lr", settings.spread)], settings.replicas, clock, controller)
    scheduled = make_golden.one_cycle_rates(settings)
    rates, cycles = [], list(run["cycles"])
    for step in range(settings.steps):
        rates.append(engine.value(0, scheduled[step]))
        if not engine.tick():
            continue
        golden = cycles.pop(0)
        assert engine.step == golden["step"]
        assert engine.multipliers()[0] == close(golden["multipliers"], rel=1e-14)
        now = scheduled[min(step + 1, settings.steps - 1)]
        engine.close(golden["losses"], scheduled=[now], peak=[max(scheduled)], floor=[min(scheduled)])
        assert engine.corrections[0] == close(golden["correction"], rel=1e-11)
        assert engine.held[0] == (None if golden["base"] is None else close(golden["base"], rel=1e-9))
    assert not cycles
    assert rates == close(run["rates"], rel=1e-9)


def test_a_missing_loss_is_masked_as_in_the_reference():
    """Eq. 3 to 6 over the replicas that are left: the softmax and the mean rate both run over those alone."""
    controller = SoftmaxController(0.1, 0.5, 0.0, None)
    engine = Engine([KnobSpec("lr", 0.3)], 4, Clock(1), controller)
    rho, losses = engine.multipliers()[0], [2.0, math.nan, 2.1, 1.9]
    engine.tick()
    engine.close(losses, scheduled=[1.0])
    kept = [0, 2, 3]
    weights = method.softmax(method.scores([losses[r] for r in kept], 0.1))
    delta = method.signal(weights, [rho[r] for r in kept])
    assert delta != 0
    assert engine.corrections[0] == close(math.exp(0.5 * delta), rel=1e-12)
