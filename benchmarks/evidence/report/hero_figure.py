"""The hero figure itself."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hdet.report import COLOURS, GREY

from .curves import Curve, Record, best_rate, curves
from .goals import HDET, ONE_CYCLE, Methods, lowest_of_all
from .hero import rank

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["hero_figure"]

SCHEDULES = (ONE_CYCLE, "wsd")


def hero_figure(records: Sequence[Record]) -> Figure:
    """A column for each problem: loss against start, mean and range over seeds; below, the base rate from every start under HDET."""
    from matplotlib.figure import Figure

    found = curves(records, rank)
    figure = Figure(figsize=(max(4.8 * len(found), 7.2) + 0.6, 7.4), dpi=130, layout="constrained")
    panels = figure.subplots(2, len(found), squeeze=False, gridspec_kw={"height_ratios": [3, 2]})
    for column, (problem, methods) in enumerate(found.items()):
        _draw_losses(panels[0][column], problem, methods)
        _draw_rates(panels[1][column], _steadiest(methods))
    panels[0][0].set_ylabel("validation loss, nats")
    panels[1][0].set_ylabel("base rate / best peak rate")
    handles = {label: handle for axes in panels[0] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    return figure


def _draw_losses(axes: Axes, problem: str, methods: Methods) -> None:
    for curve in methods.values():
        style = _style(curve.method, methods)
        axes.plot(curve.starts, [curve.mean(e) for e in curve.starts], label=curve.method, **style)
        low, high = ([extreme(curve.scores(e)) for e in curve.starts] for extreme in (min, max))
        axes.fill_between(curve.starts, low, high, color=style["color"], alpha=0.2 if curve.method.startswith(HDET) else 0.08, linewidth=0)
    untrained = statistics.mean(record["untrained"] for curve in methods.values() for record in curve.records)
    axes.axhline(untrained, color="black", linestyle=":", linewidth=1, label="untrained")
    axes.set_title(problem, fontsize=11, loc="left")
    axes.set_xlabel("log2 (starting rate / best rate of the method)")
    _frame(axes)


def _steadiest(methods: Methods) -> Curve:
    """The method of ours that the start matters least to; without one, the first of all."""
    ours = [curve for curve in methods.values() if curve.method.startswith(HDET)]
    lowest = lowest_of_all(methods)
    return min(ours or [next(iter(methods.values()))], key=lambda curve: (-len(curve.starts), curve.sensitivity(lowest)))


def _draw_rates(axes: Axes, curve: Curve) -> None:
    points = max(len(record["rates"]) for record in curve.records)  # a run that crashed has fewer
    for exponent, runs in curve.runs.items():
        first = next(iter(runs.values()))
        rates = [rate / best_rate(first) for rate in first["rates"]]
        axes.plot([i / points for i in range(len(rates))], rates, color=GREY if exponent else "black", linewidth=1)
    axes.set_yscale("log", base=2)
    axes.set_ylim(2.0**-10, 2.0**7)
    axes.set_title(f"{curve.method}: the base rate from every start, first seed", fontsize=9, loc="left")
    axes.set_xlabel("part of the run")
    _frame(axes)


def _style(method: str, methods: Methods) -> dict[str, Any]:
    """HDET in strong colours; fixed schedules grey; peers thin; a variant has the same colour, dotted."""
    if method.startswith(HDET):
        families = list(dict.fromkeys(name.split("-")[1] for name in methods if name.startswith(HDET)))
        _, family, *variant = method.split("-")
        colour = COLOURS[families.index(family) % 3]
        return {"color": colour, "linewidth": 2.4, "linestyle": ":" if variant else "-", "marker": "o", "markersize": 4, "zorder": 4}
    if method in SCHEDULES:
        return {"color": GREY, "linewidth": 1.6, "linestyle": "-" if method == ONE_CYCLE else "--", "zorder": 3}
    peers = list(dict.fromkeys(name.split("-")[0] for name in methods if not name.startswith(HDET) and name not in SCHEDULES))
    colours = (*COLOURS[3:], "#8C6D31")
    colour = colours[peers.index(method.split("-")[0]) % len(colours)]
    return {"color": colour, "linewidth": 1.3, "linestyle": ":" if "-" in method else "-"}


def _frame(axes: Axes) -> None:
    axes.grid(True, color="#E3E3E3", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
