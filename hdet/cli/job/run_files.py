"""The files of a run: their names, what a record must have, and JSON Lines that survive a torn last line."""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hdet.core.schema import Kind, Number
from hdet.owned_folder import FolderError, atomic_file, decode_json, open_regular, read_regular

CONFIG, HISTORY, CHECKPOINT, SAMPLE, REPORT = "config.json", "history.jsonl", "checkpoint.pt", "sample.txt", "report.png"
"""the files in a run's folder"""

Record = dict[str, Any]


class RunFolderError(FolderError):
    """A run's folder or one of its files cannot be used; the message names it and the remedy."""


# -- what is read --------------------------------------------------------------------------------------------------------


Kinds = Mapping[str, Kind]


def check_kinds(values: object, kinds: Kinds, what: str, remedy: str) -> None:
    """Raises RunFolderError, naming ``what``, the key and its value, unless ``values`` is a dict with right values for all ``kinds``."""
    if not isinstance(values, dict):
        raise RunFolderError(f"{what} holds no settings: {remedy}")
    for key, kind in kinds.items():
        if key not in values:
            raise RunFolderError(f"{what} lacks {', '.join(key for key in kinds if key not in values)}: {remedy}")
        try:
            kind.read(values[key], key, {})
        except ValueError as error:
            shown = " ".join(reprlib.repr(values[key]).split())  # a tensor's has several lines
            raise RunFolderError(f"{what} has a wrong {key}, {shown}: {remedy}") from error


# -- what is written -----------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: both become null, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


class Recorder:
    """Appends records to a JSON Lines file, each visible to readers as soon as `write` returns. For rank 0 only. Raises FolderError if
    there is something else than a file, such as a link."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = os.fdopen(open_regular(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(plain(record), allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """To the disk: before a checkpoint that relies on these lines."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_history(path: str | Path) -> list[Record]:
    """All whole records of a JSON Lines file. A last line without its end was torn by a kill and is left out. Raises RunFolderError if
    there is no such file, or a line before the last is not a JSON object."""
    return [record for _, record in _lines(Path(path))]


def read_config(folder: Path) -> Any:
    """What the JSON of a run's settings holds, unchecked. Raises RunFolderError if it cannot be read."""
    path = folder / CONFIG
    try:
        return decode_json(read_regular(path, follow=True))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{str(path)!r} cannot be read ({type(error).__name__}): pass the folder of a run of `hdet train`") from error


def _lines(path: Path) -> Iterator[tuple[bytes, Record]]:
    try:
        text = read_regular(path, follow=True)
    except OSError as error:
        raise RunFolderError(
            f"history {str(path)!r} cannot be read ({error.strerror}): pass the folder of a run of `hdet train`"
        ) from error
    except FolderError as error:
        raise RunFolderError(f"history {error}") from error
    lines = text.split(b"\n")
    torn = lines.pop()  # empty when the last line has its end
    for number, line in enumerate(lines, 1):
        record = _decode(line)
        if record is None:
            raise RunFolderError(f"history {str(path)!r} is damaged in line {number}: remove that line")
        yield line, record
    last = _decode(torn)
    if last is not None:
        yield torn, last


def _decode(line: bytes) -> Record | None:
    try:
        record = decode_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def truncate_history(path: str | Path, step: int) -> None:
    """Drop what was recorded after ``step``: a resumed run writes those lines again. A missing file stays missing; kept lines stay as they are.
    Raises RunFolderError as `read_history`, or if a record's step is no number."""
    path = Path(path)
    if not os.path.lexists(path):
        return
    kept = []
    for number, (line, record) in enumerate(_lines(path), 1):
        check_kinds({"step": 0} | record, {"step": Number()}, f"line {number} of history {str(path)!r}", "remove that line")
        if record.get("step", 0) <= step and record.get("event") != "end":
            kept.append(line + b"\n")
    with atomic_file(path) as file:
        file.writelines(kept)
