"""What the lines of benchmarks/evidence say, as tables and figures. Needs those files only, no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdet.record import RunFolderError, atomic_file

from .curves import Record
from .hero import hero_figure, hero_tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["read", "write_evidence"]

PAGE = "evidence.md"


def write_evidence(paths: Sequence[Path], out: Path) -> list[Path]:
    """Write the tables to ``evidence.md`` in ``out`` and the figures beside it; returns what was written.

    Raises:
        RunFolderError: a file that cannot be read, a line without what a table needs, or nothing to show.
    """
    records = [record for path in paths for record in read(path)]
    sections: list[str] = []
    written: list[Path] = []
    for name, (tables, plot) in SECTIONS.items():
        own = [record for record in records if record["benchmark"] == name]
        if not own:
            continue
        sections.append(tables(own))
        if plot is not None:
            written.append(out / f"{name}.png")
            _save(plot(own), written[-1])
    if not sections:
        raise RunFolderError(
            f"no line of {', '.join(map(repr, map(str, paths)))} is of {' or '.join(SECTIONS)}: pass results of benchmarks/evidence"
        )
    page = out / PAGE
    with atomic_file(page) as file:
        file.write("\n".join(sections).encode())
    return [page, *written]


def read(path: Path) -> list[Record]:
    """The lines of a results file, each with what its section needs.

    Raises:
        RunFolderError: names the file, the line and the remedy.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RunFolderError(
            f"{str(path)!r} cannot be read ({type(error).__name__}): pass a file of benchmarks/results/evidence"
        ) from error
    records = []
    for number, line in enumerate(lines, 1):
        where = f"line {number} of {str(path)!r}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise RunFolderError(f"{where} is no JSON: remove that line") from error
        if not isinstance(record, dict) or not isinstance(record.get("benchmark"), str):
            raise RunFolderError(f"{where} names no benchmark: pass files of benchmarks/results/evidence")
        for key, kinds in NEEDED.get(record["benchmark"], {}).items():
            if not isinstance(record.get(key), kinds) or (isinstance(record[key], float) and not math.isfinite(record[key])):
                raise RunFolderError(f"{where} lacks {key}, or it is no number: remove that line")
        records.append(record)
    return records


NEEDED: dict[str, dict[str, Any]] = {
    "hero": {
        "problem": str, "method": str, "exponent": int, "rate": (int, float), "seed": int, "steps": int, "untrained": (int, float),
        "validation": (int, float, type(None)), "rates": list, "probe_percent": (int, float), "copies": (int, float),
    }
}  # fmt: skip
"""what is read below, by benchmark"""


def _save(figure: Figure, path: Path) -> None:
    with atomic_file(path) as file:
        figure.savefig(file, format="png")


SECTIONS: dict[str, tuple[Callable[[Sequence[Record]], str], Callable[[Sequence[Record]], Figure] | None]] = {
    "hero": (hero_tables, hero_figure),
}
"""benchmark -> its tables, and its figure if it has one; in the order of the page"""
