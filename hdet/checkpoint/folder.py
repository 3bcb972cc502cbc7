"""The folder of a checkpoint on disk: step-XXXXXXXX with torch's files and a manifest.json that vouches for them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .errors import CheckpointError, Together

__all__ = ["MANIFEST", "checksums", "holds_none", "latest", "prepare", "publish", "read_manifest", "rename", "resolve", "steps", "verify"]

MANIFEST = "manifest.json"
FORMAT, VERSION = "hdet-checkpoint", 1
_STEP = re.compile(r"step-(\d{8,})")
_ASIDE = re.compile(r"\.step-(\d{8,})\.replaced")
_PIECE = 1 << 20


def latest(root: str | os.PathLike[str]) -> Path | None:
    """The folder of the highest step in ``root``; None where there is none. What a killed save has left behind is not looked at."""
    found = steps(Path(root))
    return found[-1] if found else None


def holds_none(root: Path) -> bool:
    """Is there no checkpoint in ``root``, and is it none itself? A folder that has the name of one is meant to be one."""
    return _STEP.fullmatch(root.name) is None and not (root / MANIFEST).is_file() and latest(root) is None


def steps(root: Path) -> list[Path]:
    """Complete checkpoints in ``root``, by step. One is complete once it has its final name; and one that was put aside for another of
    the same step is, until that has it (a save may be killed between the two renames)."""
    if not root.is_dir():
        return []
    entries = [entry for entry in root.iterdir() if entry.is_dir()]
    final = {int(match[1]): entry for entry in entries if (match := _STEP.fullmatch(entry.name))}
    aside = {int(match[1]): entry for entry in entries if (match := _ASIDE.fullmatch(entry.name))}
    return [entry for _, entry in sorted((aside | final).items())]


def resolve(path: Path) -> Path:
    """The checkpoint meant by a folder that is one, or by a root that holds some. Raises CheckpointError if there is none."""
    if (path / MANIFEST).is_file():
        return path
    if _STEP.fullmatch(path.name) and path.is_dir():
        raise CheckpointError(f"checkpoint {str(path)!r} has no {MANIFEST}: it is damaged{_before(path)}")
    found = latest(path)
    if found is None:
        raise CheckpointError(
            f"{str(path)!r} holds no checkpoint: pass a folder step-XXXXXXXX that hdet.checkpoint.save wrote, or its root"
        )
    return found


# -- writing -----------------------------------------------------------------------------------------------------------------


def prepare(root: Path, partial: Path) -> None:
    """An empty ``partial``, and nothing of saves that were killed."""
    root.mkdir(parents=True, exist_ok=True)
    for entry in root.iterdir():
        final = root / entry.name[1:].rpartition(".")[0]
        if not (entry.name.startswith(".step-") and _STEP.fullmatch(final.name)):
            continue
        if entry.name.endswith(".replaced") and not final.exists():
            os.rename(entry, final)  # killed between the two renames of `publish`
        elif entry.name.endswith((".partial", ".replaced")):
            shutil.rmtree(entry)
    partial.mkdir()
    _sync(root)


def publish(partial: Path, final: Path, facts: dict[str, Any], files: dict[str, dict[str, Any]], keep: int) -> None:
    """Manifest, then one rename to the final name; then older checkpoints beyond ``keep`` go."""
    manifest = {"format": FORMAT, "version": VERSION, **facts, "files": files}
    with open(partial / MANIFEST, "w") as file:
        json.dump({**manifest, "sha256": _digest_of(manifest)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(partial)
    aside = final.with_name(f".{final.name}.replaced")
    if final.exists():  # the same step again, as after a resume
        os.rename(final, aside)
    os.rename(partial, final)
    _sync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)
    older = [folder for folder in steps(final.parent) if _number(folder) <= _number(final)]
    for folder in older[:-keep]:
        with suppress(OSError):
            gone = folder.rename(folder.with_name(f".{folder.name}.partial"))  # first: a process may be killed while it removes
            shutil.rmtree(gone)


def checksums(folder: Path, names: Sequence[str], together: Together) -> dict[str, dict[str, Any]]:
    """name -> {"bytes": size, "sha256": hex} of these files; the ranks share the reading. Same result on every rank."""
    share = names[together.rank :: together.size]
    found = together.all(lambda: {name: _checksum(folder / name) for name in share})
    return {name: facts for part in found for name, facts in sorted(part.items())}


def _checksum(path: Path) -> dict[str, Any]:
    """A file that is not there has the size None."""
    digest, size = hashlib.sha256(), 0
    try:
        with open(path, "rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
                size += len(piece)
    except FileNotFoundError:
        return {"bytes": None, "sha256": None}
    return {"bytes": size, "sha256": digest.hexdigest()}


def rename(partial: Path, final: Path) -> None:
    """A file that has been written gets its name, or takes another's, durably: never is there half a file under it."""
    _sync(partial)
    os.replace(partial, final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    """What is in a file is durable then; names are once their folder is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _number(folder: Path) -> int:
    return int("".join(filter(str.isdigit, folder.name)))


# -- reading -----------------------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises CheckpointError for one that is damaged or another version's."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except ValueError:
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {str(folder)!r} has an unreadable {MANIFEST}: it is damaged{_before(folder)}")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"checkpoint {str(folder)!r} has version {manifest.get('version')!r}, this hdet reads {VERSION}: load it with the hdet that wrote it "
            f"({manifest.get('hdet')!r})"
        )
    if manifest.pop("sha256", None) != _digest_of(manifest):
        raise CheckpointError(f"the {MANIFEST} of checkpoint {str(folder)!r} has been changed: it is damaged{_before(folder)}")
    return manifest


def verify(folder: Path, files: dict[str, dict[str, Any]], together: Together) -> None:
    """Raises CheckpointError, the same on every rank, for a file that is missing, truncated or changed."""
    found = checksums(folder, sorted(files), together)
    for name, facts in sorted(files.items()):
        if found[name] == facts:
            continue
        size = found[name]["bytes"]
        what = (
            "is missing" if size is None else f"has {size} bytes instead of {facts['bytes']}" if size != facts["bytes"] else "has changed"
        )
        raise CheckpointError(f"{name!r} of checkpoint {str(folder)!r} {what}: it is damaged{_before(folder)}")


def _before(folder: Path) -> str:
    """The remedy: the checkpoint before a damaged one."""
    before: Iterable[Path] = [f for f in steps(folder.parent) if _STEP.fullmatch(folder.name) and _number(f) < _number(folder)]
    found = list(before)
    return f"; load the one before, {str(found[-1])!r}" if found else ""


def _digest_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
