"""Charts as inline SVG, and tables, for pages that need nothing else. Colours of a chart are the page's, and its labels HTML: one drawing serves
both themes and every width of a screen.

The drawing is stretched to the width of the page (`preserveAspectRatio="none"`, with strokes that do not scale), which text must not be: hence
the labels beside it. What it shows is what a pixel can show: of more points than `COLUMNS` can hold, each column has its lowest and highest.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, groupby, pairwise
from typing import TypeVar

WIDTH, HEIGHT = 8000, 4000
"""of the drawing; whole numbers are finer than any screen"""
COLUMNS = 800
"""in which long series are thinned: about the pixels of the widest chart"""
HOVERS = 120
"""places of a chart that tell their values"""
ROWS = 200
"""of a table at most"""

Value = TypeVar("Value", float, float | None)

Point = tuple[float, float | None, float | None]
"""step, and the value twice; or the lower and the upper end of an interval. None is a gap."""


@dataclass(frozen=True)
class Series:
    """What is drawn in one colour. ``kind``: "line", "pale", "dashed", "dotted", "zero", "dots"; of
    intervals "band" and "bars"; of places, at any value, "marks" and, between two, "span"."""

    name: str
    colour: str
    """A class of the page's."""
    points: Sequence[Point]
    kind: str = "line"
    told: bool = True
    """Is it in the legend and in the values under the pointer?"""


KEYS = {
    **dict.fromkeys(("line", "pale", "dashed", "dotted", "zero"), "M0 5H24"),
    "dots": "M12 5h0",
    **dict.fromkeys(("bars", "marks"), "M12 1V9"),
    **dict.fromkeys(("band", "span"), "M0 1H24V9H0Z"),
}
"""what stands for a kind of series in the legend"""


@dataclass(frozen=True)
class Scale:
    """Where a value lies between the lower and the upper edge of a chart. ``forward``: what is even on it, or None for what it cannot show."""

    low: float
    high: float
    forward: Callable[[float], float | None]
    ticks: Sequence[float]
    """The important ones first; those that would touch another's label are left out."""
    name: str = ""
    """Of what is on it, where it goes across."""

    def at(self, value: float | None) -> float | None:
        """0 at the lower edge, 1 at the upper one."""
        low, high, here = self.forward(self.low), self.forward(self.high), None if value is None else self.forward(value)
        if low is None or high is None or here is None or high <= low:
            return None
        return (here - low) / (high - low)

    def labels(self) -> Iterator[tuple[float, str]]:
        shown: list[float] = []
        for tick in self.ticks:
            at = self.at(tick)
            if at is not None and -0.001 <= at <= 1.001 and all(abs(at - other) > 0.09 for other in shown):
                shown.append(at)
                yield at, number(tick)


def linear(values: Sequence[float]) -> Scale:
    """Around these, with a margin."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 0.1
    low, high = low - margin, high + margin
    return Scale(low, high, lambda value: value, _even(low, high))


def until(end: float) -> Scale:
    """Steps from 0 on."""
    return Scale(0.0, end, lambda value: value, _even(0.0, end), "step")


def log(values: Sequence[float], name: str = "") -> Scale:
    known = [value for value in values if value > 0]
    low, high = min(known, default=0.1) / 1.4, max(known, default=1.0) * 1.4
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = max(1, len(decades) // 6)
    ticks = [10.0**k for k in decades if k % every == 0]
    ticks += [m * 10.0**k for m in (3, 2, 5) for k in decades] if len(decades) < 4 else []
    return Scale(low, high, lambda value: math.log(value) if value > 0 else None, ticks, name)


def symlog(values: Sequence[float], near: float) -> Scale:
    """Linear within ``near`` of zero, logarithmic beyond."""
    low, high = min([*values, -near]) * 1.3, max([*values, near]) * 1.3
    top = math.floor(math.log10(max(-low, high)))
    ticks = [sign * 10.0**k for k in range(top, math.floor(math.log10(near)) - 1, -1) for sign in (1, -1)]
    return Scale(low, high, lambda value: math.asinh(value / near), [0.0, *ticks])


def _even(low: float, high: float) -> list[float]:
    """About five round numbers."""
    rough = (high - low) / 6
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= 0.99 * rough)
    first = math.ceil(low / step)
    return [k * step for k in range(first, first + 8) if k * step <= high]


def number(value: float) -> str:
    """Four figures, and no more digits than they need."""
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e7 else f"{value:.4g}"


def thin(points: Sequence[Point], low: float, high: float) -> list[Point]:
    """Of each of `COLUMNS` equal parts of [low, high] the lowest and the highest point (of intervals: what they cover), and whether there is a gap:
    no more than a pixel shows. Few points stay as they are."""
    if len(points) <= 2 * COLUMNS:
        return list(points)
    kept: list[Point] = []
    for _, column in groupby(points, lambda point: math.floor((point[0] - low) / (high - low) * COLUMNS)):
        whole = list(column)
        known = [(x, a, b) for x, a, b in whole if a is not None and b is not None]
        if all(a == b for _, a, b in known):
            ends = {min(known, key=lambda p: p[1]), max(known, key=lambda p: p[1])} if known else set()
            kept += sorted(ends)
        else:
            kept.append((known[0][0], min(a for _, a, _ in known), max(b for _, _, b in known)))
        if len(known) < len(whole):
            kept.append((whole[-1][0], None, None))
    return kept


def smooth(values: Sequence[Value], width: int = 7) -> list[Value]:
    """Centred running mean over ``width`` values, fewer at the ends. None stays None, and counts nowhere."""
    half = width // 2
    filled: list[float] = [value or 0.0 for value in values]
    counts = [0, *accumulate(value is not None for value in values)]
    ends = [(max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values))]
    # Each window by itself: in differences of running sums one loss of 1e20 would leave no digit of those that follow.
    means = (sum(filled[begin:end]) / max(1, counts[end] - counts[begin]) for begin, end in ends)
    return [None if value is None else mean for value, mean in zip(values, means, strict=True)]


def chart(title: str, description: str, series: Sequence[Series], scale: Scale, across: Scale) -> str:
    """The drawing with its labels, as a ``<div>``. What cannot be shown (None, not positive on a
    log scale) is a gap.

    Args:
        description: for readers who do not see it.
    """
    drawn = [(one, thin(one.points, across.low, across.high)) for one in series]

    def x(place: float) -> int:
        at = across.at(place) or 0.0
        return round(WIDTH * min(max(at, -1), 2) * 0.985)  # dots at the end are not cut in half

    def y(value: float | None) -> int | None:
        at = scale.at(value)
        return None if at is None else round(HEIGHT * (1 - min(max(at, -30), 30)))

    def shape(one: Series, points: Sequence[Point]) -> str:
        if one.kind == "marks":
            return "".join(f"M{x(place)} 0V{HEIGHT}" for place, _, _ in points)
        if one.kind == "span":
            return f"M{x(points[0][0])} 0H{x(points[-1][0])}V{HEIGHT}H{x(points[0][0])}Z"
        places = [(x(step), y(high), y(low)) for step, low, high in points]
        parts = [list(part) for whole, part in groupby(places, lambda p: p[1] is not None and p[2] is not None) if whole]
        if one.kind == "dots":
            return "".join(f"M{a} {b}h0" for part in parts for a, b, _ in part)
        if one.kind == "bars":
            return "".join(f"M{a} {b}V{c}" for part in parts for a, b, c in part)
        path = "".join("M" + " ".join(f"{a} {b}" for a, b, _ in part) + "h0" * (len(part) == 1) for part in parts)
        if one.kind != "band":
            return path
        backs = (" ".join(f"{a} {c}" for a, _, c in reversed(part)) for part in parts)
        fronts = (" ".join(f"{a} {b}" for a, b, _ in part) for part in parts)
        return "".join(f"M{front} {back}Z" for front, back in zip(fronts, backs, strict=True))

    labels = list(scale.labels())
    grid = "".join(f"M0 {round(HEIGHT * (1 - at))}H{WIDTH}" for at, _ in labels)
    paths = "".join(f'<path class="{one.kind} {one.colour}" d="{shape(one, points)}"/>' for one, points in drawn)
    name, what = safe(title), safe(description)
    return (
        '<div class="plot"><div class="up" aria-hidden="true">'
        + "".join(f'<span style="bottom:{100 * at:.1f}%">{label}</span>' for at, label in labels)
        + f'</div><svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{name}: {what}">'
        + f'<title>{name}</title><desc>{what}</desc><path class="grid" d="{grid}"/>{paths}'
        + "".join(_hovers(series, across.name, x))
        + "</svg>"
        + '<div class="across" aria-hidden="true">'
        + "".join(_below(0.985 * at, label) for at, label in sorted(across.labels()))
        + "</div></div>"
    )


def _below(at: float, label: str) -> str:
    """Within the width of the chart."""
    edge = " class=begin" * (at < 0.02) + " class=end" * (at > 0.95)
    return f'<span{edge} style="left:{100 * at:.1f}%">{label}</span>'


def _hovers(series: Sequence[Series], name: str, x: Callable[[float], int]) -> Iterator[str]:
    """Columns that tell their steps and values under the pointer."""
    series = [one for one in series if one.told and one.kind not in ("marks", "span")]
    steps = sorted({step for one in series for step, _, _ in one.points})
    size = -(-len(steps) // HOVERS)
    column = {step: i // size for i, step in enumerate(steps)}
    values: dict[tuple[int, int], list[float]] = defaultdict(list)
    for i, one in enumerate(series):
        for step, low, high in one.points:
            values[column[step], i] += [value for value in (low, high) if value is not None]
    parts = [steps[i : i + size] for i in range(0, len(steps), size or 1)]
    edges = [0, *((x(a[-1]) + x(b[0])) // 2 for a, b in pairwise(parts)), WIDTH]
    for c, part in enumerate(parts):
        lines = [f"{name} {_between(part)}"]
        lines += [f"{one.name}: {_between(values[c, i]) or 'not finite'}" for i, one in enumerate(series) if (c, i) in values]
        yield f'<rect x="{edges[c]}" width="{max(1, edges[c + 1] - edges[c])}" height="{HEIGHT}"><title>{chr(10).join(map(safe, lines))}</title></rect>'


def _between(values: Sequence[float]) -> str:
    ends = sorted({min(values), max(values)}) if values else []
    return " to ".join(map(number, ends))


# -- around charts -------------------------------------------------------------------------------------------------------


def figure(
    title: str,
    says: str,
    series: Sequence[Series],
    scale: Scale,
    across: Scale,
    unit: str,
    numbers: str,
) -> str:
    """A `chart` with its title, what it ``says``, its legend, and its ``numbers`` in tables."""
    if any(len(one.points) > 2 * COLUMNS for one in series):
        says += f" Long series are drawn as their lowest and highest value in each of {COLUMNS} columns."
    keys = "".join(
        f'<li><svg viewBox="0 0 24 10" aria-hidden="true"><path class="{one.kind} {one.colour}" d="{KEYS[one.kind]}"/></svg>{safe(one.name)}</li>'
        for one in series
        if one.told
    )
    return (
        f'<figure><figcaption><h3>{safe(title)}</h3><p>{safe(says)}</p></figcaption><ul class="legend">{keys}</ul>'
        f'<span class="unit">{safe(unit)}, by {across.name}</span>'
        f"{chart(title, says, series, scale, across)}"
        f"<details><summary>The numbers</summary>{numbers}</details></figure>"
    )


def table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[object]], words: bool = False) -> str:
    """Every k-th row if there are more than `ROWS`. ``words``: the last column is text."""
    every = -(-len(rows) // ROWS)
    if every > 1:
        caption += f". One of {every} rows, and the last: all {len(rows)} are in history.jsonl"
        rows = [*rows[:-1:every], rows[-1]]
    cells = "".join("<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    head = "".join(f'<th scope="col">{head}</th>' for head in heads)
    top = f"<caption>{safe(caption)}</caption>" if caption else ""
    return f"<table{' class=words' * words}>{top}<thead><tr>{head}</tr></thead><tbody>{cells}</tbody></table>"


def _cell(value: object) -> str:
    if isinstance(value, float | int):
        return f"{value:.6g}"
    return "not finite" if value is None else "<br>".join(map(safe, str(value).split("\n")))


def safe(value: object) -> str:
    """As text in HTML: escaped, without control codes and halves of characters, which a file can hold."""
    return escape("".join(c if c.isprintable() else " " for c in str(value)))
