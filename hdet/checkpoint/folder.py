"""The folder of a checkpoint: step-XXXXXXXX with a manifest of sizes and checksums.

Nothing but files with the names that hdet writes is ever removed, and no link is followed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .together import CheckpointError, Together

MANIFEST, STATE, LOCK = "manifest.json", "state.json", ".hdet-lock"
FORMAT, VERSION = "hdet-checkpoint", 2
_STEP = re.compile(r"step-(\d{8,})")
_REPLACED = re.compile(r"\.hdet-step-(\d{8,})\.replaced")
_PARTIAL = re.compile(r"\.hdet-step-(\d{8,})\.partial")
_FILE = re.compile(r"manifest\.json|state\.json|rank-\d{5,}-\d{3,}\.safetensors")


def latest(root: str | os.PathLike[str]) -> Path | None:
    """The folder of the highest step in ``root``; None where there is none."""
    return next(reversed(steps(Path(root)).values()), None)


def steps(root: Path) -> dict[int, Path]:
    """Checkpoints by step; also one that was put aside for another, which a kill has prevented."""
    return dict(sorted({**_folders(root, _REPLACED), **_folders(root, _STEP)}.items()))


def _folders(root: Path, name: re.Pattern[str]) -> dict[int, Path]:
    entries = list(root.iterdir()) if root.is_dir() else []
    return {int(m[1]): e for e in entries if (m := name.fullmatch(e.name)) and e.is_dir()}


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
    root = final.parent
    if os.path.lexists(final) and not _is_own(final):
        raise CheckpointError(
            f"{str(final)!r} holds what this version of hdet does not write: move it away, or save "
            "to another folder"
        )
    root.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(root / LOCK, timeout=0):
            for step, aside in _folders(root, _REPLACED).items():
                if not os.path.lexists(home := final_folder(root, step)):
                    os.rename(aside, home)  # killed between the two renames of `publish`
            for name in (_REPLACED, _PARTIAL):
                for left in _folders(root, name).values():
                    _remove(left)
            partial_folder(final).mkdir()
            yield
    except Timeout:
        raise CheckpointError(
            f"{str(root)!r} is being written by another process: wait for its end, or, "
            f"if it has ended and the file system has no locks, remove {LOCK!r} there"
        ) from None


def _is_own(folder: Path) -> bool:
    """Does it hold nothing but files of a checkpoint? A link to one is somebody else's."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    names = [entry.name for entry in folder.iterdir()]
    return STATE in names and all(map(_FILE.fullmatch, names))


def _remove(folder: Path) -> None:
    """Remove the files with hdet's names, then the folder, unless something else is left in it."""
    with suppress(OSError):  # what cannot be removed now is, by a later save
        for entry in folder.iterdir() if not folder.is_symlink() else ():
            if _FILE.fullmatch(entry.name):
                entry.unlink()
        folder.rmdir()


def publish(final: Path, content: Any, manifest: dict[str, Any], keep: int) -> None:
    """Write both JSON files, rename the partial folder, remove all but the last ``keep`` so far."""
    partial, aside = partial_folder(final), final.with_name(f".hdet-{final.name}.replaced")
    _write_json(partial / STATE, content)
    manifest["files"][STATE] = file_facts(partial / STATE)
    manifest = {"format": FORMAT, "version": VERSION, **manifest}
    _write_json(partial / MANIFEST, {**manifest, "sha256": _digest(manifest)})
    sync(partial)
    if os.path.lexists(final):  # the same step again, as after a resume
        os.rename(final, aside)
    os.rename(partial, final)
    sync(final.parent)
    if aside.is_dir():
        _remove(aside)
    found = steps(final.parent).items()
    older = [folder for step, folder in found if step <= manifest["step"] and _is_own(folder)]
    for folder in older[:-keep]:
        with suppress(OSError):
            # Renamed first: a process may be killed while it removes.
            _remove(folder.rename(partial_folder(folder)))


def _write_json(path: Path, value: Any) -> None:
    with open(path, "x", encoding="utf-8") as file:
        json.dump(value, file)
    sync(path)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_facts(path: Path) -> dict[str, Any]:
    """Size and checksum of a file, for the manifest."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


# -- reading --------------------------------------------------------------------------------------


def open_checkpoint(path: Path, must_exist: bool) -> tuple[Path, dict[str, Any]] | None:
    """Folder and manifest of a checkpoint, or of the latest one of a root; None: there is none.

    Raises:
        CheckpointError: a manifest is damaged, or of another version; or there is no checkpoint and
            ``path`` is meant to be one, or ``must_exist``.
    """
    is_one = _STEP.fullmatch(path.name) is not None or (path / MANIFEST).exists()
    folder = path if is_one else latest(path)
    if folder is None and not must_exist:
        return None
    if folder is None or not folder.is_dir():
        raise CheckpointError(
            f"{str(path)!r} holds no checkpoint: pass a folder step-XXXXXXXX that "
            "hdet.checkpoint.save wrote, or its root"
        )
    name, file = f"checkpoint {str(folder)!r}", folder / MANIFEST
    try:
        manifest = json.loads(file.read_bytes() if _is_regular(file) else "")
        digest, is_ours = manifest.pop("sha256", None), manifest["format"] == FORMAT
    except (ValueError, RecursionError, AttributeError, LookupError):
        is_ours = False
    if is_ours and manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{name} has format {manifest.get('version')}, and this hdet reads format {VERSION}: "
            f"load it with the hdet that wrote it ({manifest.get('hdet')})"
        )
    if not is_ours or digest != _digest(manifest) or STATE not in manifest.get("files", ()):
        raise CheckpointError(
            f"the {MANIFEST} of {name} is missing or has changed{_damaged(folder)}"
        )
    return folder, manifest


def verify_files(folder: Path, files: Mapping[str, Mapping[str, Any]], together: Together) -> None:
    """Compare all files with the manifest; the ranks share the reading.

    Raises:
        CheckpointError: a file is missing, truncated or changed.
    """

    def verify() -> None:
        for name in sorted(files)[together.place :: together.size]:
            path, expected = folder / name, files[name]
            if not _FILE.fullmatch(name) or not _is_regular(path):
                what = "is missing, or no regular file"
            elif (size := path.stat().st_size) != expected["bytes"]:
                what = f"has {size} bytes instead of {expected['bytes']}"
            elif file_facts(path) != expected:
                what = "has changed"
            else:
                continue
            raise CheckpointError(
                f"{name!r} of checkpoint {str(folder)!r} {what}{_damaged(folder)}"
            )

    together.all(verify)


def _is_regular(path: Path) -> bool:
    """And no link: to read a pipe may never end."""
    return path.is_file() and not path.is_symlink()


def _damaged(folder: Path) -> str:
    """The end of a message: it is damaged, and which checkpoint is before it."""
    match = _STEP.fullmatch(folder.name)
    before = [f for step, f in steps(folder.parent).items() if match and step < int(match[1])]
    return ": it is damaged" + (f"; load the one before, {str(before[-1])!r}" if before else "")
