"""Pieces of a page: tables in Markdown, and what stands in their cells."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A row with other than ``len(heads)`` cells is an error of the caller."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        if len(row) != len(heads):
            raise ValueError(
                f"{row} has {len(row)} cells under {len(heads)} heads: give one for each"
            )
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def crossed(
    corner: str,
    rows: Mapping[str, Any],
    columns: Mapping[str, Any],
    cell: Callable[[Any, Any], str],
) -> str:
    """A table of ``cell(row, column)``, from what each row and each column is called to what it
    is."""
    return table(
        [corner, *columns],
        [[name, *(cell(row, column) for column in columns.values())] for name, row in rows.items()],
    )


def written(page: str, tables: Mapping[str, str]) -> str:
    """The page with these tables, where it has a place for them."""
    place = re.compile(r"(<!-- table: (.+?) -->\n).*?(?=<!-- end -->)", re.DOTALL)
    return place.sub(lambda found: f"{found[1]}\n{tables[found[2]]}\n", page)


def start(exponent: int) -> str:
    return f"2^{exponent}"


def percent(part: float) -> str:
    return f"{100 * part:g} %"


def share(flags: Iterable[bool]) -> str:
    """How many of them are true; "-" without any."""
    found = list(flags)
    return f"{100 * sum(found) / len(found):.0f} % of {len(found)}" if found else "-"


def mean(values: Sequence[float], digits: int = 3) -> str:
    """With one standard error, which is 0 for a single value."""
    return f"{statistics.mean(values):.{digits}f} ± {standard_error(values):.{digits}f}"


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; 0 for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
