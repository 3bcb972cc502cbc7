"""Checks of arguments that are numbers: the error names the argument, what it must be, and the value that was given."""

from __future__ import annotations

import math

__all__ = ["number", "whole"]


def whole(name: str, value: object, least: int) -> int:
    """``value``, if it is a whole number of at least ``least``; True and False are none. Raises ValueError otherwise."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")
    return value


def number(name: str, value: object, above: float | None = None, *, least: float | None = None, below: float | None = None) -> float:
    """``value`` as a float, if it is a finite number within the limits that are given. Raises ValueError otherwise."""
    limits = [f"{sign} {limit:g}" for sign, limit in ((">", above), (">=", least), ("<", below)) if limit is not None]
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if fits:
        x = float(value)  # type: ignore[arg-type]
        fits = (above is None or x > above) and (least is None or x >= least) and (below is None or x < below)
    if not fits:
        raise ValueError(f"{name} must be a finite number{' ' if limits else ''}{' and '.join(limits)}, got {value!r}")
    return x
