"""hdet/core against the reference: spread, softmax controller, both gammas.

(Whole runs: test_runs.py.)
"""

import math
import random

import pytest

from hdet.controllers import softmax
from hdet.controllers.softmax import SoftmaxController
from hdet.core.clock import Clock
from hdet.core.engine import Engine
from hdet.core.spread import assignment, multipliers
from hdet.core.value import Value
from tests.reference import method

close = pytest.approx


@pytest.mark.parametrize("spread", [0.0, 1 / 9, 0.3, 0.5, 0.99])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 16])
def test_multipliers(count, spread):
    ours = multipliers(count, spread)
    assert ours == close(method.multipliers(count, spread), rel=1e-15, abs=1e-16)
    if spread == 0 or count == 1:
        assert ours == [1.0] * count  # exactly: spread 0 must be plain data-parallel training


@pytest.mark.parametrize(
    ("steps", "warmup", "interval"), [(200_000, 100_000, 1000), (2000, 0, 50), (90, 30, 20)]
)
@pytest.mark.parametrize(("div", "final_div"), [(25.0, 1e4), (10.0, 100.0), (4.0, 2.0)])
def test_gammas(div, final_div, steps, warmup, interval):
    intervals, peak = method.intervals_left(steps, warmup, interval), 9e-4
    floor = peak / (div * final_div)
    corrected = method.gamma_corrected(floor, peak, intervals)
    assert softmax.gamma_floor(peak, floor, intervals) == close(corrected, rel=1e-12)


@pytest.mark.parametrize(
    ("count", "sigma", "beta", "step_size", "gamma"),
    [(2, 0.1, 0.9, 0.5, 0.0), (4, 0.1, 0.9, 0.5, 0.02), (8, 0.002, 0.5, 1.0, -0.06),
     (5, 3.0, 0.0, 0.1, 0.5)],
)  # fmt: skip
def test_softmax_signal_and_update(count, sigma, beta, step_size, gamma):
    """Eq. 4 to 6 over several cycles with made-up losses: base and velocity go on from one cycle
    to the next."""
    velocity, base, draw = 0.0, 9e-4, random.Random(count)
    for _ in range(6):
        losses = [draw.uniform(2.3, 2.7) for _ in range(count)]
        rates = [base * rho for rho in method.multipliers(count, 1 / 9)]
        weights = method.softmax(method.scores(losses, sigma))
        delta = method.signal(weights, rates)
        assert softmax.softmax_weights(losses, sigma) == close(weights, rel=1e-12)
        assert softmax.signal(weights, rates) == close(delta, rel=1e-9, abs=1e-18)
        rule = {"momentum": beta, "step_size": step_size, "gamma": gamma}
        ours = softmax.momentum_update(velocity, delta, base, **rule)
        velocity = method.velocity_update(velocity, delta, beta)
        base = method.base_update(base, gamma, step_size, velocity)
        assert ours == close((velocity, base), rel=1e-11)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_assignments_are_fresh_permutations(count):
    drawn = lambda seed, knob: [assignment(seed, cycle, knob, count) for cycle in range(12)]
    orders = drawn(0, "lr") + drawn(0, "weight_decay")
    assert all(method.is_reassignment(order, count) for order in orders)
    assert drawn(0, "lr") == drawn(0, "lr")
    if count > 2:
        assert len({tuple(order) for order in orders}) > 3 and drawn(1, "lr") != drawn(0, "lr")


def test_a_missing_loss_is_masked_as_in_the_reference():
    """Eq. 3 to 6 over the replicas that are left: the softmax and the mean rate both run over
    those alone."""
    controller = SoftmaxController(0.1, 0.5, 0.0, None)
    engine = Engine([Value("lr", 0.3)], 4, Clock(1), controller)
    rho, losses = engine.multipliers()[0], [2.0, math.nan, 2.1, 1.9]
    engine.tick()
    engine.close(losses)
    kept = [0, 2, 3]
    weights = method.softmax(method.scores([losses[r] for r in kept], 0.1))
    delta = method.signal(weights, [rho[r] for r in kept])
    assert delta != 0
    assert engine.values[0].correction == close(math.exp(0.5 * delta), rel=1e-12)
