"""benchmarks.evidence.fixed_rates and auto, and their workloads: each trains, on examples that depend on seed and step alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks.evidence import auto, fixed_rates, seconds, simulated
from benchmarks.evidence.workloads import (
    DEVELOPMENT,
    HARDER,
    HIGH,
    JUDGED,
    MISLEADING,
    REPEATED,
    TEST,
    WORKLOADS,
    ZERO,
    finetuning,
    generated,
)


@pytest.fixture(autouse=True)
def hardly_pretrained(monkeypatch: Any) -> Any:
    monkeypatch.setattr(finetuning, "PRETRAINING", 2)
    monkeypatch.setattr(generated, "PRETRAINING", 50)
    yield
    finetuning.pretrained.cache_clear()


LATE = {"parity": (0, 2000), "stretched": (-3, 2000)}
"""Start and steps of those that learn nothing at first."""


@pytest.mark.parametrize(
    "name", [*DEVELOPMENT, *TEST, "regression-constant", "heat-tenth", "rows-256", "pairs-zero", *JUDGED, *HARDER, *MISLEADING]
)
def test_a_workload_trains(name: str) -> None:
    fixed_rates.untrained.cache_clear()
    exponent, steps = LATE.get(name, (0, 40))
    line = fixed_rates.run(name, exponent, seed=3, steps=steps)
    assert line["validation"] < line["untrained"]
    problem = WORKLOADS[name].problem
    first, again, later = problem.batch(3, 5), problem.batch(3, 5), problem.spare(3, 5, 0)
    assert all(map(torch.equal, first, again)) and not torch.equal(first[0], later[0])
    assert problem.losses(problem.build(3), first).shape == (problem.batch_size,)


def test_no_workload_is_in_both_halves() -> None:
    assert not DEVELOPMENT.keys() & TEST.keys() and len(WORKLOADS) == sum(
        map(len, (DEVELOPMENT, TEST, HIGH, REPEATED, JUDGED, HARDER, ZERO, MISLEADING))
    )


def test_a_run_that_breaks_has_no_loss_and_counts_as_untrained() -> None:
    line = fixed_rates.run("regression", 130, seed=0, steps=12)
    assert line["validation"] is None and math.isfinite(line["untrained"])
    assert f"{line['untrained']:.4g}" in fixed_rates.table([line])


def test_quick_prints_the_table(capsys: Any, in_this_process: None) -> None:
    fixed_rates.main(["--quick"])
    assert "small" in capsys.readouterr().out.splitlines()[-1]


# -- AutoLR beside the fixed rate of the same start ---------------------------------------------------------------------------


def test_a_line_says_what_was_found_and_what_it_took() -> None:
    line = auto.run("regression", -4, seed=0, steps=400, budget=0.3)
    alone = fixed_rates.run("regression", -4, seed=0, steps=400)
    assert not line["kept"] and line["validation"] < alone["validation"] and line["correction"] > 1
    assert 5 < line["spent_percent"] <= 30 and "best peak" in line["report"] and line["notes"]
    text = auto.table(auto.compared([line], [alone]))
    assert "| regression | 400 | 0 | 2^-4 |" in text and "| these | 1 | 0 |" in text


def test_a_run_without_trials_is_the_fixed_one() -> None:
    line, alone = auto.run("small", 0, seed=0, steps=100, budget=0.03), fixed_rates.run("small", 0, seed=0, steps=100)
    assert line["kept"] and line["validation"] is None and line["spent_percent"] == 0
    assert "| small | 100 | 0 | 2^0 | 0.0 % | 0.0 % | +0.0 | 1 | 0.0 % |" in auto.table(auto.compared([line], [alone]))


def test_what_is_missing_is_of_what_was_to_be_gained() -> None:
    assert auto.missing(1.5, untrained=3.0, best=1.0) == pytest.approx(25)
    assert auto.missing(None, untrained=3.0, best=1.0) == auto.missing(7.0, untrained=3.0, best=1.0) == 100


def test_quick_prints_the_table_of_auto(capsys: Any, in_this_process: None) -> None:
    auto.main(["--quick"])
    assert "| these | 2 |" in capsys.readouterr().out


def test_quick_prints_what_autolr_takes_of_the_time(capsys: Any, in_this_process: None) -> None:
    seconds.main(["--quick"])
    assert "| small | 200 |" in capsys.readouterr().out


def test_by_simulation_a_right_rate_is_kept_and_a_wrong_one_comes_nearer() -> None:
    found = {start: simulated.ends(100_000, start, 0.45, 0.0, 0) for start in (-6, -4, 0, 4, 6)}
    assert found[0] == 0 and all(abs(end) < abs(start) for start, end in found.items() if start)
    assert "| 0.6 | +1 |" in simulated.table(30_000, 1)


def test_a_run_that_ends_worse_than_its_start_is_counted_as_a_harm() -> None:
    line = {"workload": "small", "exponent": 0, "seed": 0, "steps": 100, "budget": 0.03, "rate": 1e-3, "untrained": 3.0}
    fixed = [{**line, "validation": 1.0}, {**line, "exponent": 4, "rate": 1.6e-2, "validation": 2.0}]
    auto_lines = [
        {
            **line,
            "validation": 1.02,
            "correction": 2.0,
            "spent_percent": 3.0,
            "kept": False,
            "report": "best peak 0.0005 to 0.008; yours 0.001",
        }
    ]
    [run] = auto.compared(auto_lines, fixed)
    assert run.fixed == 0 and run.auto == run.harm == pytest.approx(1.0) and run.held  # 1.02 lacks 0.02 of 2, and 1e-3 is in the interval
    assert "| these | 1 | 1 | +1.0 % | 0.0 %, 1.0 % | 1, 0 | 1, 1 | 1, 1 |" in auto.table([run])


@pytest.mark.parametrize(("report", "interval"), [
    ("best peak 0.0005 to 0.008; yours", (0.0005, 0.008)), ("best peak 5e-05 to 0.008 or more (higher was not tried); yours", (5e-5, math.inf)),
    ("best peak 0.0005 to 0.008 or less (lower was not tried); yours", (0.0, 0.008)), ("no interval, as no check was made of this rate; yours", None),
])  # fmt: skip
def test_the_interval_is_read_from_what_autolr_tells(report: str, interval: tuple[float, float] | None) -> None:
    assert auto.told(report) == (None if interval is None else pytest.approx(interval, rel=0.031))


def test_what_is_outside_of_the_interval_is_not_held() -> None:
    line = {"workload": "small", "exponent": 0, "seed": 0, "steps": 100, "budget": 0.03, "rate": 1e-3, "untrained": 3.0}
    auto_line = {**line, "validation": 1.0, "correction": 2.0, "spent_percent": 3.0, "kept": False}
    reports = ("best peak 0.0011 to 0.0044", "best peak 0.0002 to 0.00093 or less", "no interval")
    runs = [auto.compared([{**auto_line, "report": said}], [{**line, "validation": 1.0}])[0] for said in reports]
    assert [run.held for run in runs] == [False, False, None] and auto.table(runs).count("| 2, 0 |") == 1
