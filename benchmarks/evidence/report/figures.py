"""The figures of the page: from lines to a figure for each benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hdet.cli.drawing import COLOURS, GREY

from . import horizon
from .curves import Record, by, curves, of_one_kind, score
from .hero import HDET, ONE_CYCLE, Methods, rank, untrained
from .tables import start


def _panels(
    rows: int, columns: int, width: float, height: float, **more: Any
) -> tuple[Figure, Any]:
    """A figure and its [row][column] of axes; inches."""
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **more)


def _dress(
    axes: Axes, title: str = "", xlabel: str = "", *, size: int = 11, grid: bool = True
) -> None:
    axes.set_title(title, fontsize=size, loc="left")
    axes.set_xlabel(xlabel)
    axes.spines[["top", "right"]].set_visible(False)
    if grid:
        axes.grid(True, color="#E3E3E3", linewidth=0.7)
        axes.set_axisbelow(True)


def _legend(figure: Figure, panels: Iterable[Axes], columns: int) -> None:
    """Below all, what any of the panels has."""
    handles = {
        text: handle
        for axes in panels
        for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=9,
    )


# -- hero ------------------------------------------------------------------------------------------


def hero_figure(records: Sequence[Record]) -> Figure:
    """A column for each problem: loss against start, mean and range over seeds."""
    found = curves(records, rank)
    figure, panels = _panels(1, len(found), max(4.8 * len(found), 7.2) + 0.6, 4.8)
    for column, (problem, methods) in enumerate(found.items()):
        _draw_losses(panels[0][column], problem, methods)
    panels[0][0].set_ylabel("validation loss, nats")
    _legend(figure, panels[0], 6)
    return figure


def _draw_losses(axes: Axes, problem: str, methods: Methods) -> None:
    for curve in methods.values():
        style = _style(curve.method, methods)
        axes.plot(curve.starts, [curve.mean(e) for e in curve.starts], label=curve.method, **style)
        low, high = ([extreme(curve.scores(e)) for e in curve.starts] for extreme in (min, max))
        axes.fill_between(
            curve.starts,
            low,
            high,
            color=style["color"],
            alpha=0.2 if curve.method.startswith(HDET) else 0.08,
            linewidth=0,
        )
    axes.axhline(untrained(methods), color="black", linestyle=":", linewidth=1, label="untrained")
    _dress(axes, problem, "log2 (starting rate / best rate of the method)")


def _style(method: str, methods: Methods) -> dict[str, Any]:
    """HDET thick; fixed schedules grey; peers thin; a variant has the same colour, dotted."""
    schedules = (ONE_CYCLE, "wsd")
    if method.startswith(HDET):
        return {"color": COLOURS[0], "linewidth": 2.4, "marker": "o", "markersize": 4, "zorder": 4}
    if method in schedules:
        return {
            "color": GREY,
            "linewidth": 1.6,
            "linestyle": "-" if method == ONE_CYCLE else "--",
            "zorder": 3,
        }
    peers = list(
        dict.fromkeys(
            name.split("-")[0]
            for name in methods
            if not name.startswith(HDET) and name not in schedules
        )
    )
    colours = (*COLOURS[3:], "#8C6D31")
    colour = colours[peers.index(method.split("-")[0]) % len(colours)]
    return {"color": colour, "linewidth": 1.3, "linestyle": ":" if "-" in method else "-"}


# -- horizon ---------------------------------------------------------------------------------------


def horizon_figure(records: Sequence[Record]) -> Figure:
    """A column for each problem: the final loss against the cycle, below it where the rate went; a
    colour for each start."""
    problems = of_one_kind(records, horizon.RUN)
    figure, panels = _panels(2, len(problems), 5.2 * len(problems) + 1.6, 6.8, sharex="col")
    for (above, below), (problem, lines) in zip(panels.T, problems.items(), strict=True):
        _draw_cycles(above, lines, lambda own: statistics.mean(map(score, own)))
        _draw_cycles(below, lines, horizon.went_to)
        below.axhline(0, color=GREY, linewidth=0.8)
        _dress(above, problem)
        _dress(below, "", "cycle, % of the run")
    panels[0][0].set_ylabel("final held-out loss, nats")
    panels[1][0].set_ylabel("log2 (rate / best fixed rate)")
    _legend(figure, panels[0], 3)
    return figure


def _draw_cycles(
    axes: Axes, lines: Sequence[Record], value: Callable[[Sequence[Record]], float]
) -> None:
    for (e, of_start), colour in zip(sorted(by(lines, "exponent").items()), COLOURS, strict=False):
        methods = by(of_start, "method")
        for method, style in ((horizon.AVERAGED, "-"), (horizon.LAST, "--")):
            cycles = sorted(by(methods.get(method, []), "interval").items())
            axes.plot(
                [100 * interval for interval, _ in cycles],
                [value(own) for _, own in cycles],
                color=colour,
                linestyle=style,
                marker="o",
                markersize=3,
                label=f"from {start(e)}, {horizon.NAMES[method]}",
            )
        if horizon.FIXED in methods:
            axes.axhline(value(methods[horizon.FIXED]), color=colour, linestyle=":", linewidth=0.9)
    axes.set_xscale("log")


FIGURES: dict[str, Callable[[Sequence[Record]], Figure]] = {
    "hero": hero_figure,
    "horizon": horizon_figure,
}
