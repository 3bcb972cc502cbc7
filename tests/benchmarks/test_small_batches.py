"""benchmarks.evidence.small_batches: what counts as lost and as worse, the command, and the runs that an explosion of one example used to lose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.evidence import runs, small_batches
from benchmarks.evidence.report.page import page as evidence_page
from benchmarks.evidence.report.page import read as read_evidence
from benchmarks.evidence.report.small_batches import FIXED, LINE, lost, worse


def line(method: str, power: int, validation: float | None, seed: int = 0, batch: int = 2) -> dict[str, Any]:
    return {
        "benchmark": "small-batches", "problem": "regression", "method": method, "batch": batch, "power": power, "rate": 10.0**power, "seed": seed,
        "steps": 400, "validation": validation, "untrained": 1.0,
    }  # fmt: skip


def test_lost_is_clearly_above_untrained_and_worse_clearly_above_a_fixed_run_that_is_not_lost() -> None:
    """There is 0.5 to gain, so both are by 0.05."""
    for validation, is_lost, is_worse in (
        (0.5, False, False),
        (0.84, False, False),
        (0.86, False, True),
        (1.06, True, True),
        (None, True, True),
    ):
        ours = line(LINE, 0, validation)
        assert lost(ours, 0.5) is is_lost and worse(ours, line(FIXED, 0, 0.8), 0.5) is is_worse
        assert not worse(ours, line(FIXED, 0, 1.06), 0.5) and not worse(ours, line(FIXED, 0, None), 0.5)


@pytest.mark.parametrize("name", small_batches.KINDS)
def test_a_problem_is_a_function_of_seed_and_step_and_can_be_learned(name: str) -> None:
    problem = small_batches.problem_of(name, 4, 400)
    batch, again, other = problem.batch(3, 5), problem.batch(3, 5), problem.batch(3, 6)
    assert all(map(torch.equal, batch, again)) and not all(map(torch.equal, batch, other))
    assert {len(tensor) for tensor in batch} == {4} and problem.losses(problem.build(0), batch).shape == (4,)
    best = small_batches.run("small-batches", name, FIXED, 32, 0, 2.0**-6, 0, 200)
    assert best["validation"] < 0.9 * best["untrained"]


@pytest.mark.filterwarnings("ignore:step.loss. was:UserWarning")  # of a few losses that explode between a step and its doubling's end
@pytest.mark.parametrize(("name", "batch"), [("regression", 2), ("classification", 2), ("classification", 4)])
def test_a_rate_that_is_a_hundred_times_too_low_is_raised_and_no_run_is_lost(name: str, batch: int) -> None:
    """Of these nine runs six ended above the untrained model, at rates that were 1e3 to 2e5 times the user's: 2^-8 is the best."""
    for seed in range(3):
        found = small_batches.run("small-batches", name, LINE, batch, -2, 2.0**-8 / 100, seed, 400)
        assert found["validation"] is not None and found["validation"] < 1.02 * found["untrained"], found["notes"]
        assert max(found["rates"][4:]) < 2.0, found["notes"]  # the sweep is over


def test_quick_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], in_this_process: None
) -> None:
    path = tmp_path / "small-batches.jsonl"
    command = ["--quick", "--jobs", "1", "--json", str(path)]
    small_batches.main(command)
    lines = [json.loads(text, parse_constant=pytest.fail) for text in path.read_text().splitlines()]
    assert sorted({(x["problem"], x["method"], x["batch"], x["power"]) for x in lines}) == [
        (problem, method, batch, power) for problem in sorted(small_batches.KINDS) for method in (FIXED, LINE) for batch in (2, 8) for power in (-4, 0, 4)
    ]  # fmt: skip
    assert len(lines) == 24 and all((x["method"] == LINE) is bool(x["notes"]) for x in lines)
    page = capsys.readouterr().out
    assert page.endswith(evidence_page(read_evidence([path])))
    monkeypatch.setattr(runs, "ProcessPoolExecutor", lambda *given, **named: pytest.fail("something runs again"))
    small_batches.main(command)
    assert capsys.readouterr().out == evidence_page(read_evidence([path]))
