"""Fan-out: which multiplier each replica trains under, cycle by cycle (Eq. 1 and 8)."""

from __future__ import annotations

import hashlib

from .validate import within

__all__ = ["assignment", "check_spread", "multipliers"]


def check_spread(spread: float, name: str = "spread") -> float:
    """``spread`` as a float. Raises ValueError for what would make a multiplier zero, negative or
    undefined."""
    why = (
        "multipliers range over [1 - spread, 1 + spread] and must stay positive; 1/9 is the "
        "paper's, 0 is plain data-parallel training"
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
