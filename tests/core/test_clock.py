"""When cycles end, when the controller acts, and which settings are refused."""

from typing import Any

import pytest

from hdet.controllers.probe_rule import ProbeRule
from hdet.core.clock import Clock
from hdet.core.engine import Engine
from hdet.core.value import Value


@pytest.mark.parametrize(
    ("name", "least", "wrong"),
    [
        ("sync_interval", 1, (0, -1, 2.5, True, "50", None)),
        ("warmup_steps", 0, (-1, 1.5, None)),
        ("total_steps", 1, (0, -5, 1.5)),
    ],
)
def test_what_is_no_number_of_steps_is_refused(
    name: str, least: int, wrong: tuple[Any, ...]
) -> None:
    for value in wrong:
        with pytest.raises(ValueError, match=f"{name} must be a whole number of steps >= {least}"):
            Clock(**{"sync_interval": 10, name: value})


@pytest.mark.parametrize("total", [50_000, 100_000])
def test_a_warm_up_as_long_as_the_run_is_refused_only_for_a_controller(total: int) -> None:
    clock = Clock(1000, 100_000, total)
    Engine([Value("lr", 0.1)], 2, clock)
    with pytest.raises(ValueError, match="warm-up"):
        Engine([Value("lr", 0.1)], 2, clock, ProbeRule())


def test_the_last_step_ends_a_cycle_that_is_not_full() -> None:
    engine = Engine([Value("lr", 0.1)], 1, Clock(10, 0, 25))
    ends, ahead = [], []
    for step in range(1, 26):
        ahead.append(step - 1 + engine.steps_left)
        if engine.tick():
            ends.append(step)
            engine.close([None])
    assert ends == [10, 20, 25] and ahead == [10] * 10 + [20] * 10 + [25] * 5


def test_decisions_left_reaches_one_at_the_end() -> None:
    clock = Clock(10, 20, 100)
    steps = [first + 10 for first in range(0, 100, 10) if clock.controls(first)]
    assert steps[0] == 30  # the first cycle that lies wholly after the warm-up
    assert [clock.decisions_left(step, 10) for step in steps] == list(range(len(steps), 0, -1))
    assert Clock(10).decisions_left(10, 10) is None
