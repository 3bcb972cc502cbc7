"""`hdet report`: a table and a picture, or one line that names the file and the remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hdet.cli.job.run_files import CONFIG, HISTORY, Recorder, read_history
from hdet.cli.main import main

from .harness import Finished, one_line


def test_report_of_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "history.jsonl" in one_line(capsys, "report", str(tmp_path))
    assert "not a folder" in one_line(capsys, "report", str(tmp_path / "absent"))


def test_report_draws_and_prints(capsys: pytest.CaptureFixture[str], compared: tuple[Path, Finished], tmp_path: Path) -> None:
    assert main(["report", str(compared[0]), "--out", str(tmp_path / "picture.png")]) == 0
    out, _ = capsys.readouterr()
    assert "fixed" in out and "hdet" in out and "validation loss" in out
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("out", "mentions"), [("", "which is a folder: pass a file in it"), ("/proc/x.png", "'/proc/x.png' cannot be written (No such file")]
)
def test_report_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], compared: tuple[Path, Finished], tmp_path: Path, out: str, mentions: str
) -> None:
    if out.startswith("/proc") and not Path("/proc/self").is_dir():
        pytest.skip("no /proc, the folder in which not even root makes files, on this system")
    assert mentions in one_line(capsys, "report", str(compared[0]), "--out", out or str(tmp_path))


@pytest.mark.parametrize(
    ("event", "change", "mentions"),
    [
        ("train", {"loss": ...}, "lacks loss"),
        ("train", {"lr": None}, "has a wrong lr, None"),
        ("train", {"correction": 0}, "has a wrong correction, 0"),
        ("train", {"step": "x"}, "has a wrong step, 'x'"),
        ("validation", {"loss": float("inf")}, "has a wrong loss, inf"),
        ("cycle", {"slopes": ...}, "lacks slopes"),
        ("cycle", {"errors": {"lr": "x"}}, "has a wrong errors"),
        ("end", {"seconds": ...}, "lacks seconds"),
        ("another version's", {"event": "another version's", "step": ...}, "lacks step"),
    ],
)
def test_report_of_a_damaged_history(
    capsys: pytest.CaptureFixture[str], compared: tuple[Path, Finished], tmp_path: Path, event: str, change: dict, mentions: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(compared[0] / "hdet", run)
    records = read_history(run / HISTORY)
    index = next((i for i, record in enumerate(records) if record["event"] == event), 0)
    changed = {**records[index], **change}
    records[index] = {key: value for key, value in changed.items() if value is not ...}
    (run / HISTORY).write_text("".join(json.dumps(record) + "\n" for record in records))
    message = one_line(capsys, "report", str(run))
    assert f"line {index + 1} of history '{run / HISTORY}' {mentions}" in message and message.endswith(": remove that line\n")


@pytest.mark.parametrize(
    ("config", "mentions"),
    [("[]", "holds no settings"), ("{}", "lacks mode"), ('{"mode": "hdet", "steps": "x"}', "wrong steps, 'x'"), ("{", "cannot be read")],
)
def test_report_of_a_damaged_config(
    capsys: pytest.CaptureFixture[str], compared: tuple[Path, Finished], tmp_path: Path, config: str, mentions: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(compared[0] / "fixed", run)
    (run / CONFIG).write_text(config)
    message = one_line(capsys, "report", str(run))
    assert f"'{run / CONFIG}' {mentions}" in message or f"'{run / CONFIG}' has a {mentions}" in message


def test_unfinished_run_is_reported_as_such(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text('{"mode": "hdet", "steps": 10, "max_lr": 0.1}')
    recorder = Recorder(run / "history.jsonl")
    recorder.write({"event": "train", "step": 1, "loss": float("nan"), "lr": 0.1, "correction": 1.0})
    recorder.write({"event": "validation", "step": 1, "loss": 2.0, "batches": 1})
    recorder.close()
    assert main(["report", str(run)]) == 0
    assert "not ended" in capsys.readouterr().out
    assert (run / "report.png").is_file()
