"""Searches along a weight line: for the lowest loss, and for the divergence threshold. Generators that yield their questions."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

from ..plan import Question

__all__ = ["FARTHEST", "Asking", "Difference", "LineSearch", "divergence_threshold", "minimum", "search_line"]

Difference = Callable[[float, float], Question]
"""(a, b) -> the question for the mean over the examples of L(theta(a)) - L(theta(b)), and its t"""
T = TypeVar("T")
Asking = Generator[Question, Any, T]

FARTHEST = 4.0**16
"""largest multiplier at which a threshold is looked for"""


class LineSearch(NamedTuple):
    """The result of `search_line`."""

    t: float
    """of the loss at rho = 2 against that at 1/2"""
    slope: float
    """d loss / d ln(rho) at 1, between rho = 1/2 and 2"""
    rho: float | None
    """Where the loss is lowest; None where no difference is significant."""
    higher: bool
    """Is the loss lower at a larger rho?"""


def search_line(difference: Difference, significant: float, farthest: float) -> Asking[LineSearch]:
    """Score rho = 1/2, 1, 2 and go on where the loss falls."""
    up = yield difference(2.0, 1.0)
    down = yield difference(0.5, 1.0)
    across = yield difference(2.0, 0.5)
    # Far from the right value a large step shows what a small one hides.
    higher = up[1] < 0 and (
        min(up[1], across[1]) < -significant or (down[1] > 0 and (yield difference(8.0, 1.0))[1] < -significant)
    )  # fmt: skip
    rho = None
    if higher:
        rho = 2.0
        while rho < farthest and (yield difference(2 * rho, rho))[0] < 0:
            rho *= 2
        rho = rho if rho >= farthest else (yield from minimum(difference, rho))
    elif max(abs(up[1]), abs(down[1]), abs(across[1])) > significant:
        rho = yield from minimum(difference, 0.5 if up[1] > 0 > down[1] else 1.0)
    return LineSearch(across[1], across[0] / (2 * math.log(2)), rho, higher)


def minimum(difference: Difference, rho: float) -> Asking[float]:
    """Of the parabola in ln(rho) through rho/2, rho and 2 rho, within half a doubling."""
    left = (yield difference(rho / 2, rho))[0]
    right = (yield difference(2 * rho, rho))[0]
    bend = left + right
    return float(rho * 2 ** (max(-0.5, min(0.5, 0.5 * (left - right) / bend)) if bend > 0 else math.copysign(0.5, left - right)))


def divergence_threshold(
    difference: Difference, rise: float = math.inf, significant: float = 2.5, farthest: float = FARTHEST
) -> Asking[float]:
    """The first rho, within a factor of 2, at which the loss along a line is clearly above that of its beginning.

    It is a scale for rates that hardly depends on the rate of the steps that made the line. ``rise``: a rise of the mean loss that counts
    whatever its t is (`range_test.clear_rise`).
    """

    def beyond(rho: float) -> Asking[bool]:
        mean, t = yield difference(rho, 0.0)
        return mean > rise or (mean > 0 and t > significant)

    rho = 1.0
    if (yield from beyond(rho)):
        while rho > 1 / farthest and (yield from beyond(rho / 4)):
            rho /= 4
    else:
        while rho < farthest and not (yield from beyond(rho)):
            rho *= 4
    return rho / 2 if (yield from beyond(rho / 2)) else rho
