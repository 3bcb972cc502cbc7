"""benchmarks.evidence.auto: AutoLR beside the fixed rate of the same start."""

from __future__ import annotations

import pytest

from benchmarks.evidence import auto, fixed_rates


def test_a_line_says_what_was_found_and_what_it_took() -> None:
    line = auto.run("regression", -4, seed=0, steps=400, budget=0.3)
    alone = fixed_rates.run("regression", -4, seed=0, steps=400)
    assert line["validation"] < alone["validation"] and line["correction"] > 1
    assert 5 < line["spent_percent"] <= 30 and "best peak" in line["report"] and line["notes"]
    text = auto.table([line], [alone])
    assert "| regression | 400 | 0 | 2^-4 |" in text and "1 runs: worse than the start's fixed rate by more than 0.5 %: 0" in text


def test_a_run_without_trials_is_the_fixed_one() -> None:
    line = auto.run("small", 0, seed=0, steps=100, budget=0.03)
    assert line["validation"] == fixed_rates.run("small", 0, seed=0, steps=100)["validation"] and line["spent_percent"] == 0


def test_what_is_missing_is_of_what_was_to_be_gained() -> None:
    assert auto.missing(1.5, untrained=3.0, best=1.0) == pytest.approx(25)
    assert auto.missing(None, untrained=3.0, best=1.0) == auto.missing(7.0, untrained=3.0, best=1.0) == 100


def test_quick_prints_the_table(capfd: pytest.CaptureFixture[str]) -> None:
    auto.main(["--quick"])
    assert "2 runs: worse than" in capfd.readouterr().out
