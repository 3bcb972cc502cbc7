"""What is shown while a run goes on."""

from __future__ import annotations

import pytest
from rich.console import Console

from hdet.cli.charts import smooth
from hdet.cli.display import CYCLE_HEADER, cycle_line, open_display
from hdet.cli.job.config import TrainConfig

RECORD = {
    "event": "cycle",
    "cycle": 2,
    "step": 150,
    "values": {"lr": 4.1e-4},
    "corrections": {"lr": 1.37},
    "slopes": {"lr": -0.0123},
    "errors": {"lr": 0.0031},
    "t": {"lr": -3.97},
    "multipliers": {"lr": [0.7, 0.9, 1.1, 1.3]},
    "converge_ms": 2.14,
    "notes": [],
}


def test_cycle_line_says_everything_under_its_heading() -> None:
    line = cycle_line(RECORD, 40)
    for word in ("3/40", "150", "4.10e-04", "1.370", "-0.01230 ± 0.00310", "-4.0", "0.70 0.90 1.10 1.30", "2.1 ms"):
        assert word in line
    assert CYCLE_HEADER.index("multipliers") == line.index("0.70")
    for heading, end in (
        ("step", "  150"),
        ("base rate", "4.10e-04"),
        ("correction", "1.370"),
        ("error", "0.00310"),
        ("converge", "2.1 ms"),
    ):
        assert CYCLE_HEADER.index(heading) + len(heading) == line.index(end) + len(end)


def test_cycle_line_without_a_slope_and_with_many_replicas() -> None:
    empty = {key: {"lr": None} for key in ("slopes", "errors", "t")}
    line = cycle_line({**RECORD, **empty, "multipliers": {"lr": [0.5 + i / 7 for i in range(8)]}, "notes": ["replica 3 left out"]}, 40)
    assert "None" not in line and "0.50 ... 1.50" in line and line.endswith("[replica 3 left out]")


def test_plain_output_has_ten_progress_lines_and_no_control_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with open_display() as display:
        display.show({"event": "start", "folder": "runs/x", "step": 0, "device": "cpu", "config": TrainConfig(steps=200).to_dict()})
        for step in range(1, 201):
            display.show({"event": "train", "step": step, "loss": None if step > 100 else 2.5, "lr": 1e-3, "correction": 1.5})
        display.show(RECORD)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("runs/x: HDET") and "0.70 to 1.30 times the base rate" in lines[2]
    progress = [line for line in lines if "left" in line and "%" in line]
    assert len(progress) == 10
    assert "loss 2.500  rate 1.00e-03  correction x1.50" in progress[0] and "not finite" in progress[-1]
    assert lines[-2:] == [CYCLE_HEADER, cycle_line(RECORD, 4)]
    assert "\x1b" not in "".join(lines) and "\r" not in "".join(lines)


def test_bar_on_a_terminal_keeps_cycle_lines_above_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hdet.cli.display.Console", lambda: Console(force_terminal=True, width=150))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    with open_display() as display:
        display.show({"event": "start", "folder": "runs/x", "step": 0, "device": "cpu", "config": TrainConfig(steps=200).to_dict()})
        display.show({"event": "train", "step": 50, "loss": 2.5, "lr": 1e-3, "correction": 1.5})
        display.show(RECORD)
    out = capsys.readouterr().out
    assert "50/200" in out and "loss 2.500" in out and "-0.01230 ± 0.00310" in out
    assert out.endswith("\x1b[?25h"), "the cursor must be visible again"


def test_smoothing_is_a_centred_mean() -> None:
    assert smooth([1.0, 2.0, 6.0], width=3) == [1.5, 3.0, 4.0]
    assert smooth([1.0, None, 6.0], width=3) == [1.0, None, 6.0]
    assert smooth([1e20, 1.0, 2.0, 3.0], width=1) == [1e20, 1.0, 2.0, 3.0], "a loss that broke spoils no later one"
