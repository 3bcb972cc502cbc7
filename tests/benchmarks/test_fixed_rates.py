"""benchmarks.evidence.fixed_rates and its workloads: each trains, on examples that depend on seed and step alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks.evidence import fixed_rates
from benchmarks.evidence.workloads import DEVELOPMENT, TEST, WORKLOADS, finetuning


@pytest.fixture(autouse=True)
def hardly_pretrained(monkeypatch: Any) -> Any:
    monkeypatch.setattr(finetuning, "PRETRAINING", 2)
    yield
    finetuning.pretrained.cache_clear()


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_trains(name: str) -> None:
    fixed_rates.untrained.cache_clear()
    line = fixed_rates.run(name, 0, seed=3, steps=40)
    assert line["validation"] < line["untrained"]
    problem = WORKLOADS[name].problem
    first, again, later = problem.batch(3, 5), problem.batch(3, 5), problem.spare(3, 5, 0)
    assert all(map(torch.equal, first, again)) and not torch.equal(first[0], later[0])
    assert problem.losses(problem.build(3), first).shape == (problem.batch_size,)


def test_no_workload_is_in_both_halves() -> None:
    assert not DEVELOPMENT.keys() & TEST.keys() and len(WORKLOADS) == len(DEVELOPMENT) + len(TEST)


def test_a_run_that_breaks_has_no_loss_and_counts_as_untrained() -> None:
    line = fixed_rates.run("regression", 130, seed=0, steps=12)
    assert line["validation"] is None and math.isfinite(line["untrained"])
    assert f"{line['untrained']:.4g}" in fixed_rates.table([line])


def test_quick_prints_the_table(capsys: Any) -> None:
    fixed_rates.main(["--quick"])
    assert "small" in capsys.readouterr().out.splitlines()[-1]
