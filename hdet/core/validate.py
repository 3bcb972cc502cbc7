"""What users pass: one check and one wording for whole numbers and one for numbers in an interval;
a message raised or warned of."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterable
from typing import Any

__all__ = ["finite", "refuse", "warn", "whole", "within"]

NOT_USERS = ("hdet", "contextlib", "torch")
"""Packages: their lines are none of the user's."""


def refuse(messages: Iterable[str], error: type[Exception] = ValueError) -> None:
    """Raises ``error`` with the first of them, if there is one."""
    for message in messages:
        raise error(message)


def warn(message: str) -> None:
    """A UserWarning of the user's line, however deep it is called from."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in NOT_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def finite(value: object) -> bool:
    """Is it a finite int or float, and no bool?"""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def whole(value: Any, name: str, least: int = 1, of: str = "", why: str = "") -> int:
    """Returns ``value``. Raises ValueError unless it is an int >= ``least``; ``of``: what it
    counts, ``why``: the reason, for the message."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        counted = f" of {of}" if of else ""
        if isinstance(value, float) and value.is_integer() and value >= least:
            why = f"write {value:.0f}"
        raise ValueError(
            f"{name} must be a whole number{counted} >= {least}, got {value!r}"
            + (f": {why}" if why else "")
        )
    return value


def within(value: Any, name: str, interval: str, why: str = "") -> float:
    """Returns ``value``. Raises ValueError unless it is a finite number in ``interval``, which is
    written as in mathematics: ``"[0, 1)"``."""
    low, high = map(float, interval[1:-1].split(","))
    if not (
        finite(value)
        and low <= value <= high
        and (value != low or interval[0] == "[")
        and (value != high or interval[-1] == "]")
    ):
        raise ValueError(
            f"{name} must be a number in {interval}, got {value!r}" + (f": {why}" if why else "")
        )
    return value
