"""Which sources a native module was built from. setup.py runs this file, without the package."""

import hashlib
from pathlib import Path


def digest_of(folder: Path) -> str:
    """Of the C++ and CUDA files in this folder and what prints rules.h, whatever ends their lines;
    empty if it is not hdet's."""
    if not (folder / "core" / "plan.h").exists():
        return ""
    suffixes = (".h", ".cpp", ".cu", ".cuh", ".py")
    files = sorted(path for path in folder.rglob("*") if path.suffix in suffixes)
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        digest.update(path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()[:16]
