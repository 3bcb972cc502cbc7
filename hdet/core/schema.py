"""What a saved state has to look like. Each part of a run names its fields and their kinds. `read`
checks them before anything is changed: it returns copies of the values, or raises ValueError that
says which field is wrong and what it should be."""

from __future__ import annotations

import copy
import math
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = [
    "ANYTHING",
    "COUNT",
    "FLAG",
    "POSITIVE",
    "Fields",
    "Instance",
    "Kind",
    "ListOf",
    "Number",
    "Optional",
    "Or",
    "Plain",
    "Row",
    "Table",
    "like",
    "read",
    "unchanged_on_error",
]

LARGEST = 1e100
"""No number of a run lies beyond it, and the square of one that does not is still a number."""
DEEPEST = 20
"""lists in lists"""

Sizes = dict[str, int]


class Kind(Protocol):
    """Of one value. Kinds have no state, so that they can stand in a class."""

    def read(self, value: Any, where: str, sizes: Sizes) -> Any:
        """A copy of ``value``, which ``where`` names. ``sizes``: of the lists that are to be of one
        length, as far as they have been read. Raises ValueError if it is of another kind."""


@dataclass(frozen=True)
class Number(Kind):
    """Within [low, high], and no NaN; infinite only where a bound is. ``whole``: also 3.0."""

    low: float = -LARGEST
    high: float = LARGEST
    whole: bool = False

    def read(self, value: Any, where: str, sizes: Sizes) -> Any:
        is_number = (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and self.low <= value <= self.high
        )
        if not is_number or (self.whole and value % 1):
            raise _wrong(
                where, value, f"a {'whole ' * self.whole}number in [{self.low:g}, {self.high:g}]"
            )
        return int(value) if self.whole else value


COUNT = Number(0, 1 << 53, whole=True)
POSITIVE = Number(1 / LARGEST)


@dataclass(frozen=True)
class Instance(Kind):
    """Of a class, or of one of several. ``called``: in messages."""

    kind: Any
    called: str = ""

    def read(self, value: Any, where: str, sizes: Sizes) -> Any:
        if not isinstance(value, self.kind):
            raise _wrong(where, value, self.called or f"a {self.kind.__name__}")
        return value


ANYTHING = Instance(object)
FLAG = Instance(bool, "True or False")
_DICT = Instance(Mapping, "a dict")
_LIST = Instance((list, tuple), "a list")


@dataclass(frozen=True)
class Optional(Kind):
    """None, or of a kind."""

    kind: Kind

    def read(self, value: Any, where: str, sizes: Sizes) -> Any:
        return None if value is None else self.kind.read(value, where, sizes)


@dataclass(frozen=True)
class Or(Optional):
    """A field that may be missing: then, or if it is None, it is the ``default``."""

    default: Any

    def read(self, value: Any, where: str, sizes: Sizes) -> Any:
        return copy.deepcopy(self.default) if value is None else self.kind.read(value, where, sizes)


@dataclass(frozen=True)
class ListOf(Kind):
    """Of one kind each. ``length``: how many; or a name: as many as in all lists with that name,
    which is none, or one for each knob."""

    kind: Kind
    length: int | str | None = None

    def read(self, value: Any, where: str, sizes: Sizes) -> Any:
        _LIST.read(value, where, sizes)
        length = self.length
        if isinstance(length, str):
            knobs = sizes.get("knobs", len(value))
            length = sizes.setdefault(length, len(value) if len(value) in (0, knobs) else knobs)
        if length not in (None, len(value)):
            raise _wrong(where, value, f"a list of {length}")
        return [self.kind.read(entry, f"{where}[{i}]", sizes) for i, entry in enumerate(value)]


class Row(Kind):
    """A list of so many values, each of a kind of its own."""

    def __init__(self, *kinds: Kind) -> None:
        self.kinds = kinds

    def read(self, value: Any, where: str, sizes: Sizes) -> Any:
        entries = ListOf(ANYTHING, len(self.kinds)).read(value, where, sizes)
        return [
            kind.read(entry, f"{where}[{i}]", sizes)
            for i, (kind, entry) in enumerate(zip(self.kinds, entries, strict=True))
        ]


@dataclass(frozen=True)
class Plain(Kind):
    """Numbers, True and False, and lists of them, however they are nested."""

    depth: int = 0

    def read(self, value: Any, where: str, sizes: Sizes) -> Any:
        if isinstance(value, (list, tuple)) and self.depth < DEEPEST:
            return ListOf(Plain(self.depth + 1)).read(value, where, sizes)
        if isinstance(value, bool) or (
            isinstance(value, (int, float)) and not -math.inf < value < math.inf
        ):
            return value
        return Number().read(value, where, sizes)


@dataclass(frozen=True)
class Fields(Kind):
    """A dict with these keys; others are left out."""

    fields: Mapping[str, Kind]

    def read(self, value: Any, where: str, sizes: Sizes) -> Any:
        _DICT.read(value, where, sizes)
        missing = [
            key
            for key, kind in self.fields.items()
            if key not in value and not isinstance(kind, Or)
        ]
        if missing:
            raise ValueError(
                f"{where} lacks {', '.join(map(repr, missing))}: it was saved by something else or "
                f"cut short; keys expected: {', '.join(map(str, self.fields))}"
            )
        return {
            key: kind.read(value.get(key), f"{key} of {where}", sizes)
            for key, kind in self.fields.items()
        }


@dataclass(frozen=True)
class Table(Kind):
    """A dict whose keys are values too."""

    keys: Kind
    values: Kind

    def read(self, value: Any, where: str, sizes: Sizes) -> Any:
        _DICT.read(value, where, sizes)
        return {
            self.keys.read(k, f"a key of {where}", sizes): self.values.read(
                v, f"{where}[{k!r}]", sizes
            )
            for k, v in value.items()
        }


def like(example: Any, least: float = -LARGEST) -> Kind:
    """The kind of a state like ``example``: the same keys and lengths, and numbers >= ``least``
    where the example's are."""
    if isinstance(example, bool):
        return FLAG
    if isinstance(example, (int, float)):
        return (
            Number(least if example >= least else -LARGEST)
            if math.isfinite(example)
            else Number(-math.inf, math.inf)
        )
    if isinstance(example, Mapping) and all(isinstance(key, str) for key in example):
        return Fields({key: like(value, least) for key, value in example.items()})
    if isinstance(example, Mapping):
        return Table(*(like(one, least) for one in next(iter(example.items()))))
    if isinstance(example, (list, tuple)):
        return Row(*(like(value, least) for value in example))
    return ANYTHING if example is None else Instance(type(example))


def read(
    state: Any, fields: Mapping[str, Kind], what: str, knobs: int | None = None
) -> dict[str, Any]:
    """The fields' values in a ``state``; keys that are none of them are left out, as older versions
    had others.

    ``what``: whose state it is, as "ensemble's"; ``knobs``: how many there are, where that is
        known. Raises ValueError for a field that is
    missing or wrong, and for a state that is no dict.
    """
    values: dict[str, Any] = Fields(fields).read(
        state, f"the {what} state", {} if knobs is None else {"knobs": knobs}
    )
    return values


@contextmanager
def unchanged_on_error(thing: Any) -> Iterator[None]:
    """Around the loading of a state: whatever is raised becomes ValueError, and ``thing`` (or None)
    gets its own state back."""
    before = None if thing is None else copy.deepcopy(thing.state_dict())
    try:
        yield
    except Exception as error:
        if thing is not None:
            thing.load_state_dict(before)
        if type(error) is ValueError:
            raise
        kind, why = type(thing).__name__, f"{type(error).__name__}: {error}"
        raise ValueError(
            f"the {kind}'s state cannot be loaded ({why}): it is damaged, or of something else"
        ) from error


def _wrong(where: str, value: Any, needed: str) -> ValueError:
    try:
        shown = reprlib.repr(value)
    except ValueError:  # an int of thousands of digits
        shown = f"a number of {int(value).bit_length()} bits"
    return ValueError(f"{where} is {shown}, but {needed} is needed: it is damaged")
