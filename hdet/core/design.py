"""Orthogonal designs: which of two levels each knob has on each replica, so that several slopes can
be told apart (docs/knobs.md).

Columns are those of a Hadamard matrix (Sylvester 1867; Paley 1933), which as designs of experiments
are Plackett and Burman's (1946): every knob is at its upper level on half of the replicas, and on
half of those every other knob is too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from math import isqrt
from operator import mul

from .spread import assignment, multipliers

__all__ = ["columns", "orthogonal", "table_of"]


def table_of(
    design: str, seed: int, cycle: int, knobs: Sequence[tuple[str, float]], count: int
) -> list[list[float]]:
    """[knob][replica]: the multipliers of a cycle.

    Args:
        design: "permutation", each knob's grid by itself (Eq. 1 and 8), or "orthogonal".
        knobs: name and spread of each.
        count: of replicas.
    """
    if design == "orthogonal":
        levels = orthogonal(seed, cycle, [name for name, _ in knobs], count)
        return [
            [1.0 + spread * level for level in row]
            for (_, spread), row in zip(knobs, levels, strict=True)
        ]
    grids = {spread: multipliers(count, spread) for _, spread in knobs}
    return [
        list(map(grids[spread].__getitem__, assignment(seed, cycle, name, count)))
        for name, spread in knobs
    ]


def orthogonal(seed: int, cycle: int, knobs: Sequence[str], count: int) -> list[list[int]]:
    """[knob][replica]: -1 or 1 (0 in the middle) for this cycle, so that rho = 1 + spread * level.

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
    """[knob][row]: the design for ``count`` replicas, without any randomness.

    - count a multiple of 4 (or 2), and a Hadamard matrix of this order is known (all up to 1 024
      but 52, 92, 100 and some later ones): balanced, and exactly orthogonal.
    - one more: a row in the middle is added. Balanced and exactly orthogonal.
    - two more: a row with every knob up or down is added, and its opposite. Balanced; columns have
      a product of +-2, the smallest there is.
    - one less: a row is left out. Sums and products of columns are -1, the smallest there are.
    - else rows are left out of the next larger one, and columns chosen in the order of their sums
      and products. They can always be told apart.

    Raises ValueError for more knobs than count - 1, which no design tells apart.
    """
    if not 1 <= knobs <= count - 1:
        raise ValueError(f"{count} replicas can tell at most {count - 1} knobs apart, got {knobs}")
    smaller = next(order for order in range(count, 0, -1) if _factors(order))
    larger = next(order for order in range(count, 4 * count) if _factors(order))
    if count - smaller <= larger - count and knobs < smaller:
        return tuple(
            tuple(_column(smaller, j) + _added(count - smaller, j)) for j in range(1, knobs + 1)
        )
    return tuple(tuple(_column(larger, j)[:count]) for j in _chosen(count, larger, knobs))


def _added(rows: int, column: int) -> list[int]:
    """A pair of opposite rows for each two, and one in the middle if the number is odd. Signs
    differ between columns."""
    signs = [-1 if column >> pair & 1 else 1 for pair in range(rows // 2)]
    return [level for sign in signs for level in (sign, -sign)] + [0] * (rows % 2)


def _chosen(count: int, order: int, knobs: int) -> list[int]:
    """Columns of the matrix of this order whose first ``count`` rows make the best design.

    Sums and products of the columns follow from the rows that are left out. The columns kept and
    the constant one are independent exactly if the left-out rows of the columns put aside are
    (complementary minors); so as many columns are put aside first.
    """
    lost = {j: _column(order, j, first=count) for j in range(1, order)}
    aside: list[int] = []
    for j in sorted(lost, key=lambda j: (-abs(sum(lost[j])), -j)):
        if len(aside) < order - count and _independent([lost[i] for i in (*aside, j)]):
            aside.append(j)
    rest, chosen = [j for j in lost if j not in aside], list[int]()
    for _ in range(knobs):
        products = {j: [abs(sum(map(mul, lost[i], lost[j]))) for i in chosen] for j in rest}
        best = min(
            rest,
            key=lambda j: (abs(sum(lost[j])), max(products[j], default=0), sum(products[j]), j),
        )
        rest.remove(best)
        chosen.append(best)
    return chosen


def _independent(rows: Sequence[Sequence[int]]) -> bool:
    """By elimination in whole numbers."""
    left = [list(row) for row in rows]
    while left:
        pivot = left.pop()
        place = next((i for i, x in enumerate(pivot) if x), None)
        if place is None:
            return False
        left = [
            [pivot[place] * x - row[place] * y for x, y in zip(row, pivot, strict=True)]
            for row in left
        ]
    return True


# -- Hadamard matrices -----------------------------------------------------------------------------


def _column(order: int, j: int, first: int = 0) -> list[int]:
    """Column j from row ``first`` on, with signs of rows such that column 0 is all ones."""
    return [_entry(order, i, j) * _entry(order, i, 0) for i in range(first, order)]


@lru_cache(maxsize=1024)
def _factors(order: int) -> tuple[int, int] | None:
    """(0, q) of Paley's first kind, (1, q) of his second; (a, b): the Kronecker product of two;
    None: not known here."""
    if order == 2 or (order % 4 == 0 and _is_prime(order - 1)):
        return 0, order - 1
    if order % 8 == 4 and _is_prime(order // 2 - 1):
        return 1, order // 2 - 1
    parts = ((a, order // a) for a in range(2, order // 2 + 1) if order % 4 == order % a == 0)
    return next(((a, b) for a, b in parts if _factors(a) and _factors(b)), None)


def _entry(order: int, i: int, j: int) -> int:
    factors = _factors(order)
    assert factors is not None
    kind, q = factors
    if kind > 1:
        return _entry(kind, i // q, j // q) * _entry(q, i % q, j % q)
    if kind == 0:  # I + S, S the skew conference matrix
        return 1 if i == 0 or i == j else -1 if j == 0 else _residue(i - j, q)
    row, column, is_odd = i // 2, j // 2, (i % 2, j % 2)
    if row == column:
        return 1 if is_odd == (0, 0) else -1
    # the symmetric conference matrix
    core = _residue(row - column, q) if row and column else 1
    return -core if is_odd == (1, 1) else core


def _residue(x: int, q: int) -> int:
    """1 if x is a square modulo the prime q, else -1; x is no multiple of q."""
    return 1 if q == 1 or pow(x % q, (q - 1) // 2, q) == 1 else -1


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, isqrt(n) + 1))
