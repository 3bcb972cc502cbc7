"""The files of a run: JSON Lines that survive a torn last line, and files that are whole or absent."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

__all__ = [
    "CHECKPOINT",
    "CONFIG",
    "HISTORY",
    "REPORT",
    "SAMPLE",
    "Recorder",
    "RunFolderError",
    "atomic_file",
    "encode",
    "read_history",
    "truncate_history",
]

CONFIG, HISTORY, CHECKPOINT, SAMPLE, REPORT = "config.json", "history.jsonl", "checkpoint.pt", "sample.txt", "report.png"
"""the files in a run's folder"""

Record = dict[str, Any]


class RunFolderError(ValueError):
    """A run's folder or one of its files cannot be used; the message names it and the remedy."""


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Write ``path`` whole or not at all: to a neighbour first, flushed to the disk, then renamed over it."""
    # One fixed name per target: what a killed writer leaves behind is overwritten by the next one instead of piling up.
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    # The rename itself must reach the disk too; systems that cannot open folders do not need it.
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: both become null, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def encode(record: Mapping[str, Any]) -> str:
    """One line of JSON, without the line's end."""
    return json.dumps(_plain(record), allow_nan=False)


class Recorder:
    """Appends records to a JSON Lines file, each visible to readers as soon as `write` returns. For rank 0 only."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  (closed by close)

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(encode(record) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """To the disk: before a checkpoint that relies on these lines."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_history(path: str | Path) -> list[Record]:
    """All whole records of a JSON Lines file. A last line without its end was torn by a kill and is left out.

    Raises:
        RunFolderError: no such file, or a line before the last that is not a JSON object.
    """
    path = Path(path)
    try:
        text = path.read_bytes()
    except OSError as error:
        raise RunFolderError(
            f"history {str(path)!r} cannot be read ({error.strerror}): pass the folder of a run of `hdet train`"
        ) from error
    lines = text.split(b"\n")
    torn = lines.pop()  # empty when the last line has its end
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        record = _decode(line)
        if record is None:
            raise RunFolderError(f"history {str(path)!r} is damaged in line {number}: remove that line")
        records.append(record)
    last = _decode(torn)
    return records if last is None else [*records, last]


def _decode(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:  # JSONDecodeError and UnicodeDecodeError
        return None
    return record if isinstance(record, dict) else None


def truncate_history(path: str | Path, step: int) -> None:
    """Drop what was recorded after ``step``: a resumed run writes those lines again. A missing file stays missing."""
    path = Path(path)
    if not path.exists():
        return
    kept = [record for record in read_history(path) if record.get("step", 0) <= step and record.get("event") != "end"]
    with atomic_file(path) as file:
        file.write("".join(encode(record) + "\n" for record in kept).encode())
