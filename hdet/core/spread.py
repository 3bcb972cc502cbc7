"""Fan-out: which multiplier each replica trains under, cycle by cycle (Eq. 1 and 8)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from .validate import finite, within

__all__ = ["Grid", "assignment", "check_spread", "multipliers"]


def check_spread(spread: float, name: str = "spread") -> float:
    """``spread`` as a float. Raises ValueError for what would make a multiplier zero, negative or
    undefined."""
    why = (
        "multipliers range over [1 - spread, 1 + spread] and must stay positive; 1/9 is the "
        "paper's, 0 is plain data-parallel training. For other grids a knob has values=, "
        "multipliers= and ratio="
    )
    return float(within(spread, name, "[0, 1)", why))


def multipliers(count: int, spread: float) -> list[float]:
    """Eq. 1: rho_r = 1 + alpha (r - (N-1)/2) / max((N-1)/2, 1/2), for r = 0 .. N-1.

    Symmetric around 1, so their sum is N and the uniform mean of the replicas moves at the base
    rate. ``spread`` (alpha) 0, or a single replica, gives exactly 1.0.
    """
    middle = (count - 1) / 2
    unit = max(middle, 0.5)
    return [1.0 + spread * (r - middle) / unit for r in range(count)]


@dataclass(frozen=True)
class Grid:
    """Which multipliers the replicas of a run have, whoever has which: 1 for all, or what one of
    these says.

    Args:
        spread: alpha in [0, 1): even from 1 - alpha to 1 + alpha (Eq. 1).
        ratio: above 1: even in the logarithm from 1 / ratio to ratio.
        multipliers: each for an equal part of the replicas.
        values: what the multipliers make of the base value at its schedule's peak.

    Raises:
        ValueError: more than one is given, or one that cannot be used.
    """

    spread: float = 0.0
    ratio: float | None = None
    multipliers: Sequence[float] | None = None
    values: Sequence[float] | None = None

    def __post_init__(self) -> None:
        check_spread(self.spread)
        own = {**vars(self), "spread": self.spread or None}
        said = [f"{key}={value!r}" for key, value in own.items() if value is not None]
        if len(said) > 1:
            raise ValueError(
                f"{', '.join(said)} are {len(said)} grids of one knob: give one of spread, ratio, "
                "multipliers and values"
            )
        if self.ratio is not None:
            why = "multipliers are even in the logarithm from 1 / ratio to ratio"
            within(self.ratio, "ratio", "(1, inf)", why)
        for name, given in (("multipliers", self.multipliers), ("values", self.values)):
            if given is None:
                continue
            # Whether a value of 0 or below can be reached depends on the scale.
            least = 0.0 if name == "multipliers" else -float("inf")
            is_list = isinstance(given, Sequence) and all(finite(x) and x > least for x in given)
            if not is_list or len(set(given)) < 2:
                positive = "positive " * (name == "multipliers")
                raise ValueError(
                    f"{name} must be a list of {positive}numbers, two of them different at least, "
                    f"such as {name}=[0.5, 1.0, 2.0], got {given!r}"
                )
            object.__setattr__(self, name, tuple(given))

    @property
    def listed(self) -> Sequence[float]:
        """Multipliers or values, if some are given."""
        return self.multipliers or self.values or ()

    @property
    def explores(self) -> bool:
        """Do several replicas differ?"""
        return self.spread > 0 or self.ratio is not None or bool(self.listed)

    def points(self, count: int) -> list[float]:
        """Of so many replicas, in order; values are left as they are."""
        if self.listed:
            return [x for x in self.listed for _ in range(count // len(self.listed))]
        if self.ratio is not None:
            return [self.ratio ** (rho - 1.0) for rho in multipliers(count, 1.0)]
        return multipliers(count, self.spread)


def assignment(seed: int, cycle: int, knob: str, count: int) -> list[int]:
    """Eq. 8: a fresh permutation for each (cycle, knob); entry r is replica r's place on the grid
    of `multipliers`.

    Sorting by a hash is a uniform permutation that every rank finds alone: no generator state, no
    communication, the same on every platform and Python version, and the user's random numbers are
    never touched.
    """
    begun = hashlib.sha256(f"{seed}/{cycle}/{knob}/".encode())
    digests = []
    for replica in range(count):
        hashed = begun.copy()
        hashed.update(str(replica).encode())
        digests.append(hashed.digest())
    places = [0] * count
    for place, replica in enumerate(sorted(range(count), key=digests.__getitem__)):
        places[replica] = place
    return places
