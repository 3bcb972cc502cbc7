"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


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
