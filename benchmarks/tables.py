"""What reports share: lines of results, tables in Markdown and what stands in their cells, and the
pages that have them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def read(path: str | Path | None) -> list[dict[str, Any]]:
    """The lines of a results file; none if there is no file yet."""
    if not path or not Path(path).exists():
        return []
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def table(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A row with other than ``len(heads)`` cells is an error of the caller."""
    lines = ["| " + " | ".join(map(str, heads)) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        if len(row) != len(heads):
            raise ValueError(
                f"{row} has {len(row)} cells under {len(heads)} heads: give one for each"
            )
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines) + "\n"


def crossed(
    corner: str,
    rows: Mapping[str, Any],
    columns: Mapping[str, Any],
    cell: Callable[[Any, Any], object],
) -> str:
    """A table of ``cell(row, column)``, from what each row and column is called to what it is."""
    cells = ([name, *(cell(row, of) for of in columns.values())] for name, row in rows.items())
    return table([corner, *columns], cells)


def grouped(lines: Iterable[dict[str, Any]], *names: str) -> dict[Any, list[dict[str, Any]]]:
    """The lines by the value of ``names[0]``, or by the tuple of several; in the order in which
    they first come."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for line in lines:
        key = tuple(line[name] for name in names)
        found.setdefault(key if len(names) > 1 else key[0], []).append(line)
    return found


def written(page: str, tables: Mapping[str, str]) -> str:
    """The page with these tables, where it has a place for them."""
    place = re.compile(r"(<!-- table: (.+?) -->\n).*?(?=<!-- end -->)", re.DOTALL)
    return place.sub(lambda found: f"{found[1]}\n{tables[found[2]]}\n", page)


def reached(loss: float | None, untrained: float) -> float:
    """The final loss; a run that broke, or got worse, counts as untrained."""
    return untrained if loss is None else min(loss, untrained)


def gap(loss: float | None, best: float, untrained: float) -> float:
    """How far a run ends from the best one, in percent of what that one learns."""
    return 100 * (reached(loss, untrained) - best) / (untrained - best)


def show(tables: Mapping[str, str], pages: Iterable[str]) -> None:
    """Prints the tables under their names, and writes them into the pages, each between two
    comments that have its name."""
    for path in map(Path, pages):
        path.write_text(written(path.read_text(encoding="utf-8"), tables), encoding="utf-8")
    print("\n".join(f"## {name}\n\n{one}" for name, one in tables.items()), end="")


def percent(value: float) -> str:
    return f"{value:.1f} %"


def spaced(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def mean(values: Sequence[float], digits: int = 3) -> str:
    """With one standard error, which is 0 for a single value."""
    return f"{np.mean(values):.{digits}f} ± {standard_error(values):.{digits}f}"


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; 0 for a single value."""
    return float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0
