"""Folders that hdet writes: locked while somebody writes, and nothing in them is replaced or removed but what carries hdet's mark.

There are two marks. A folder's is the file ``.hdet`` in it: a checkpoint keeps it, a run's folder has it while the run is written. The mark of a
file that is not whole yet is its name, ``.report.png.hdet-1f6a09c2.partial``. Whoever writes holds a lock on the marked file, which ends with
the process, however that ends. So a marked thing that nobody holds was left by a killed process and may be removed. Everything without a
mark is somebody else's. A symbolic link is never followed: opening one is an error, and removing a folder removes the links in it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # a system without POSIX locks
    fcntl = None  # type: ignore[assignment]

MARK = ".hdet"
_LEFTOVER = re.compile(r"\..+\.hdet-[0-9a-f]{8}\.partial")
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
"""what flock says on a file system that cannot lock"""


class FolderError(ValueError):
    """A folder or a file in it cannot be used; the message names it and the remedy, in one line."""


# -- opening ---------------------------------------------------------------------------------------------------------------


def open_regular(path: Path, flags: int = os.O_RDONLY, *, follow: bool = False) -> int:
    """A handle of a regular file, as `os.open` gives it; with O_CREAT it is made.

    ``follow``: take what a symbolic link leads to, as is right for a path that the user has typed. Raises OSError, and FolderError for
    something else: a link, a folder, a pipe, a device (which could be read for ever).
    """
    # Opening a pipe would wait for its other end.
    safe = getattr(os, "O_NONBLOCK", 0) | (0 if follow else getattr(os, "O_NOFOLLOW", 0))
    try:
        handle = os.open(path, flags | safe, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _not_regular(path) from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _not_regular(path)
    return handle


def _not_regular(path: Path) -> FolderError:
    return FolderError(f"{str(path)!r} is not a regular file (a link, a folder, a pipe or a device): put a file in its place, or remove it")


def read_regular(path: Path, limit: int | None = None, *, follow: bool = False) -> bytes:
    """The contents of a regular file of at most ``limit`` bytes. Raises as `open_regular`; FolderError also for a larger one."""
    with os.fdopen(open_regular(path, follow=follow), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None and size > limit:
            raise FolderError(f"{str(path)!r} has {size} bytes, more than the {limit} that such a file can have: it is damaged")
        return file.read()


def decode_json(text: bytes) -> Any:
    """Raises ValueError, and nothing else, for what is not UTF-8, no JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


# -- files that are whole or absent ------------------------------------------------------------------------------------------


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Write ``path`` whole or not at all: to a new neighbour first, flushed to the disk, then renamed over it.

    A link at ``path`` is replaced, not followed. What killed writers of the same file have left is removed.
    """
    with atomic_path(path) as partial, open(partial, "wb") as file:
        yield file


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """`atomic_file` for whoever opens files by their names: gives that of the neighbour, which is there and empty."""
    remove_leftovers(path.parent, path.name)
    partial = path.with_name(f".{path.name}.hdet-{secrets.token_hex(4)}.partial")
    # O_EXCL: a new file, under a name that nobody knew before; no link leads it away.
    handle = open_regular(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        _lock(handle)
        yield partial
        sync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
        os.close(handle)
    with suppress(OSError):  # systems that cannot open folders do not need it
        sync(path.parent)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove what killed writers of `atomic_file` have left in ``folder`` (of the file ``name`` only). What is being written stays."""
    with suppress(OSError):  # an unreadable folder is found by whoever writes in it
        for entry in folder.iterdir():
            if _LEFTOVER.fullmatch(entry.name) and (name is None or entry.name.startswith(f".{name}.hdet-")):
                with suppress(OSError, FolderError):
                    handle = open_regular(entry, os.O_RDWR)
                    try:
                        if _lock(handle):
                            entry.unlink()
                    finally:
                        os.close(handle)


def sync(path: Path) -> None:
    """What is in a file is on the disk then; names are once their folder is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- folders ---------------------------------------------------------------------------------------------------------------


class OwnedFolder:
    """A folder that hdet writes, or asks whether it has."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.handle: int | None = None
        """Of the lock, while this process holds it. A process that inherits it holds the lock too."""

    @property
    def real(self) -> bool:
        """Is it a folder, and not a link to one?"""
        return self.path.is_dir() and not self.path.is_symlink()

    @property
    def marked(self) -> bool:
        return self.real and (self.path / MARK).is_file() and not (self.path / MARK).is_symlink()

    def hold(self) -> None:
        """Mark the folder, which exists, and keep other processes from doing the same until `release`, or until this process ends. Raises
        OSError, and FolderError if another process holds it, which is named, or something that is not hdet's has the mark's name."""
        assert self.handle is None
        mark = self.path / MARK
        while self.handle is None:
            try:
                handle, new = open_regular(mark, os.O_RDWR | os.O_CREAT | os.O_EXCL), True
            except FileExistsError:
                try:
                    handle, new = open_regular(mark, os.O_RDWR), False
                except FileNotFoundError:  # released in this moment
                    continue
            try:
                locked, holder = _lock(handle), _Holder.read(handle)
                if holder is None:
                    raise FolderError(f"{str(mark)!r} was not written by hdet: move it away, or use another folder")
                if not (new or holder.has_ended if locked is None else locked):
                    remedy = f", or remove {str(mark)!r} if it has ended" if locked is None else ""
                    raise FolderError(f"{str(self.path)!r} is being written by {holder}: wait for its end{remedy}, or use another folder")
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(handle), os.lstat(mark)):  # else its holder has removed it before letting go
                        _Holder.write(handle)
                        self.handle = handle
            finally:
                if self.handle is None:
                    os.close(handle)

    def release(self, *, keep_mark: bool) -> None:
        """Let others hold it; for good measure also in processes that have inherited the handle."""
        handle, self.handle = self.handle, None
        if handle is None:
            return
        try:
            if keep_mark:
                _Holder.erase(handle)
            else:
                (self.path / MARK).unlink(missing_ok=True)
        finally:
            if fcntl is not None:
                with suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    def remove(self) -> None:
        """Remove a held folder, its mark last: what a killed process leaves of it is still known as hdet's. Links in it are not followed."""
        for entry in os.scandir(self.path):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name != MARK:
                os.unlink(entry.path)
        self.release(keep_mark=False)
        self.path.rmdir()


_NOBODY = b"null"


@dataclass(frozen=True)
class _Holder:
    """The process that a mark names: for messages, and where a file system has no locks to know whether it still writes."""

    host: str = ""
    pid: int = 0
    since: float = 0.0
    released: bool = False

    @classmethod
    def read(cls, handle: int) -> _Holder | None:
        """None: the file is somebody else's."""
        text = os.pread(handle, 1000, 0)
        if text in (b"", _NOBODY):  # empty: its holder has just made it
            return cls(released=bool(text))
        try:
            facts = decode_json(text)
            host, pid, since = (facts[key] for key in ("host", "pid", "since"))
        except (ValueError, TypeError, LookupError):
            return None
        return cls(host, pid, since) if (type(host), type(pid), type(since)) == (str, int, float) and pid > 0 else None

    @staticmethod
    def write(handle: int) -> None:
        text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()})
        with suppress(OSError):  # a full disk is reported by what is to be written
            os.ftruncate(handle, 0)
            os.pwrite(handle, text.encode(), 0)

    @staticmethod
    def erase(handle: int) -> None:
        with suppress(OSError):
            os.pwrite(handle, _NOBODY, 0)
            os.ftruncate(handle, len(_NOBODY))

    @property
    def has_ended(self) -> bool:
        """Known for certain? A process of another machine cannot be looked at."""
        if self.released or self.host != socket.gethostname():
            return self.released
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            return False
        return False

    def __str__(self) -> str:
        if not self.pid:
            return "another process"
        name, when = "".join(filter(str.isprintable, self.host))[:80], ""
        with suppress(ValueError, OverflowError, OSError):
            when = time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {name}{when}"


def _lock(handle: int) -> bool | None:
    """Take the lock of an open file, which lasts until its handles are closed. False: another has it. None: there are no locks here."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True
