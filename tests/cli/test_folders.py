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

from ..adversary.common import tree
from .harness import Finished, one_line, run_cli, tiny
from .test_resume import unended

FILES = (HISTORY, CHECKPOINT, CONFIG, REPORT, SAMPLE)


def test_overwriting_replaces_a_run_and_nothing_of_others(
    text_folder: Path, tmp_path: Path, elsewhere: Path, compared: tuple[Path, Finished]
) -> None:
    """A run is known by its settings. Others' things may have names that were ours once: a download, a folder, links."""
    run = shutil.copytree(compared[0] / "hdet", tmp_path / "run")
    ours = set(tree(run))
    (run / f".{CONFIG}.partial" / "inner").mkdir(parents=True)
    (run / ".download.partial").write_text("theirs")
    (run / f".{CHECKPOINT}.partial").symlink_to(elsewhere)
    (run / f".{HISTORY}.partial").symlink_to(run / "nothing")
    theirs = {name: content for name, content in tree(run).items() if name not in ours}
    finished = run_cli("train", *tiny(text_folder), "--coresident", "--schedule-only", "--out", str(run), "--overwrite")
    assert finished.code == 0 and finished.err == "", finished.err
    assert json.loads((run / CONFIG).read_text())["mode"] == "fixed"
    after = tree(run)
    assert {name: after[name] for name in theirs} == theirs and elsewhere.read_text() == "theirs"
    assert after.keys() - theirs.keys() == set(FILES)


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("options", [[], ["--overwrite"]])
@pytest.mark.parametrize("what", [*FILES, "a link", "a link to nothing", "a folder"])
def test_what_others_have_in_the_way_is_not_replaced(
    capsys: pytest.CaptureFixture[str], text_folder: Path, tmp_path: Path, elsewhere: Path, what: str, options: list[str]
) -> None:
    """Also not where the settings of a run should be, but something else is."""
    elsewhere.write_text(json.dumps({"mode": "hdet"}))
    run = tmp_path / "run"
    run.mkdir()
    place = run / (what if what in FILES else CONFIG)
    if what == "a folder":
        place.mkdir()
    elif what in FILES:
        place.write_text('{"name": "my project"}')
    else:
        place.symlink_to(elsewhere if what == "a link" else elsewhere.with_name("nothing"))
    before = tree(run), tree(elsewhere.parent)
    message = one_line(capsys, "train", *tiny(text_folder), "--out", str(run), *options)
    assert f"out is '{run}', which holds {place.name}" in message and "was not written by hdet train: pass another --out" in message
    assert (tree(run), tree(elsewhere.parent)) == before


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
    before = tree(both)
    one_line(capsys, "train", "--compare", *tiny(text_folder), "--out", str(both), *options)
    assert tree(both) == before, "the fixed run's files too"


# -- links -------------------------------------------------------------------------------------------------------------------


def test_a_report_does_not_write_through_links(tmp_path: Path, compared: tuple[Path, Finished], elsewhere: Path) -> None:
    run = shutil.copytree(compared[0] / "fixed", tmp_path / "run")
    (run / REPORT).unlink(missing_ok=True)
    (run / REPORT).symlink_to(elsewhere)
    assert main(["report", str(run)]) == 0
    assert elsewhere.read_text() == "theirs" and not (run / REPORT).is_symlink()


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("target", ["file", "nothing"])
def test_resuming_does_not_write_through_links(tmp_path: Path, compared: tuple[Path, Finished], elsewhere: Path, target: str) -> None:
    run = unended(compared[0] / "fixed", tmp_path / "run")
    for name in (CONFIG, HISTORY):
        (run / f".{name}.partial").symlink_to(elsewhere.with_name(target))
    with pytest.raises(AssertionError, match="a process would have been started"):
        main(["train", "--resume", str(run)])
    truncate_history(run / HISTORY, 8)
    (run / HISTORY).rename(run / "history")
    (run / HISTORY).symlink_to(elsewhere.with_name(target))
    with pytest.raises(ValueError, match="is not a regular file"):
        Recorder(run / HISTORY)
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
        before = tree(run)
        found.extend([one_line(capsys, "train", *second), tree(run) == before])
        raise KeyboardInterrupt

    monkeypatch.setattr(Workers, "__enter__", intrude)
    assert main(["train", "--resume", str(run)]) == 130
    message, unchanged = found
    assert f"'{run}' is being written by process {os.getpid()} on " in str(message) and unchanged
    assert not list(run.glob(".*")), "and nothing stays"
    found.clear()
    capsys.readouterr()
    assert main(["train", "--resume", str(run)]) == 130 and found, "it is free again"
