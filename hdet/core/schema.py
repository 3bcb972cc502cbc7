"""What a saved state has to look like: a check for each field. `read` runs them all before anything
is changed."""

from __future__ import annotations

import copy
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = [
    "ANYTHING",
    "COUNT",
    "FLAG",
    "MAPPING",
    "Check",
    "dict_of",
    "instance",
    "list_of",
    "loaded",
    "number",
    "optional",
    "plain",
    "read",
]

LARGEST = 1e100
"""No number of a run lies beyond it, and the square of one that does not is still a number."""
LARGEST_COUNT = 1 << 53
DEEPEST = 20
"""Lists in lists."""

Check = Callable[[Any, str], Any]
"""``check(value, where)`` returns a copy of the value, or raises a ValueError that names
``where``."""


def number(low: float = -LARGEST, high: float = LARGEST, whole: bool = False) -> Check:
    """Within [low, high], and no NaN; infinite only where a bound is. ``whole``: also 3.0."""

    def check(value: Any, where: str) -> Any:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (whole and value % 1):
            raise _wrong(where, value, f"a {'whole ' * whole}number in [{low:g}, {high:g}]")
        return int(value) if whole else value

    return check


def instance(kind: type, called: str) -> Check:
    """Of a class, which messages call so."""

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, kind):
            raise _wrong(where, value, called)
        return value

    return check


COUNT = number(0, LARGEST_COUNT, whole=True)
FLAG = instance(bool, "True or False")
MAPPING = instance(Mapping, "a dict")
ANYTHING = instance(object, "anything")


def optional(kind: Check) -> Check:
    """None, or of a kind."""
    return lambda value, where: None if value is None else kind(value, where)


def list_of(kind: Check, length: int | None = None) -> Check:
    """Of one kind, as many as there are or ``length``."""

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, (list, tuple)) or length not in (None, len(value)):
            raise _wrong(where, value, "a list" if length is None else f"a list of {length}")
        return [kind(entry, f"{where}[{i}]") for i, entry in enumerate(value)]

    return check


def dict_of(fields: Mapping[str, Check]) -> Check:
    """Of these fields; others are left out."""
    return lambda value, where: read(value, fields, where)


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """Numbers, also infinite ones, True and False, and lists of them, however they are nested."""
    if getattr(value, "ndim", None) == 0:  # a number in a tensor or of numpy
        value = value.item()
    if isinstance(value, (list, tuple)) and depth < DEEPEST:
        return [plain(entry, f"{where}[{i}]", depth + 1) for i, entry in enumerate(value)]
    if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        return value
    return number()(value, where)


def read(state: Any, fields: Mapping[str, Check], where: str) -> dict[str, Any]:
    """The fields of a ``state``, checked; other keys are left out, as older versions had others.

    Args:
        where: whose state it is, such as "the ensemble's state".

    Raises:
        ValueError: a field is missing or wrong, or the state is no dict.
    """
    given = MAPPING(state, where)
    if missing := [key for key in fields if key not in given]:
        raise ValueError(
            f"{where} lacks {', '.join(map(repr, missing))}: it was saved by something else or cut "
            f"short; keys expected: {', '.join(fields)}"
        )
    return {key: check(given[key], f"{key} of {where}") for key, check in fields.items()}


@contextmanager
def loaded(thing: Any, state: Any) -> Iterator[None]:
    """Loads a state into ``thing`` (or None), which gets its own back if it refuses that one, by
    ValueError, or if what is done inside raises."""
    before = None if thing is None else copy.deepcopy(thing.state_dict())
    try:
        try:
            if thing is not None:
                thing.load_state_dict(state)
        except Exception as error:
            if type(error) is ValueError:
                raise
            raise ValueError(
                f"the {type(thing).__name__}'s state cannot be loaded ({type(error).__name__}: "
                f"{error}): it is damaged, or of something else"
            ) from error
        yield
    except BaseException:
        if thing is not None:
            thing.load_state_dict(before)
        raise


def _wrong(where: str, value: Any, needed: str) -> ValueError:
    return ValueError(f"{where} is {reprlib.repr(value)}, but {needed} is needed: it is damaged")
