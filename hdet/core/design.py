"""Which multiplier each knob has on each replica in a cycle: grids in a random order, or two levels
by an orthogonal design, so that several slopes can be told apart (docs/knobs.md)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

from .spread import assignment
from .value import Value

__all__ = ["columns", "is_orthogonal_possible", "orthogonal", "table_of"]


def table_of(
    design: str, seed: int, cycle: int, knobs: Sequence[Value], count: int
) -> list[list[float]]:
    """[knob][replica]: the multipliers of a cycle.

    Args:
        design: "permutation", each knob's grid by itself (Eq. 1 and 8), or "orthogonal", which
            knows spreads only.
        count: of replicas.
    """
    if design == "orthogonal":
        levels = orthogonal(seed, cycle, [knob.name for knob in knobs], count)
        return [
            [1.0 + knob.grid.spread * level for level in row]
            for knob, row in zip(knobs, levels, strict=True)
        ]
    table, kept = [], dict[tuple[float, ...], tuple[float, ...]]()
    for knob in knobs:
        points = tuple(knob.points(count))
        points = kept.setdefault(points, points)  # knobs of one grid share its numbers
        places = assignment(seed, cycle, knob.name, count)
        table.append(list(map(points.__getitem__, places)))
    return table


def is_orthogonal_possible(count: int, knobs: int) -> bool:
    """Has a matrix of `columns` so many rows, and enough columns?"""
    return count.bit_count() == 1 and knobs <= max(count - 1, 1)


def orthogonal(seed: int, cycle: int, knobs: Sequence[str], count: int) -> list[list[int]]:
    """[knob][replica]: -1 or 1 for this cycle, so that rho = 1 + spread * level.

    Cycles go in pairs: each pair draws an order of the rows over the replicas and a sign for each
    knob by hashing, which every rank does alone; its second cycle is the first with all signs
    turned (fold-over), so that what replicas differ in for good cancels.
    """
    pair, folded = divmod(cycle, 2)
    places = assignment(seed, pair, "rows of the design", count)
    signs = [
        1 if hashlib.sha256(f"{seed}/{pair}/{knob}/sign".encode()).digest()[0] & 1 else -1
        for knob in knobs
    ]
    return [
        [(-sign if folded else sign) * column[place] for place in places]
        for sign, column in zip(signs, columns(count, len(knobs)), strict=True)
    ]


@lru_cache(maxsize=16)
def columns(count: int, knobs: int) -> tuple[tuple[int, ...], ...]:
    """[knob][row]: the last columns of Sylvester's Hadamard matrix (1867), for a power of two.

    Every knob is up on half of the rows, and any two together on a quarter. Up to count / 2 knobs
    no column is the product of two others, so what two knobs do together changes no slope.
    """
    return tuple(
        tuple(-1 if (row & j).bit_count() % 2 else 1 for row in range(count))
        for j in range(count - 1, count - 1 - knobs, -1)
    )
