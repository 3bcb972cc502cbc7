"""The page: every benchmark's tables, and its figure beside them."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from hdet.cli.runs import read_records

from .curves import Record
from .hero import hero_tables
from .horizon import horizon_tables
from .paper import paper_tables

TABLES: dict[str, Callable[[Sequence[Record]], str]] = {
    "hero": hero_tables,
    "paper": paper_tables,
    "horizon": horizon_tables,
}
"""benchmark -> its part of the page, in this order; it begins with a heading and shows the figure
as ``<benchmark>.png``"""
SEARCH_FOR_BEST = "-find"
"""how benchmarks end whose lines only say where another one's starts are"""


def read(paths: Sequence[Path]) -> list[Record]:
    """The lines of results files; a last line that is just being written is left out."""
    return [record for path in paths for _, record in read_records(path)]


def page(records: Sequence[Record]) -> str:
    """All tables, and which lines have none.

    Raises:
        ValueError: none of the lines has a table.
    """
    count = Counter(str(record.get("benchmark")) for record in records)
    parts = [tables(of(name, records)) for name, tables in TABLES.items() if name in count]
    if not parts:
        raise ValueError(
            f"no line is of {' or '.join(TABLES)}: pass results of benchmarks.evidence that hold "
            "some"
        )
    unknown = [name for name in count if name not in TABLES and not name.endswith(SEARCH_FOR_BEST)]
    return "\n".join(
        [
            *parts,
            *(f"No table is made of the {count[name]} lines of {name!r}.\n" for name in unknown),
        ]
    )


def write(records: Sequence[Record], folder: Path) -> list[Path]:
    """``evidence.md`` and the figures, into ``folder``, which is made if it is missing; returns the
    files."""
    from .figures import FIGURES

    folder.mkdir(exist_ok=True)
    files = [folder / "evidence.md"]
    files[0].write_text(page(records), encoding="utf-8")
    for name, figure in FIGURES.items():
        if own := of(name, records):
            files.append(folder / f"{name}.png")
            figure(own).savefig(files[-1])
    return files


def of(benchmark: str, records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.get("benchmark") == benchmark]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evidence.report", description=__doc__
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="results of benchmarks.evidence"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="for the page and its figures; default: none are written",
    )
    options = parser.parse_args(arguments)
    try:
        records = read(options.files)
        print(page(records), end="")
        for path in write(records, options.out) if options.out else []:
            print(f"written: {path}")
    except (ValueError, OSError) as error:
        parser.error(str(error))
