"""Pieces of a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["span", "table"]


def span(numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    columns = sum(head.count("|") + 1 for head in heads)
    lines = [" | ".join(heads), "|".join(["---"] * columns), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" if i != 1 else f"|{line}|" for i, line in enumerate(lines)) + "\n"
