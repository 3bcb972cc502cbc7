"""Text that every machine has: the Python library's own source, split by module."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

Batch = tuple[torch.Tensor, torch.Tensor]

SUFFIXES = (".py", ".txt", ".md")
# Tests and generated tables would be half of the bytes and teach little.
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}
SKIPPED_FOLDERS |= {"__pycache__", "pydoc_data", "turtledemo", "encodings"}
SKIPPED_FILES = "_sysconfigdata"
"""A prefix. The build's own settings differ from machine to machine."""
LEAST_BYTES = 10_000
"""Of text on each side of the split."""
VALIDATION_PERCENT, MAX_BYTES = 10, 16 << 20


@dataclass(frozen=True)
class Corpus:
    """Two byte strings as 1-D uint8 tensors."""

    train: torch.Tensor
    validation: torch.Tensor
    digest: str
    """Of the training text. A resumed run must see what it began with."""


def load_corpus(path: str | Path | None = None) -> Corpus:
    """Reads the text files below the folder ``path``; None: the running Python's own library.

    Files are read in sorted order, so two machines with the same library train on the same bytes.
    A module (a file or folder directly below ``path``) is on one side of the split only.

    Raises:
        ValueError: no folder, or too little text.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if path is None else Path(path)
    if not root.is_dir():
        raise ValueError(f"--data {str(root)!r} is not a folder")
    modules: dict[str, list[bytes]] = {}
    total = 0
    for file in _files_below(root, (".py",) if path is None else SUFFIXES):
        if total >= MAX_BYTES:
            break
        text = file.read_bytes()
        module = file.relative_to(root).parts[0].removesuffix(file.suffix)
        modules.setdefault(module, []).append(text)
        total += len(text)
    chosen = _validation_modules({name: sum(map(len, texts)) for name, texts in modules.items()})
    train, validation = (
        b"\n".join(
            text for name, texts in modules.items() if (name in chosen) == side for text in texts
        )
        for side in (False, True)
    )
    if min(len(train), len(validation)) < LEAST_BYTES:
        raise ValueError(
            f"--data {str(root)!r} holds {len(train)} bytes to train on and {len(validation)} to "
            f"validate on: at least {LEAST_BYTES} of each are needed, in several files or folders"
        )
    digest = hashlib.sha256(train).hexdigest()[:16]
    return Corpus(_tensor(train), _tensor(validation), digest)


def _tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _files_below(root: Path, suffixes: tuple[str, ...]) -> list[Path]:
    found = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in SKIPPED_FOLDERS]
        found += [
            Path(folder, name)
            for name in files
            if name.endswith(suffixes) and not name.startswith(SKIPPED_FILES)
        ]
    return sorted(file for file in found if file.is_file())


def _hash_of(module: str) -> int:
    # Of the name, not of an index: adding a module never moves another one across the split.
    return int.from_bytes(hashlib.sha256(module.encode()).digest()[:4], "big")


def _validation_modules(sizes: dict[str, int]) -> set[str]:
    """The modules whose hash falls among the first percent; of few, as many as give enough
    bytes."""
    chosen = {name for name in sizes if _hash_of(name) % 100 < VALIDATION_PERCENT}
    rest = sorted(sizes.keys() - chosen, key=_hash_of)
    while len(rest) > 1 and sum(sizes[name] for name in chosen) < LEAST_BYTES:
        chosen.add(rest.pop())
    return chosen


def sample_batch(
    text: torch.Tensor, batch_size: int, context: int, *, seed: int, stream: str, index: int
) -> Batch:
    """Inputs and targets, each (batch_size, context) int64 on the CPU.

    They are a pure function of (seed, stream, index), so a checkpoint needs nothing of them, and
    two runs that are compared see the same batches.
    """
    digest = hashlib.sha256(f"{seed}/{stream}/{index}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    starts = torch.randint(len(text) - context, (batch_size, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
