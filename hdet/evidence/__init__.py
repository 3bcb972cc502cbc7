"""What the lines of benchmarks/evidence say, as tables and figures. Needs those files only, no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdet.record import RunFolderError, atomic_file, read_history

from .curves import Record
from .hero import hero_tables
from .hero_figure import hero_figure
from .horizon import horizon_figure, horizon_tables
from .paper import paper_tables
from .scalars import scalars_figure, scalars_tables
from .search import search_figure, search_tables
from .signal import signal_figure, signal_tables
from .small_batches import small_batches_tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PAGE", "SECTIONS", "Section", "evidence_page", "read_evidence", "write_evidence"]

PAGE = "evidence.md"
SEARCH_FOR_BEST = "-find"
"""how benchmarks end whose lines only say where another one's starts are"""


@dataclass(frozen=True)
class Section:
    """What becomes of the lines of a benchmark."""

    tables: Callable[[Sequence[Record]], str]
    """Markdown, which begins with a heading and shows the figure as ``<benchmark>.png``."""
    figure: Callable[[Sequence[Record]], Figure] | None
    needs: Mapping[str, Any]
    """Key -> what isinstance takes: a line without them is refused by name. Floats must be finite."""


NUMBER = (int, float)
RUN = {"problem": str, "method": str, "seed": int, "steps": int, "validation": (*NUMBER, type(None))}

SECTIONS: dict[str, Section] = {
    "hero": Section(
        hero_tables, hero_figure,
        RUN | {"exponent": int, "rate": NUMBER, "untrained": NUMBER, "rates": list, "probe_percent": NUMBER, "copies": NUMBER},
    ),
    "search": Section(search_tables, search_figure, RUN | {"draw": int, "batch": int, "best": NUMBER, "curve": list}),
    "paper": Section(paper_tables, None, RUN | {"factor": NUMBER, "train": (*NUMBER, type(None)), "crashed": bool}),
    "signal": Section(
        signal_tables, signal_figure, RUN | {"exponent": int, "rate": NUMBER, "untrained": NUMBER, "moment": NUMBER, "said": list}
    ),
    "horizon": Section(
        horizon_tables, horizon_figure, RUN | {"exponent": int, "rate": NUMBER, "untrained": NUMBER, "interval": NUMBER, "correction": NUMBER, "votes": list}
    ),
    "scalars": Section(scalars_tables, scalars_figure, RUN | {"corner": str, "start": dict, "values": dict, "samples": NUMBER}),
    "small-batches": Section(
        small_batches_tables, None, RUN | {"batch": int, "power": int, "rate": NUMBER, "untrained": NUMBER}
    ),
}  # fmt: skip
"""benchmark -> its part of the page, in this order"""


def read_evidence(paths: Sequence[Path]) -> list[Record]:
    """The lines of results files; a last line that is just being written is left out.

    Raises:
        RunFolderError: names the file, the line and the remedy.
    """
    records = []
    for path in paths:
        if not path.is_file():
            raise RunFolderError(f"evidence {str(path)!r} is not a file: pass results of benchmarks/evidence")
        for number, record in enumerate(read_history(path), 1):
            _check(record, f"line {number} of {str(path)!r}")
            records.append(record)
    return records


def _check(record: Record, where: str) -> None:
    benchmark = record.get("benchmark")
    if not isinstance(benchmark, str):
        raise RunFolderError(f"{where} names no benchmark: pass results of benchmarks/evidence")
    for key, kinds in (SECTIONS[benchmark].needs if benchmark in SECTIONS else {}).items():
        value = record.get(key)
        if key not in record or not isinstance(value, kinds) or (isinstance(value, float) and not math.isfinite(value)):
            raise RunFolderError(f"{where}, of benchmark {benchmark!r}, has no {key} that can be used: remove that line")


def evidence_page(records: Sequence[Record]) -> str:
    """All tables, and which lines have none.

    Raises:
        RunFolderError: none of the lines has a table.
    """
    count = Counter(record["benchmark"] for record in records)
    parts = [section.tables(_of(name, records)) for name, section in SECTIONS.items() if name in count]
    if not parts:
        raise RunFolderError(f"no line is of {' or '.join(SECTIONS)}: pass results of benchmarks/evidence that hold some")
    unknown = [name for name in count if name not in SECTIONS and not name.endswith(SEARCH_FOR_BEST)]
    parts += [f"No table is made of the {count[name]} lines of {name!r}.\n" for name in unknown]
    return "\n".join(parts)


def write_evidence(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write the page to ``evidence.md`` in ``folder``, which is made if it is missing, and the figures beside it; returns the files.

    Raises:
        RunFolderError: none of the lines has a table, or the folder cannot be written to.
    """
    page, files = evidence_page(records), [folder / PAGE]
    try:
        folder.mkdir(exist_ok=True)
        with atomic_file(files[0]) as file:
            file.write(page.encode())
        for name, section in SECTIONS.items():
            own = _of(name, records)
            if own and section.figure is not None:
                files.append(folder / f"{name}.png")
                with atomic_file(files[-1]) as file:
                    section.figure(own).savefig(file, format="png")
    except OSError as error:
        raise RunFolderError(f"out is {str(folder)!r}, which cannot be written to ({error.strerror}): pass another folder") from error
    return files


def _of(benchmark: str, records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["benchmark"] == benchmark]
