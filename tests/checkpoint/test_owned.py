"""Whose folders a save touches: its own, one process at a time, and nobody else's."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from hdet import checkpoint
from hdet.checkpoint import CheckpointError

from ..adversary.common import tree
from ..distributed import run_ranks
from .helpers import alone, ddp, mlp
from .test_folder import saved

pytestmark = pytest.mark.filterwarnings("ignore:.*holds a later checkpoint")


def anothers(folder: Path, **files: str) -> Path:
    """A folder of another program."""
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("_json", ".json")).write_text(text)
    return folder


def in_the_way(root: Path, how: str) -> None:
    place, elsewhere = root / "step-00000005", anothers(root / "elsewhere", note="theirs")
    if how == "a folder":
        elsewhere.rename(place)
    elif how == "a file":
        place.write_text("theirs")
    elif how == "a link":
        place.symlink_to(elsewhere, target_is_directory=True)
    elif how == "a link to a checkpoint":
        saved(root / "other", 3)
        place.symlink_to(root / "other" / "step-00000003", target_is_directory=True)
    elif how == "a link to nothing":
        place.symlink_to(root / "nothing")
    elif how == "a partial folder":
        elsewhere.rename(root / ".step-00000005.partial")
    else:
        (root / ".step-00000005.partial").symlink_to(elsewhere, target_is_directory=True)


WAYS = ["a folder", "a file", "a link", "a link to a checkpoint", "a link to nothing", "a partial folder", "a partial link"]


@pytest.mark.parametrize("how", WAYS)
def test_what_is_in_the_way_and_not_hdets_is_refused_before_anything_is_written(tmp_path: Path, how: str) -> None:
    in_the_way(tmp_path, how)
    before, run = tree(tmp_path), alone().steps(5)
    facts = run.facts()
    with pytest.raises(CheckpointError, match="step-00000005.*was not written by hdet.*another") as caught:
        checkpoint.save(tmp_path, run.state, 5, keep=1)
    assert "\n" not in str(caught.value)
    assert tree(tmp_path) == before and run.facts() == facts


def test_what_others_have_there_stays(tmp_path: Path) -> None:
    """Folders, files and links, also under names that are ours or were once."""
    anothers(tmp_path / "step-00000001", weights="theirs")
    anothers(tmp_path / "step-00000002", manifest_json='{"format": "another tool\'s"}')
    (tmp_path / "step-00000003").write_text("a file of that name")
    anothers(tmp_path / ".step-00000001.partial", half="theirs")
    anothers(tmp_path / ".step-00000002.replaced", half="theirs")
    (tmp_path / ".step-00000003.partial").symlink_to(anothers(tmp_path / "elsewhere", half="theirs"))
    (tmp_path / ".step-00000004.partial").write_text("theirs")
    before = tree(tmp_path)
    run = saved(tmp_path, 5, 6)
    checkpoint.save(tmp_path, run.steps(1).state, 7, keep=1)
    found = tree(tmp_path)
    assert {name: found[name] for name in before} == before
    assert found.keys() - before.keys() == {"step-00000007"}
    assert alone().resume(tmp_path).facts() == run.facts()


def test_a_checkpoint_that_was_linked_is_left_and_stops_no_save(tmp_path: Path) -> None:
    """Moved to another disk by its owner, with a link in its place."""
    run = saved(tmp_path, 3, 4)
    moved = (tmp_path / "step-00000003").rename(tmp_path / "moved")
    (tmp_path / "step-00000003").symlink_to(moved, target_is_directory=True)
    before = tree(moved)
    for step in (5, 6, 7):
        checkpoint.save(tmp_path, run.steps(1).state, step, keep=1)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["moved", "step-00000003", "step-00000007"]
    assert tree(moved) == before
    assert checkpoint.load(tmp_path / "step-00000003", run.state) == 3, "and reads as before"


def test_a_checkpoint_of_an_earlier_version_is_hdets_own(tmp_path: Path) -> None:
    """It has a manifest, and no other mark."""
    run = saved(tmp_path, 3, 4)
    for folder in tmp_path.iterdir():
        for mark in set(folder.iterdir()) - {folder / ".metadata", folder / "manifest.json", *folder.glob("*.distcp")}:
            mark.unlink()
    checkpoint.save(tmp_path, alone(net=mlp(seed=1)).steps(4).state, 4, keep=10)
    assert alone().resume(tmp_path).facts() != run.facts()
    checkpoint.save(tmp_path, run.steps(1).state, 5, keep=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000005"]


def test_a_damaged_checkpoint_can_be_saved_again(tmp_path: Path) -> None:
    """After going on from the one before."""
    saved(tmp_path, 3, 6)
    (tmp_path / "step-00000006" / "manifest.json").write_text("{")
    run = alone().resume(tmp_path / "step-00000003").steps(3)
    checkpoint.save(tmp_path, run.state, 6)
    assert alone().resume(tmp_path).facts() == run.facts()


# -- two writers -----------------------------------------------------------------------------------------------------------


def while_writing(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """``act`` runs once, in the middle of the next save."""
    save, left = dcp.save, [act]

    def middle(*args: Any, **kwargs: Any) -> Any:
        result = save(*args, **kwargs)
        if left:
            left.pop()()
        return result

    monkeypatch.setattr(dcp, "save", middle)


@pytest.mark.parametrize("step", [3, 7], ids=["the same step", "a later one"])
def test_a_second_writer_is_refused_and_the_first_is_not_disturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    said: list[str] = []
    second = alone(net=mlp(seed=1)).steps(step)
    before = second.facts()

    def intrude() -> None:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(tmp_path, second.state, step)
        said.append(str(caught.value))

    while_writing(monkeypatch, intrude)
    run = alone().steps(3)
    checkpoint.save(tmp_path, run.state, 3)
    assert len(said) == 1 and f"process {os.getpid()} on " in said[0] and "is being written" in said[0] and "\n" not in said[0]
    assert second.facts() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000003"]
    assert alone().resume(tmp_path).facts() == run.facts()
    checkpoint.save(tmp_path, second.state, step)  # nothing is held any more
    assert alone().resume(tmp_path / f"step-{step:08d}").facts() == second.facts()


def test_two_writers_at_once_publish_whole_checkpoints_only(tmp_path: Path) -> None:
    runs = [alone(net=mlp(seed=seed)).steps(1) for seed in range(2)]
    said: list[str] = []

    def write(run: Any) -> None:
        for step in (1, 2, 1, 2, 1, 2):
            try:
                checkpoint.save(tmp_path, run.state, step)
            except CheckpointError as error:
                said.append(str(error))

    threads = [threading.Thread(target=write, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("is being written" in text for text in said), said
    assert len(said) < 12, "somebody wrote"
    facts = [run.facts()["model"] for run in runs]
    for folder in checkpoint.folder.steps(tmp_path):
        assert alone().resume(folder).facts()["model"] in facts
    assert all(re.fullmatch(r"step-0000000\d", entry.name) for entry in tmp_path.iterdir())


def second_job(rank: int, world: int, root: str) -> list[str]:
    run, said = ddp(rank, world).steps(3), []
    before = run.facts()
    for step in (5, 6):
        try:
            checkpoint.save(root, run.state, step)
        except CheckpointError as error:
            said.append(str(error))
    assert run.facts() == before, "not even averaged"
    run.steps(1)
    return said


def test_every_rank_of_the_second_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_way(tmp_path, "a folder")
    found: list[Any] = []
    while_writing(monkeypatch, lambda: found.extend(run_ranks(second_job, 2, str(tmp_path))))
    checkpoint.save(tmp_path, alone().steps(2).state, 2)
    (foreign, held), other = found
    assert other == [foreign, held]
    assert "was not written by hdet" in foreign and f"process {os.getpid()} on " in held
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000005", "whose name it has"
    assert not torch.distributed.is_initialized()
