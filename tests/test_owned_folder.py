"""The mechanism below checkpoints and runs: marks, locks that end with their process, and files that links cannot lead away."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hdet import owned_folder
from hdet.owned_folder import MARK, FolderError, OwnedFolder, atomic_file, decode_json, open_regular, read_regular, remove_leftovers

HOLD = """
import subprocess, sys
from pathlib import Path
from hdet.owned_folder import OwnedFolder

owned = OwnedFolder(Path(sys.argv[1]))
owned.hold()
child = subprocess.Popen([sys.executable, "-c", "input()"], pass_fds=[owned.handle])
print(child.pid, flush=True)
input()
"""


def test_a_killed_holder_does_not_block_once_whoever_it_started_has_ended_too(tmp_path: Path) -> None:
    """Its workers may still be writing for a moment."""
    owned = OwnedFolder(tmp_path)
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        held = f"is being written by process {holder.pid} on {socket.gethostname()} since 2"
        for still in (holder.pid, child):
            for _ in range(2):
                with pytest.raises(FolderError, match=held) as caught:
                    owned.hold()
                assert "\n" not in str(caught.value)
            os.kill(still, signal.SIGKILL)
        while True:  # the system takes its moment; a lock that stays is a hang
            try:
                owned.hold()
                break
            except FolderError:
                time.sleep(0.01)
    with pytest.raises(FolderError, match=f"process {os.getpid()} on"):
        OwnedFolder(tmp_path).hold()
    owned.release(keep_mark=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ended", [True, False])
def test_without_locks_the_process_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool) -> None:
    monkeypatch.setattr(owned_folder, "fcntl", None)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        facts: dict[str, Any] = {"host": socket.gethostname(), "pid": other.pid, "since": 1.5}
        (tmp_path / MARK).write_text(json.dumps(facts))
        owned = OwnedFolder(tmp_path)
        if ended:
            other.kill()
            other.wait()
            owned.hold()
            owned.release(keep_mark=True)
            owned.hold()  # let go of, though the mark is there
            owned.release(keep_mark=False)
        else:
            with pytest.raises(FolderError, match=rf"process {other.pid} on .*or remove '.*{MARK}' if it has ended"):
                owned.hold()
            (tmp_path / MARK).write_text(json.dumps({**facts, "host": "another"}))
            with pytest.raises(FolderError, match=rf"process {other.pid} on another since .*or remove '.*{MARK}' if it has ended"):
                owned.hold()


@pytest.mark.parametrize("content", ["theirs", "[]", '{"host": 1}', "[" * 900, '{"host": "a", "pid": -1, "since": 0.5}'])
def test_a_mark_of_somebody_else_is_left(tmp_path: Path, content: str) -> None:
    (tmp_path / MARK).write_text(content)
    with pytest.raises(FolderError, match="was not written by hdet: move it away"):
        OwnedFolder(tmp_path).hold()
    assert (tmp_path / MARK).read_text() == content


@pytest.mark.parametrize("how", ["link", "folder", "pipe"])
def test_a_mark_that_is_no_file_is_no_mark(tmp_path: Path, elsewhere: Path, how: str) -> None:
    mark = tmp_path / MARK
    {"link": lambda: mark.symlink_to(elsewhere), "folder": mark.mkdir, "pipe": lambda: os.mkfifo(mark)}[how]()
    assert not OwnedFolder(tmp_path).marked
    with pytest.raises(FolderError, match="is not a regular file"):
        OwnedFolder(tmp_path).hold()
    assert elsewhere.read_text() == "theirs"


def test_removing_a_folder_follows_no_link(tmp_path: Path, elsewhere: Path) -> None:
    folder = tmp_path / "ours"
    (folder / "inner").mkdir(parents=True)
    for place in (folder, folder / "inner"):
        (place / "file").symlink_to(elsewhere)
        (place / "folder").symlink_to(elsewhere.parent)
    link = tmp_path / "link"
    link.symlink_to(folder)
    owned = OwnedFolder(folder)
    owned.hold()
    assert owned.marked and not OwnedFolder(link).marked
    owned.remove()
    assert elsewhere.read_text() == "theirs" and not folder.exists()


def test_what_killed_writers_have_left_goes_with_the_next_file_and_nothing_else(tmp_path: Path, elsewhere: Path) -> None:
    kept = [".report.png.partial", ".theirs.partial", ".report.png.hdet-0123.partial", ".other.hdet-01234567.partial"]
    for name in kept:
        (tmp_path / name).write_text("theirs")
    (tmp_path / ".report.png.hdet-aaaaaaaa.partial").mkdir()
    (tmp_path / ".report.png.hdet-bbbbbbbb.partial").symlink_to(elsewhere)
    (tmp_path / ".report.png.hdet-cccccccc.partial").write_text("half")
    before = {entry.name for entry in tmp_path.iterdir()} - {".report.png.hdet-cccccccc.partial"}
    with atomic_file(tmp_path / "report.png") as file:
        file.write(b"new")
        file.flush()
        (under_way,) = (entry for entry in tmp_path.iterdir() if entry.name not in before)
        remove_leftovers(tmp_path)
        assert under_way.read_bytes() == b"new", "it is held"
    assert {entry.name for entry in tmp_path.iterdir()} == before - {kept[3]} | {"report.png"}
    assert elsewhere.read_text() == "theirs"


def test_a_link_in_a_file_s_place_is_replaced(tmp_path: Path, elsewhere: Path) -> None:
    (tmp_path / "report.png").symlink_to(elsewhere)
    with atomic_file(tmp_path / "report.png") as file:
        file.write(b"new")
    assert elsewhere.read_text() == "theirs" and (tmp_path / "report.png").read_bytes() == b"new"
    assert not (tmp_path / "report.png").is_symlink()


def test_only_regular_files_are_opened(tmp_path: Path, elsewhere: Path) -> None:
    (tmp_path / "link").symlink_to(elsewhere)
    (tmp_path / "zero").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "zero", "pipe", "."):
        with pytest.raises(FolderError, match="is not a regular file"):
            open_regular(tmp_path / name)
    for name in ("zero", "pipe"):
        with pytest.raises(FolderError, match="is not a regular file"):
            open_regular(tmp_path / name, follow=True)
    assert read_regular(tmp_path / "link", follow=True) == b"theirs"
    with pytest.raises(FolderError, match="has 6 bytes, more than the 5"):
        read_regular(elsewhere, 5)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "absent")


@pytest.mark.parametrize("text", [b"[" * 3000, b'{"a":' * 100_000, b"1" * 100_000, b"\xff", b"", b"{}x"])
def test_json_is_right_or_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        decode_json(text)
