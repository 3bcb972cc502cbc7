"""Whole runs under a line on a small regression, whose best peaks are 0.01 to 0.1 (tests/ensemble/test_line.py has more starts)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import hdet
from tests.harness import Run

from .runs import run

TOTAL = 400


def line_run(lr: float, **settings: Any) -> Run:
    """Doublings of 4 steps, which are cycles."""
    return run(hdet.LineController, together=1, total=TOTAL, every=4, lr=lr, **settings)


def begun_again(ran: Run) -> list[int]:
    return [record["step"] for record in ran.records if any("begun again" in note for note in record["notes"])]


@pytest.mark.parametrize("lr", [1e-4, 100.0])
def test_doublings_double_the_rate_and_what_comes_after_the_sweep_rises_without_a_jump(lr: float) -> None:
    ran, rates = line_run(lr), []
    for _ in range(TOTAL // 2):
        rates.append(ran.rate)
        ran.step()
    (back,) = begun_again(ran)
    ends = rates[7:back:4]
    # The schedule itself grows from nothing here; how much is told from its last doubling.
    assert len(ends) >= 5 and all(1.4 < high / low < 2.2 for low, high in pairwise(ends)), ends
    after, found = rates[back:], ran.ensemble.corrections["lr"] * lr
    assert back <= 0.15 * TOTAL and 0.01 < found < 1 and max(ends) > found
    assert after[0] < found / 16 and max(after) < 1.01 * found and all(high < 1.25 * low for low, high in pairwise(after))


def test_a_start_that_explodes_in_the_first_steps_is_found_again() -> None:
    ran = line_run(2.0**100)
    before = ran.weights()
    ran.steps(4)
    assert torch.equal(ran.weights(), before) and ran.ensemble.sweeping
    assert any("nothing finite" in note for note in ran.notes())


def test_rates_keep_their_ratio_in_the_sweep_and_one_that_is_far_too_low_is_found_later() -> None:
    def two(parameters: Any, lr: float, **settings: Any) -> torch.optim.Optimizer:
        first, *rest = list(parameters)
        return hdet.FusedAdamW([{"params": rest}, {"params": [first], "lr": lr / 512}], lr=lr, **settings)

    ran = line_run(0.03, optimizer=two, scheduler=None, knobs=[hdet.LearningRate(groups="each")])
    ran.steps(100)
    assert len(set(ran.ensemble.corrections.values())) == 1 and not ran.ensemble.sweeping
    ran.steps()
    high, low = ran.ensemble.corrections.values()
    assert low > 4 * high and any(note.startswith("lr/1: far too low") for note in ran.notes())
