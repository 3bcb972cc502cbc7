"""`hdet train --resume`: what does not fit is refused in one line, before a process is started or a file changed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hdet.cli.job.checkpoint import save_checkpoint
from hdet.cli.job.run_files import CHECKPOINT, CONFIG, HISTORY
from hdet.cli.main import main

from .harness import Finished, one_line

pytestmark = [pytest.mark.usefixtures("no_processes"), pytest.mark.filterwarnings("error")]


def test_resuming_with_other_settings(capsys: pytest.CaptureFixture[str], compared: tuple[Path, Finished]) -> None:
    folder = str(compared[0] / "hdet")
    assert "spread is 0.2" in one_line(capsys, "train", "--resume", folder, "--spread", "0.2")
    assert "coresident is True, but the run" in one_line(capsys, "train", "--resume", folder, "--coresident")
    assert "'nowhere' has no checkpoint.pt" in one_line(capsys, "train", "--resume", "nowhere")
    assert f"{compared[0]}/fixed" in one_line(capsys, "train", "--resume", str(compared[0]))


@pytest.fixture(params=["fixed", "hdet"])
def begun(request: pytest.FixtureRequest, compared: tuple[Path, Finished], tmp_path: Path) -> Path:
    """A run killed after its last checkpoint and before its end."""
    return unended(compared[0] / request.param, tmp_path / "begun")


def unended(finished: Path, folder: Path) -> Path:
    shutil.copytree(finished, folder)
    lines = (folder / HISTORY).read_text().splitlines(keepends=True)
    assert '"end"' in lines[-1]
    (folder / HISTORY).write_text("".join(lines[:-1]))
    return folder


def rewrite(folder: Path, **changes: object) -> None:
    """Change parts of the checkpoint there."""
    save_checkpoint(folder / CHECKPOINT, {**torch.load(folder / CHECKPOINT, weights_only=True), **changes})


def test_resuming_on_another_text(capsys: pytest.CaptureFixture[str], tmp_path: Path, begun: Path, text_folder: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(text_folder, data)
    for file in data.iterdir():
        file.write_text(file.read_text() + "# changed")
    rewrite(begun, config={**torch.load(begun / CHECKPOINT, weights_only=True)["config"], "data": str(data)})
    assert "not what the run" in one_line(capsys, "train", "--resume", str(begun))


def test_resuming_what_fits_starts_processes_and_changes_nothing_before(begun: Path) -> None:
    """The counterpart of the refusals below."""
    before = {name: (begun / name).read_bytes() for name in (CHECKPOINT, CONFIG, HISTORY)}
    with pytest.raises(AssertionError, match="a process would have been started"):
        main(["train", "--resume", str(begun)])
    assert {name: (begun / name).read_bytes() for name in before} == before


def another_step(saved: dict) -> dict:
    changed = {"last_epoch": 3}
    ensemble = {**saved["ensemble"], "scheduler": {**saved["ensemble"]["scheduler"], **changed}}
    return {"scheduler": {**saved["scheduler"], **changed}, "ensemble": ensemble}


def short_moments(saved: dict) -> dict:
    state = {i: {**values, "exp_avg": values["exp_avg"][..., :1]} for i, values in saved["optimizer"]["state"].items()}
    return {"optimizer": {**saved["optimizer"], "state": state}}


MISFITS: dict[str, Callable[[dict], dict]] = {
    "model lacks a key": lambda saved: {"model": dict(list(saved["model"].items())[1:])},
    "model of another size": lambda saved: {"model": {name: value[..., :1] for name, value in saved["model"].items()}},
    "moments of another size": short_moments,
    "optimizer {}": lambda saved: {"optimizer": {}},
    "optimizer without moments": lambda saved: {"optimizer": {**saved["optimizer"], "state": {}}},
    "scheduler at another step": another_step,
    "rng of another type": lambda saved: {"rng": torch.zeros(3)},
    "rng of another size": lambda saved: {"rng": torch.zeros(3, dtype=torch.uint8)},
    "ensemble of nothing": lambda saved: {"ensemble": {"version": 1}},
}
"""changes that leave a checkpoint's keys and kinds as they are"""


@pytest.mark.parametrize("how", MISFITS)
def test_resuming_what_does_not_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path, compared: tuple[Path, Finished], how: str) -> None:
    run = unended(compared[0] / "hdet", tmp_path / "run")
    rewrite(run, **MISFITS[how](torch.load(run / CHECKPOINT, weights_only=True)))
    message = one_line(capsys, "train", "--resume", str(run))
    assert f"{run / CHECKPOINT}' does not fit this run (" in message
    assert message.endswith("): it is damaged, start the run again\n") and len(message) < 300 + len(str(run))


def test_scheduler_alone_carries_the_fixed_run(capsys: pytest.CaptureFixture[str], tmp_path: Path, compared: tuple[Path, Finished]) -> None:
    run = unended(compared[0] / "fixed", tmp_path / "run")
    rewrite(run, scheduler={})
    assert "the schedule is at step 0, the run at 24" in one_line(capsys, "train", "--resume", str(run))


def test_resuming_where_nothing_can_be_written(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, begun: Path) -> None:
    def refuse(*paths: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")  # root as well, whom no permission stops

    monkeypatch.setattr(os, "replace", refuse)
    message = one_line(capsys, "train", "--resume", str(begun))
    assert f"resume is '{begun}'" in message and "cannot be written (Read-only file system): make it writable" in message
    assert not list(begun.glob(".*"))


def test_resuming_a_finished_run_starts_nothing(capsys: pytest.CaptureFixture[str], compared: tuple[Path, Finished]) -> None:
    folder = compared[0] / "hdet"
    before = (folder / "history.jsonl").read_bytes()
    assert main(["train", "--resume", str(folder)]) == 0
    assert "already at its last step, 24" in capsys.readouterr().out
    assert (folder / "history.jsonl").read_bytes() == before
