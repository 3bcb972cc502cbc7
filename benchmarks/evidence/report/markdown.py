"""Pieces of a page."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["table"]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A row with other than ``len(heads)`` cells is an error of the caller."""
    for row in rows:
        if len(row) != len(heads):
            raise ValueError(f"{row} has {len(row)} cells under {len(heads)} heads: give one for each")
    lines = [" | ".join(heads), "|".join(["---"] * len(heads)), *(" | ".join(row) for row in rows)]
    return "\n".join(f"|{line}|" if i == 1 else f"| {line} |" for i, line in enumerate(lines)) + "\n"
