"""The folder of a checkpoint on disk: step-XXXXXXXX with torch's files and a manifest.json of their sizes and checksums."""

from __future__ import annotations

import hashlib
import json
import os
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..owned_folder import FolderError, OwnedFolder, decode_json, open_regular, read_regular, sync
from .errors import CheckpointError, Together

MANIFEST = "manifest.json"
FORMAT, VERSION = "hdet-checkpoint", 1
_STEP = re.compile(r"step-(\d{8,})")
_ASIDE = re.compile(r"\.step-(\d{8,})\.replaced")
_HIDDEN = re.compile(r"\.(step-\d{8,})\.(partial|replaced)")
_PIECE = 1 << 20
_LONGEST = 1 << 26
"""bytes of a manifest: it has some 120 for each file, of which a rank writes one"""


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
    if os.path.lexists(path / MANIFEST) or (_STEP.fullmatch(path.name) and path.is_dir()):
        return path
    found = latest(path)
    if found is None:
        raise CheckpointError(
            f"{str(path)!r} holds no checkpoint: pass a folder step-XXXXXXXX that hdet.checkpoint.save wrote, or its root"
        )
    return found


# -- writing -----------------------------------------------------------------------------------------------------------------


@contextmanager
def claim(root: Path, final: Path) -> Iterator[None]:
    """Inside, an empty ``.step-XXXXXXXX.partial`` for ``final`` is there, and no other process saves in ``root``.

    What killed saves have left is removed before. Of a save that fails inside, the partial folder stays, for the next save to remove.
    Raises FolderError, before anything is written, if another process saves there, or what has the name of ``final``, or of its partial
    folder, is not hdet's.
    """
    partial = _partial(final)
    if os.path.lexists(final) and not _is_ours(final):
        raise FolderError(
            f"{str(final)!r} was not written by hdet, whose mark and manifest it lacks: move it away, or save to another folder"
        )
    if os.path.lexists(partial) and not OwnedFolder(partial).marked:
        with suppress(OSError):
            partial.rmdir()  # an empty one: killed before it was marked
        if os.path.lexists(partial):
            raise FolderError(
                f"{str(partial)!r} was not written by hdet, or left there by an earlier version of it: move it away, or save to another folder"
            )
    root.mkdir(parents=True, exist_ok=True)
    _clear(root)
    owned = OwnedFolder(partial)
    try:
        partial.mkdir()
        owned.hold()
    except (FileExistsError, FileNotFoundError) as error:  # made, or taken for a leftover, in this moment
        raise FolderError(f"{str(root)!r} is being written by another process: wait for its end, or save to another folder") from error
    try:
        try:
            _clear(root, besides=partial)  # of two that come at once, at least one sees the other's folder now
        except BaseException:
            owned.remove()
            raise
        sync(root)
        yield
    finally:
        owned.release(keep_mark=True)


def _partial(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial")


def _is_ours(folder: Path) -> bool:
    """Has hdet written this checkpoint? A link to one is somebody else's. Earlier versions have left no mark but the manifest."""
    owned = OwnedFolder(folder)
    if not owned.real or owned.marked:
        return owned.marked
    try:
        manifest = decode_json(read_regular(folder / MANIFEST, _LONGEST))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def _clear(root: Path, besides: Path | None = None) -> None:
    """Remove what killed saves have left. Raises FolderError if one of them is not killed, but under way."""
    for entry in sorted(root.iterdir()):
        match = _HIDDEN.fullmatch(entry.name)
        if match is None or entry == besides:
            continue
        if not _is_ours(entry):
            with suppress(OSError):
                entry.rmdir()  # an empty one: killed before it was marked
            continue
        owned, final = OwnedFolder(entry), root / match[1]
        with suppress(FileNotFoundError):  # somebody else's save ends in this moment
            owned.hold()
            try:
                if match[2] == "replaced" and not os.path.lexists(final):
                    os.rename(entry, final)  # killed between the two renames of `publish`
                else:
                    owned.remove()
            finally:
                owned.release(keep_mark=True)


def publish(final: Path, facts: dict[str, Any], files: dict[str, dict[str, Any]], keep: int) -> None:
    """Manifest, then one rename to the final name; then older checkpoints of hdet's beyond ``keep`` go."""
    partial = _partial(final)
    manifest = {"format": FORMAT, "version": VERSION, **facts, "files": files}
    with open(partial / MANIFEST, "x") as file:
        json.dump({**manifest, "sha256": _digest_of(manifest)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync(partial)
    aside = final.with_name(f".{final.name}.replaced")
    if _is_ours(final):  # the same step again, as after a resume
        os.rename(final, aside)
    os.rename(partial, final)
    sync(final.parent)
    _remove(aside)
    older = [folder for folder in steps(final.parent) if _number(folder) <= _number(final) and _is_ours(folder)]
    for folder in older[:-keep]:
        _remove(folder)


def _remove(folder: Path) -> None:
    """A checkpoint of hdet's. What cannot be removed now is, by a later save."""
    owned = OwnedFolder(folder)
    with suppress(OSError, FolderError):
        owned.hold()
        try:
            if _STEP.fullmatch(folder.name):  # first: a process may be killed while it removes
                owned.path = folder.rename(_partial(folder))
            owned.remove()
        finally:
            owned.release(keep_mark=True)


def checksums(folder: Path, names: Sequence[str], together: Together, sizes: Mapping[str, int] | None = None) -> dict[str, dict[str, Any]]:
    """name -> {"bytes": size, "sha256": hex} of these files; the ranks share the reading. Same result on every rank.

    A file that is not there has the size None; one of another size than in ``sizes`` is not read.
    """
    share = names[together.rank :: together.size]
    found = together.all(lambda: {name: _checksum(folder / name, None if sizes is None else sizes[name]) for name in share})
    return {name: facts for part in found for name, facts in sorted(part.items())}


def _checksum(path: Path, expected: int | None) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    try:
        handle = open_regular(path)
    except FileNotFoundError:
        return {"bytes": None, "sha256": None}
    with os.fdopen(handle, "rb") as file:
        present = os.fstat(file.fileno()).st_size
        if expected not in (None, present):
            return {"bytes": present, "sha256": None}
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _number(folder: Path) -> int:
    return int("".join(filter(str.isdigit, folder.name)))


# -- reading -----------------------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises CheckpointError for one that is damaged or another version's. What is returned has the keys and kinds of `_KINDS`."""

    def damaged(what: str) -> CheckpointError:
        return CheckpointError(f"{what}: it is damaged{_before(folder)}")

    checkpoint = f"checkpoint {str(folder)!r}"
    try:
        manifest = decode_json(read_regular(folder / MANIFEST, _LONGEST))
        digest = _digest_of({key: value for key, value in manifest.items() if key != "sha256"}) if isinstance(manifest, dict) else None
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint} has no {MANIFEST}: it is damaged, or another program's{_before(folder)}") from None
    except FolderError as error:
        raise CheckpointError(f"{error}{_before(folder)}") from error
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or type(manifest.get("version")) is not int:
        raise damaged(f"{checkpoint} has an unreadable {MANIFEST}")
    if manifest["version"] != VERSION:
        raise CheckpointError(
            f"{checkpoint} has version {reprlib.repr(manifest['version'])}, this hdet reads {VERSION}: load it with the hdet that wrote it "
            f"({reprlib.repr(manifest.get('hdet'))})"
        )
    if manifest.pop("sha256", None) != digest:
        raise damaged(f"the {MANIFEST} of {checkpoint} has been changed")
    for key in {**manifest, **_KINDS}:
        if key not in _KINDS or key not in manifest or not _KINDS[key](manifest[key]):
            raise damaged(f"the {MANIFEST} of {checkpoint} has a wrong {reprlib.repr(key)[1:-1]}")
    return manifest


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value < 1 << 63


def _is_name(name: str) -> bool:
    """Of a file in the folder itself, on any system."""
    return name not in ("", ".", "..") and name.isprintable() and not {"/", "\\", ":"} & set(name)


def _are_files(files: Any) -> bool:
    return (
        isinstance(files, dict)
        and all(map(_is_name, files))
        and all(isinstance(facts, dict) and facts.keys() == {"bytes", "sha256"} for facts in files.values())
        and all(_whole(0)(facts["bytes"]) and isinstance(facts["sha256"], str) for facts in files.values())
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_KINDS: dict[str, Callable[[Any], bool]] = {
    "format": _is_text,
    "version": _whole(0),
    "hdet": _is_text,
    "torch": _is_text,
    "step": _whole(0),
    "replicas": _whole(1),
    "members": _whole(1),
    "files": _are_files,
}
"""what a manifest has, beside its own digest"""


def verify(folder: Path, files: dict[str, dict[str, Any]], together: Together) -> None:
    """Raises CheckpointError, the same on every rank, for a file that is missing, truncated or changed."""
    found = checksums(folder, sorted(files), together, {name: facts["bytes"] for name, facts in files.items()})
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
    before = [f for f in steps(folder.parent) if _STEP.fullmatch(folder.name) and _number(f) < _number(folder)]
    return f"; load the one before, {str(before[-1])!r}" if before else ""


def _digest_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
