"""benchmarks.evidence.scoreboard: the entries are what they say, and the tables follow from the
lines."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.evidence import scoreboard
from benchmarks.evidence.workloads import WORKLOADS

PROBLEM = replace(WORKLOADS["mlp-breast-cancer"].problem, steps=40)


def line(
    method: str, validation: float | None, points: list[list[float]], workload: str = "vit-digits"
) -> dict[str, Any]:
    return {
        "method": method,
        "workload": workload,
        "seed": 0,
        "steps": 100,
        "validation": validation,
        "untrained": 3.0,
        "points": points,
    }


def test_the_profile_says_who_is_there_first_and_who_never_is() -> None:
    lines = [
        line("greedy", None, [[10, 2.0]]),
        line("nadamw", 1.0, [[0, 3.0], [50, 1.04]]),
        line("adamw", 1.03, [[60, 1.2]]),
    ]
    text = scoreboard.table(lines)
    assert (
        "| vit-digits | 0.0 | 1.5 | 100.0 |" in text
        and "| *worst* | **0.0** | **1.5** | **100.0** |" in text
    )
    # 98 % of two nats: 1.04. It takes nadamw 50 steps, adamw all of its 100, and greedy never comes
    # there.
    assert "| nadamw | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 |" in text
    assert "| adamw | 0.00 | 0.00 | 0.00 | 0.00 | 1.00 | 1.00 |" in text
    assert "| greedy | 0.00 | 0.00 | 0.00 | 0.00 | 0.00 | 0.00 |" in text


def test_where_nobody_has_learned_anything_all_of_it_is_missing() -> None:
    assert "| vit-digits | 100.0 | 100.0 |" in scoreboard.table(
        [line("adamw", 3.0, []), line("greedy", 3.5, [])]
    )


def test_the_range_test_suggests_a_rate_at_which_the_loss_falls() -> None:
    model = PROBLEM.build(0)
    before = copy.deepcopy(model.state_dict())
    rate = scoreboard.range_test(PROBLEM, copy.deepcopy(model), 0)
    assert 1e-5 < rate < 1 and all(
        torch.equal(before[name], value) for name, value in model.state_dict().items()
    )


@pytest.mark.parametrize("method", ["schedule-free", "prodigy", "nadamw"])
def test_looking_on_the_way_changes_nothing(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = scoreboard.run(method, "mlp-breast-cancer", seed=0, steps=40)
    monkeypatch.setattr(scoreboard, "POINTS", 1)
    alone = scoreboard.run(method, "mlp-breast-cancer", seed=0, steps=40)
    assert (
        len(looked["points"]) == 40
        and len(alone["points"]) == 1
        and looked["validation"] == alone["validation"]
    )


def test_quick_prints_the_tables(capsys: pytest.CaptureFixture[str], in_this_process: None) -> None:
    scoreboard.main(["--quick"])
    printed = capsys.readouterr().out
    assert "| workload | adamw | autolr |" in printed and "| autolr | " in printed
