"""The folder of a checkpoint: step-XXXXXXXX with a manifest of sizes and checksums.

Nothing but files with the names that hdet writes is ever removed, and no link is followed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .errors import CheckpointError, Together

MANIFEST, STATE, LOCK = "manifest.json", "state.json", ".hdet-lock"
FORMAT, VERSION = "hdet-checkpoint", 2
_STEP = re.compile(r"step-(\d{8,})")
_HIDDEN = re.compile(r"\.hdet-(step-(\d{8,}))\.(partial|replaced)")
_FILE = re.compile(r"manifest\.json|state\.json|rank-\d{5,}-\d{3,}\.safetensors")
_KINDS = {"hdet": str, "torch": str, "step": int, "replicas": int, "members": int, "files": dict}
"""what a manifest has, beside format, version and its own digest"""


def latest(root: str | os.PathLike[str]) -> Path | None:
    """The folder of the highest step in ``root``; None where there is none."""
    found = steps(Path(root))
    return found[-1] if found else None


def steps(root: Path) -> list[Path]:
    """Checkpoints in ``root``, by step.

    One has its final name; or it was put aside for another of the same step, which has not come (a
    save may be killed between the two renames of `publish`).
    """
    if not root.is_dir():
        return []
    entries = [entry for entry in root.iterdir() if entry.is_dir()]
    final = {int(m[1]): e for e in entries if (m := _STEP.fullmatch(e.name))}
    hidden = [(m, e) for e in entries if (m := _HIDDEN.fullmatch(e.name))]
    aside = {int(m[2]): e for m, e in hidden if m[3] == "replaced"}
    return [entry for _, entry in sorted((aside | final).items())]


def find_checkpoint(path: Path) -> Path | None:
    """That folder, if it is meant to be a checkpoint, or the latest one of a root."""
    is_one = _STEP.fullmatch(path.name) is not None or (path / MANIFEST).exists()
    return path if is_one else latest(path)


# -- writing --------------------------------------------------------------------------------------


def final_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def partial_folder(final: Path) -> Path:
    return final.with_name(f".hdet-{final.name}.partial")


@contextmanager
def locked_for(final: Path) -> Iterator[None]:
    """Inside, an empty partial folder for ``final`` is there, and no other process saves beside it.

    What killed saves have left is removed. The lock ends with its process.

    Raises:
        CheckpointError: another process saves there, or what has the name of ``final`` is not a
            checkpoint of hdet's; nothing is written then.
    """
    if os.path.lexists(final) and not _is_own(final):
        raise CheckpointError(
            f"{str(final)!r} holds what this version of hdet does not write: move it away, or save "
            "to another folder"
        )
    final.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(final.parent / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise CheckpointError(
            f"{str(final.parent)!r} is being written by another process: wait for its end, or, "
            f"if it has ended and the file system has no locks, remove {LOCK!r} there"
        ) from None
    try:
        _clear(final.parent)
        partial_folder(final).mkdir()
        yield
    finally:
        lock.release()


def _is_own(folder: Path) -> bool:
    """Does it hold nothing but files of a checkpoint? A link to one is somebody else's."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    names = [entry.name for entry in folder.iterdir()]
    return all(map(_FILE.fullmatch, names)) and (STATE in names or not names)


def _clear(root: Path) -> None:
    for entry in sorted(root.iterdir()):
        match = _HIDDEN.fullmatch(entry.name)
        if match is None or entry.is_symlink() or not entry.is_dir():
            continue
        if match[3] == "replaced" and not os.path.lexists(root / match[1]):
            os.rename(entry, root / match[1])  # killed between the two renames of `publish`
        else:
            _remove(entry)


def _remove(folder: Path) -> None:
    """Remove the files with hdet's names, then the folder, unless something else is left in it."""
    with suppress(OSError):  # what cannot be removed now is, by a later save
        for entry in folder.iterdir():
            if _FILE.fullmatch(entry.name):
                entry.unlink()
        folder.rmdir()


def write_json(path: Path, value: Any) -> None:
    with open(path, "x", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())


def publish(final: Path, facts: dict[str, Any], files: dict[str, Any], keep: int) -> None:
    """Write the manifest, rename the partial folder, remove all but the last ``keep`` so far."""
    partial = partial_folder(final)
    manifest = {"format": FORMAT, "version": VERSION, **facts, "files": files}
    write_json(partial / MANIFEST, {**manifest, "sha256": _digest(manifest)})
    sync(partial)
    aside = final.with_name(f".hdet-{final.name}.replaced")
    if os.path.lexists(final):  # the same step again, as after a resume
        os.rename(final, aside)
    os.rename(partial, final)
    sync(final.parent)
    if aside.is_dir():
        _remove(aside)
    older = [s for s in steps(final.parent) if _number(s) <= _number(final) and _is_own(s)]
    for folder in older[:-keep]:
        with suppress(OSError):
            # Renamed first: a process may be killed while it removes.
            _remove(folder.rename(partial_folder(folder)))


def files_facts(
    folder: Path, sizes: Mapping[str, int | None], together: Together
) -> dict[str, dict[str, Any]]:
    """Size and checksum of each file, the same on every rank; the ranks share the reading.

    Args:
        sizes: in bytes by name, where known; a file of another size is not read.
    """
    share = sorted(sizes)[together.rank :: together.size]
    parts = together.all(lambda: {name: _file_facts(folder / name, sizes[name]) for name in share})
    return {name: facts for part in parts for name, facts in part.items()}


def _file_facts(path: Path, expected_bytes: int | None) -> dict[str, Any]:
    if path.is_symlink() or not path.is_file():
        return {"bytes": None, "sha256": None}
    size, digest = path.stat().st_size, hashlib.sha256()
    if expected_bytes not in (None, size):
        return {"bytes": size, "sha256": None}
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _number(folder: Path) -> int:
    return int("".join(filter(str.isdigit, folder.name)))


# -- files that are whole or absent ---------------------------------------------------------------


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Write ``path`` whole or not at all: give the name of a new neighbour, then rename it.

    The neighbour is flushed to the disk before the rename. A link at ``path`` is replaced, not
    followed. After an error ``path`` is as it was.

    Example:
        >>> with replace_file(Path("report.html")) as partial:
        ...     partial.write_text(page)
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # of a killed writer; a link there must not lead the file away
    partial.touch(exist_ok=False)
    try:
        yield partial
        sync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    with suppress(OSError):  # systems that cannot open folders do not need it
        sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- reading --------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a manifest. Raises CheckpointError for one that is damaged or of another version."""
    name = f"checkpoint {str(folder)!r}"
    what = f"the {MANIFEST} of {name}"
    if not folder.is_dir():
        raise CheckpointError(
            f"{str(folder)!r} holds no checkpoint: pass another folder, or its root"
        )
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"{name} has no {MANIFEST}{_damaged(folder)}")
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{what} is unreadable{_damaged(folder)}")
    if manifest.get("version") != VERSION:
        version, hdet = (reprlib.repr(manifest.get(key)) for key in ("version", "hdet"))
        raise CheckpointError(
            f"{name} has format {version}, and this hdet reads format {VERSION}: load it with the "
            f"hdet that wrote it ({hdet})"
        )
    if manifest.pop("sha256", None) != _digest(manifest):
        raise CheckpointError(f"{what} has been changed{_damaged(folder)}")
    wrong = [key for key, kind in _KINDS.items() if type(manifest.get(key)) is not kind]
    if wrong or not all(map(_FILE.fullmatch, manifest["files"])) or STATE not in manifest["files"]:
        raise CheckpointError(
            f"{what} has a wrong {wrong[0] if wrong else 'files'}{_damaged(folder)}"
        )
    return manifest


def verify_files(folder: Path, files: Mapping[str, Mapping[str, Any]], together: Together) -> None:
    """Compare all files with the manifest; the ranks share the reading.

    Raises:
        CheckpointError: a file is missing, truncated or changed, the same on every rank.
    """
    facts = files_facts(folder, {name: files[name]["bytes"] for name in files}, together)
    for name, found in sorted(facts.items()):
        if found == files[name]:
            continue
        size, expected = found["bytes"], files[name]["bytes"]
        what = "has changed" if size == expected else f"has {size} bytes instead of {expected}"
        what = "is missing, or no regular file" if size is None else what
        raise CheckpointError(f"{name!r} of checkpoint {str(folder)!r} {what}{_damaged(folder)}")


def _damaged(folder: Path) -> str:
    """The end of a message: it is damaged, and which checkpoint is before it."""
    is_step = _STEP.fullmatch(folder.name)
    before = [s for s in steps(folder.parent) if is_step and _number(s) < _number(folder)]
    return ": it is damaged" + (f"; load the one before, {str(before[-1])!r}" if before else "")


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
