"""`hdet replay`: the decisions of a recorded run, made again without its text, its checkpoint or training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hdet.cli.job.run_files import CONFIG, HISTORY, read_history
from hdet.cli.main import main

from .harness import Finished
from .test_runs import Straight

CONTROLLERS = ("probe", "softmax", "auto")


@pytest.fixture(scope="module")
def runs(straight: Straight, compared: tuple[Path, Finished], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By controller: a run's folder with what a replay needs, and nothing else."""
    home = tmp_path_factory.mktemp("replay")
    for controller in CONTROLLERS:
        whole = compared[0] / "hdet" if controller == "probe" else straight(controller)[0]
        (home / controller).mkdir()
        for name in (CONFIG, HISTORY):
            shutil.copy(whole / name, home / controller)
    return {controller: home / controller for controller in CONTROLLERS}


def decided(folder: Path) -> list[dict[str, Any]]:
    return [record for record in read_history(folder / HISTORY) if record["event"] == "cycle" and record["record"]["evidence"] is not None]


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_every_decision_is_made_again(runs: dict[str, Path], controller: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(runs[controller])]) == 0
    out, err = capsys.readouterr()
    count = len(decided(runs[controller]))
    trials = " and 1 trial" * (controller == "auto")
    assert count >= 4 and out == f"{count} decisions{trials} replayed, all the same to the bit\n" and err == ""
    assert sorted(path.name for path in runs[controller].iterdir()) == sorted((CONFIG, HISTORY))


def rewritten(run: Path, folder: Path, records: list[dict[str, Any]]) -> Path:
    shutil.copytree(run, folder)
    (folder / HISTORY).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.mark.parametrize("key", ["suggestion", "low", "high"])
def test_a_trial_that_says_something_else_is_printed(
    runs: dict[str, Path], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = read_history(runs["auto"] / HISTORY)
    [cycle] = [record for record in records if record.get("trial")]
    cycle["trial"][key] *= 1 + 1e-15
    assert main(["replay", str(rewritten(runs["auto"], tmp_path / "run", records))]) == 1
    out, _ = capsys.readouterr()
    assert out.startswith(f"cycle {cycle['cycle']}: what the trial says differ") and len(out.splitlines()) == 1
    assert f'"{key}": {cycle["trial"][key]}' in out


@pytest.mark.parametrize("controller", [name for name in CONTROLLERS if name != "auto"])
def test_a_difference_is_printed(runs: dict[str, Path], controller: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = read_history(runs[controller] / HISTORY)
    cycle = next(r for r in records if r["event"] == "cycle" and any(d["factor"] != 1 for d in r["record"]["decisions"]))
    cycle["record"]["decisions"][0]["factor"] *= 1 + 1e-15
    assert main(["replay", str(rewritten(runs[controller], tmp_path / "run", records))]) == 1
    out, _ = capsys.readouterr()
    assert out.startswith(f"cycle {cycle['cycle']}: decisions differ") and len(out.splitlines()) == 1


def test_what_is_no_such_run_is_refused(tmp_path: Path, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path)]) == 2
    assert "pass the folder of a run" in capsys.readouterr().err
    folder = shutil.copytree(runs["probe"], tmp_path / "run")
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, "mode": "fixed"}))
    assert main(["replay", str(folder)]) == 2
    assert "no recorded decisions" in capsys.readouterr().err
