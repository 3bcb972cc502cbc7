"""benchmarks.evidence.report: what the tables say of lines with known answers, what is missing,
what the figure draws, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evidence.report.curves import Curve, Record, curves
from benchmarks.evidence.report.page import main
from benchmarks.evidence.report.tables import standard_error

Losses = dict[int, list[float | None]]


def lines(method: str, losses: Losses, problem: str = "cnn-digits", **more: Any) -> list[Record]:
    """A line for each start and seed; an untrained model has 2.0, the best rate is 0.01."""
    return [
        {
            "benchmark": "hero",
            "problem": problem,
            "method": method,
            "exponent": e,
            "rate": 0.01 * 2.0**e,
            "seed": seed,
            "steps": 600,
            "validation": loss,
            "untrained": 2.0,
            "rates": [0.01] * 20,
            "probe_percent": 0.0,
            "copies": 0.0,
            **more,
        }
        for e, values in losses.items()
        for seed, loss in enumerate(values)
    ]


def curve(losses: Losses) -> Curve:
    return curves(lines("onecycle", losses))["cnn-digits"]["onecycle"]


def test_sensitivity_is_over_starts_even_in_the_logarithm() -> None:
    found = curve({-2: [1.0], 0: [0.5], 4: [3.0]})  # 3.0 counts as 2.0
    mean = (2 * (1.0 + 0.5) / 2 + 4 * (0.5 + 2.0) / 2) / 6
    assert found.sensitivity(0.5) == pytest.approx(mean - 0.5)
    assert found.sensitivity(0.4) == pytest.approx(mean - 0.4)
    assert (found.best, found.worst, found.lowest) == (0, 4, 0.5)
    # A denser grid of the same function is the same.
    assert curve({-2: [1.0], -1: [0.75], 0: [0.5], 4: [3.0]}).sensitivity(0.5) == pytest.approx(
        mean - 0.5
    )
    assert curve({0: [0.7]}).sensitivity(0.5) == pytest.approx(0.2)


def test_a_crash_counts_as_an_untrained_model_of_its_seed() -> None:
    records = lines("onecycle", {0: [0.5, None, 9.0]})
    records[1]["untrained"] = 2.5
    found = curves(records)["cnn-digits"]["onecycle"]
    assert found.scores(0) == [0.5, 2.5, 2.0] and found.mean(0) == pytest.approx(5 / 3)
    assert found.failed == 2
    assert standard_error(found.scores(0)) == pytest.approx(
        1.0408 / 3**0.5, rel=1e-3
    )  # standard deviation of three over the root of three


# -- what belongs together -------------------------------------------------------------------------


def test_lines_that_do_not_belong_together_are_not_mixed() -> None:
    short = lines("onecycle", {0: [0.1], 3: [0.1]}, steps=40)
    old = [{**line, "rate": line["rate"] * 2} for line in lines("onecycle", {0: [0.2], 2: [0.2]})]
    again = lines("onecycle", {0: [0.3]})
    found = curves(
        [
            *short,
            *old,
            *again,
            *lines("onecycle", {0: [0.4, 0.6]}),
            *lines("wsd", {0: [0.7]}, steps=40),
        ]
    )["cnn-digits"]
    assert list(found) == ["onecycle"]
    assert {e: found["onecycle"].scores(e) for e in found["onecycle"].starts} == {0: [0.4, 0.6]}


# -- the figure and the command --------------------------------------------------------------------


def write(path: Path, records: list[Record], tail: str = "") -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return str(path)


def test_report_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = lines("wsd", {0: [0.5]}) + [
        {"benchmark": "hero-find", "problem": "cnn-digits"},
        {"benchmark": "weather"},
    ]
    first = write(
        tmp_path / "a.jsonl", records, tail='{"benchmark": "her'
    )  # a benchmark is just writing
    second = write(tmp_path / "b.jsonl", lines("hdet-softmax", {0: [0.4]}))
    main([first, second])
    page = capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]
    assert (
        "| hdet-softmax | 0.01 | 0.400 ± 0.000 (2^0) |" in page
        and "No table is made of the 1 lines of 'weather'" in page
        and "hero-find" not in page
    )
    out = tmp_path / "out"
    main([first, second, "--out", str(out)])
    assert capsys.readouterr().out.startswith(page)
    assert (out / "evidence.md").read_text() == page
    assert sorted(path.name for path in out.iterdir()) == ["evidence.md", "hero.png"]
    assert (out / "hero.png").read_bytes().startswith(b"\x89PNG") and "(hero.png)" in page
