"""Text that every machine has: the Python library's own source files, split by module into train and validation."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

Batch = tuple[torch.Tensor, torch.Tensor]

SUFFIXES = (".py", ".txt", ".md")
# Test suites and generated tables would be half of the bytes and teach little; character tables would be half of the validation text.
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
SKIPPED_FOLDERS |= {"pydoc_data", "turtledemo", "encodings"}
SKIPPED_FILES = "_sysconfigdata"
"""A prefix: the build's own settings differ from machine to machine."""
LEAST_BYTES = 10_000
"""of text on each side of the split"""


class DataError(ValueError):
    """The training text is missing or too short; the message names the path and the remedy."""


@dataclass(frozen=True)
class Corpus:
    """Two byte strings as 1-D uint8 tensors, and the names of the modules each came from."""

    train: torch.Tensor
    validation: torch.Tensor
    train_modules: frozenset[str]
    validation_modules: frozenset[str]
    digest: str
    """Of the training text: tells whether a resumed run sees what it began with (another Python has another library)."""


def load_corpus(path: str | Path | None = None, *, validation_percent: int = 10, max_bytes: int = 16 << 20) -> Corpus:
    """Read every ``*.py``, ``*.txt`` and ``*.md`` below the folder ``path``; default: the ``*.py`` of the running Python's library.

    Files are read in sorted order, up to ``max_bytes``, so two machines with the same library train on the same bytes.
    A module (a file or folder directly below ``path``) is on one side of the split only. Raises DataError if ``path`` is no folder, a file
    cannot be read, or there is too little text for both sides of the split.
    """
    root = Path(path) if path is not None else Path(sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise DataError(f"data path {str(root)!r} is not a folder: pass --data FOLDER with *.py, *.txt or *.md files below it")
    modules: dict[str, list[bytes]] = {}
    count = total = 0
    for file in _files_below(root, SUFFIXES if path is not None else (".py",)):
        if total >= max_bytes:
            break
        try:
            text = file.read_bytes()
        except OSError as error:
            what = f"data file {str(file)!r} cannot be read ({error.strerror})"
            raise DataError(f"{what}: fix its permissions or pass another --data") from error
        # The top-level package or file: the unit of the split, so no package is on both sides.
        module = file.relative_to(root).parts[0].removesuffix(file.suffix)
        modules.setdefault(module, []).append(text)
        count, total = count + 1, total + len(text)
    chosen = _validation_modules({name: sum(map(len, texts)) for name, texts in modules.items()}, validation_percent)
    train = b"\n".join(text for name, texts in modules.items() if name not in chosen for text in texts)
    validation = b"\n".join(text for name, texts in modules.items() if name in chosen for text in texts)
    if min(len(train), len(validation)) < LEAST_BYTES:
        raise DataError(
            f"data path {str(root)!r} holds {len(train)} training and {len(validation)} validation bytes in {count} files: at least "
            f"{LEAST_BYTES} of each are needed; pass --data FOLDER with several *.py, *.txt or *.md files or folders, which are split whole"
        )
    sides = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (train, validation)]
    return Corpus(sides[0], sides[1], frozenset(modules) - chosen, chosen, hashlib.sha256(train).hexdigest()[:16])


def _files_below(root: Path, suffixes: tuple[str, ...]) -> list[Path]:
    found = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in SKIPPED_FOLDERS]  # site-packages can hold more files than all the rest
        found += [Path(folder, name) for name in files if name.endswith(suffixes) and not name.startswith(SKIPPED_FILES)]
    return sorted(file for file in found if file.is_file())


def _place(module: str) -> int:
    # A hash of the name, not of an index: adding a module never moves another one across the split.
    return int.from_bytes(hashlib.sha256(module.encode()).digest()[:4], "big")


def _validation_modules(sizes: dict[str, int], percent: int) -> frozenset[str]:
    """The modules whose hash falls among ``percent`` of 100; of few modules, as many more as give enough bytes."""
    chosen = {name for name in sizes if _place(name) % 100 < percent}
    rest = sorted(sizes.keys() - chosen, key=_place)
    while len(rest) > 1 and sum(sizes[name] for name in chosen) < LEAST_BYTES:
        chosen.add(rest.pop())
    return frozenset(chosen)


def sample_batch(text: torch.Tensor, batch_size: int, context: int, *, seed: int, stream: str, index: int) -> Batch:
    """Inputs and targets, each (batch_size, context) int64 on the CPU: a pure function of (seed, stream, index).

    Being stateless, it needs nothing in a checkpoint and gives both runs of a comparison the same batches.
    """
    digest = hashlib.sha256(f"{seed}/{stream}/{index}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    starts = torch.randint(len(text) - context, (batch_size, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
