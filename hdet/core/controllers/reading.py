"""What a line says: where the loss is lowest along it, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["FARTHEST", "Difference", "Reading", "edge", "minimum", "read_line"]

Difference = Callable[[float, float], tuple[float, float]]
"""(a, b) -> mean over the examples of L(theta(a)) - L(theta(b)), and its t"""

FARTHEST = 4.0**16
"""multiplier beyond which no edge is looked for"""


class Reading(NamedTuple):
    across: float
    """t of rho = 2 against 1/2"""
    slope: float
    """d loss / d ln(rho) at 1, between rho = 1/2 and 2"""
    rho: float | None
    """Where the loss is lowest; None where no difference is significant."""
    higher: bool
    """Is it lower further along?"""


def read_line(difference: Difference, significant: float, farthest: float) -> Reading:
    """Score rho = 1/2, 1, 2 and go on where the loss falls."""
    up, down, across = difference(2.0, 1.0), difference(0.5, 1.0), difference(2.0, 0.5)
    # Far from the right value a large step shows what a small one hides.
    higher = up[1] < 0 and (
        min(up[1], across[1]) < -significant or (down[1] > 0 and difference(8.0, 1.0)[1] < -significant)
    )  # fmt: skip
    rho = None
    if higher:
        rho = 2.0
        while rho < farthest and difference(2 * rho, rho)[0] < 0:
            rho *= 2
        rho = rho if rho >= farthest else minimum(difference, rho)
    elif max(abs(up[1]), abs(down[1]), abs(across[1])) > significant:
        rho = minimum(difference, 0.5 if up[1] > 0 > down[1] else 1.0)
    return Reading(across[1], across[0] / (2 * math.log(2)), rho, higher)


def minimum(difference: Difference, rho: float) -> float:
    """Of the parabola in ln(rho) through rho/2, rho and 2 rho, within half an octave."""
    left, right = difference(rho / 2, rho)[0], difference(2 * rho, rho)[0]
    bend = left + right
    return float(rho * 2 ** (max(-0.5, min(0.5, 0.5 * (left - right) / bend)) if bend > 0 else math.copysign(0.5, left - right)))


def edge(difference: Difference, rise: float = math.inf, significant: float = 2.5, farthest: float = FARTHEST) -> float:
    """The first rho, within a factor of 2, at which the loss along a line is clearly above that of its beginning.

    A line says roughly how far is too far, whatever the rate it was found at. ``rise``: of the mean loss, which is clear whatever its t is: see `sweep.clear_rise`.
    """

    def beyond(rho: float) -> bool:
        mean, t = difference(rho, 0.0)
        return mean > rise or (mean > 0 and t > significant)

    rho = 1.0
    if beyond(rho):
        while rho > 1 / farthest and beyond(rho / 4):
            rho /= 4
    else:
        while rho < farthest and not beyond(rho):
            rho *= 4
    return rho / 2 if beyond(rho / 2) else rho
