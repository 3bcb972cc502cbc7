"""A run's folder: one writer at a time, nothing of anybody else's is touched, and no link leads out of it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from hdet.cli.job.processes import Workers
from hdet.cli.job.run_files import CHECKPOINT, CONFIG, HISTORY, REPORT, SAMPLE, Recorder, truncate_history
from hdet.cli.main import main

from .harness import Finished, one_line, run_cli, tiny
from .test_resume import unended

FILES = (HISTORY, CHECKPOINT, CONFIG, REPORT, SAMPLE)


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of somebody else."""
    file = tmp_path_factory.mktemp("elsewhere") / "file"
    file.write_text("theirs")
    return file


def contents(folder: Path) -> dict[str, object]:
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def test_what_others_have_there_stays(text_folder: Path, tmp_path: Path, elsewhere: Path) -> None:
    """Also names that were ours once: a download, a folder, links."""
    run = tmp_path / "run"
    (run / f".{CONFIG}.partial" / "inner").mkdir(parents=True)
    (run / ".download.partial").write_text("theirs")
    (run / f".{CHECKPOINT}.partial").symlink_to(elsewhere)
    (run / f".{HISTORY}.partial").symlink_to(run / "nothing")
    before = contents(run)
    finished = run_cli("train", *tiny(text_folder), "--schedule-only", "--out", str(run))
    assert finished.code == 0 and finished.err == "", finished.err
    after = contents(run)
    assert {name: after[name] for name in before} == before and elsewhere.read_text() == "theirs"
    assert after.keys() - before.keys() == set(FILES)


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("options", [[], ["--overwrite"]])
@pytest.mark.parametrize("name", FILES)
def test_files_of_others_are_not_replaced(
    capsys: pytest.CaptureFixture[str], text_folder: Path, tmp_path: Path, name: str, options: list[str]
) -> None:
    (tmp_path / name).write_text('{"name": "my project"}')
    before = contents(tmp_path)
    message = one_line(capsys, "train", *tiny(text_folder), "--out", str(tmp_path), *options)
    assert f"out is '{tmp_path}', which holds {name}" in message and "was not written by hdet train: pass another --out" in message
    assert contents(tmp_path) == before


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("options", [[], ["--overwrite"]])
@pytest.mark.parametrize("how", ["link", "link to nothing", "folder"])
def test_nor_what_is_no_file(
    capsys: pytest.CaptureFixture[str], text_folder: Path, tmp_path: Path, elsewhere: Path, options: list[str], how: str
) -> None:
    elsewhere.write_text(json.dumps({"mode": "hdet"}))
    place = tmp_path / CONFIG
    place.mkdir() if how == "folder" else place.symlink_to(elsewhere if how == "link" else elsewhere.parent / "nothing")
    before = contents(tmp_path), contents(elsewhere.parent)
    assert CONFIG in one_line(capsys, "train", *tiny(text_folder), "--out", str(tmp_path), *options)
    assert (contents(tmp_path), contents(elsewhere.parent)) == before


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_a_comparison_replaces_no_picture_of_others_and_no_part_of_it_begins(
    capsys: pytest.CaptureFixture[str], text_folder: Path, tmp_path: Path, compared: tuple[Path, Finished], options: list[str]
) -> None:
    (tmp_path / REPORT).write_text("theirs")
    message = one_line(capsys, "train", "--compare", *tiny(text_folder), "--out", str(tmp_path), *options)
    assert f"holds {REPORT}, and that was not written by hdet train" in message
    assert (tmp_path / REPORT).read_text() == "theirs"
    both = tmp_path / "both"
    shutil.copytree(compared[0], both)
    (both / "hdet" / CONFIG).write_text('{"name": "my project"}')
    before = contents(both)
    one_line(capsys, "train", "--compare", *tiny(text_folder), "--out", str(both), *options)
    assert contents(both) == before, "the fixed run's files too"


def test_overwriting_replaces_a_run(text_folder: Path, tmp_path: Path, compared: tuple[Path, Finished]) -> None:
    """As it was written by earlier versions too: its settings are the mark."""
    run = tmp_path / "run"
    shutil.copytree(compared[0] / "hdet", run)
    (run / "notes.txt").write_text("mine")
    finished = run_cli("train", *tiny(text_folder), "--schedule-only", "--out", str(run), "--overwrite")
    assert finished.code == 0 and finished.err == "", finished.err
    assert json.loads((run / CONFIG).read_text())["mode"] == "fixed"
    assert set(contents(run)) == {*FILES, "notes.txt"} and (run / "notes.txt").read_text() == "mine"


# -- links -------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_processes")
def test_a_report_does_not_write_through_links(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, compared: tuple[Path, Finished], elsewhere: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(compared[0] / "fixed", run)
    (run / REPORT).unlink(missing_ok=True)
    (run / f".{REPORT}.partial").symlink_to(elsewhere)
    assert main(["report", str(run)]) == 0
    assert elsewhere.read_text() == "theirs" and (run / f".{REPORT}.partial").is_symlink()
    (run / REPORT).unlink()
    (run / REPORT).symlink_to(elsewhere)
    assert main(["report", str(run)]) == 0
    assert elsewhere.read_text() == "theirs" and not (run / REPORT).is_symlink()


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("name", [CONFIG, HISTORY])
@pytest.mark.parametrize("target", ["file", "nothing"])
def test_resuming_does_not_write_through_links(
    tmp_path: Path, compared: tuple[Path, Finished], elsewhere: Path, name: str, target: str
) -> None:
    run = unended(compared[0] / "fixed", tmp_path / "run")
    (run / f".{name}.partial").symlink_to(elsewhere.with_name(target))
    with pytest.raises(AssertionError, match="a process would have been started"):
        main(["train", "--resume", str(run)])
    truncate_history(run / HISTORY, 8)
    assert elsewhere.read_text() == "theirs" and [entry.name for entry in elsewhere.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("target", ["file", "nothing"])
def test_a_history_is_not_written_through_a_link(tmp_path: Path, elsewhere: Path, target: str) -> None:
    (tmp_path / HISTORY).symlink_to(elsewhere.with_name(target))
    with pytest.raises(ValueError, match="is not a regular file"):
        Recorder(tmp_path / HISTORY)
    assert elsewhere.read_text() == "theirs" and [entry.name for entry in elsewhere.parent.iterdir()] == ["file"]


# -- two writers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["--resume", "--out", "--compare"])
def test_a_second_writer_is_refused_by_name(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    text_folder: Path,
    compared: tuple[Path, Finished],
    how: str,
) -> None:
    """While the first run is under way, here from this process."""
    run = unended(compared[0] / "fixed", tmp_path / "fixed")
    second = {
        "--resume": ["--resume", str(run)],
        "--out": [*tiny(text_folder), "--out", str(run), "--overwrite"],
        "--compare": ["--compare", *tiny(text_folder), "--out", str(tmp_path), "--overwrite"],
    }[how]
    found: list[object] = []

    def intrude(workers: Workers) -> None:
        before = contents(run)
        found.extend([one_line(capsys, "train", *second), contents(run) == before])
        raise KeyboardInterrupt

    monkeypatch.setattr(Workers, "__enter__", intrude)
    assert main(["train", "--resume", str(run)]) == 130
    message, unchanged = found
    assert f"'{run}' is being written by process {os.getpid()} on " in str(message) and unchanged
    assert not list(run.glob(".*")), "and nothing stays"
    found.clear()
    capsys.readouterr()
    assert main(["train", "--resume", str(run)]) == 130 and found, "it is free again"


# -- no folder at all ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--out", ""],
        ["train", "--resume", ""],
        ["train", "--data", ""],
        ["report", "x", "--out", ""],
        ["report", ""],
        ["report", "--evidence", ""],
    ],
)
def test_an_empty_name_is_no_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str]
) -> None:
    """It would mean the one where the command is typed."""
    monkeypatch.chdir(tmp_path)
    message = one_line(capsys, *arguments)
    assert "'' is empty: pass the name of a file or folder" in message
    assert list(tmp_path.iterdir()) == []
