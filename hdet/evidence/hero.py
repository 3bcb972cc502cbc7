"""The hero figure: what every method loses for not knowing its rate."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hdet.report import COLOURS, GREY

from .curves import Curve, Record, curves, recovered
from .markdown import span, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["hero_figure", "hero_tables"]

FIXED = "onecycle"
"""the fixed schedule, which the others are measured against"""
HDET = "hdet-"
STARTS = (-8, -5, -3, 2, 4, 6)
"""exponents of the starts whose recovery is told"""


def hero_tables(records: Sequence[Record]) -> str:
    """Markdown: for each problem what every method loses, and what HDET recovers of the fixed schedule's gap from wrong starts."""
    parts = ["# The hero figure: final validation loss against the starting rate\n", "![](hero.png)\n"]
    for problem, methods in curves(records).items():
        lowest = min(curve.mean(curve.best) for curve in methods.values())
        seeds = {len(scores) for curve in methods.values() for scores in curve.scores.values()}
        parts.append(f"## {problem}\n")
        parts.append(f"Means over {span(seeds)} seeds, ± one standard error; nats. A crashed run counts as an untrained model.\n")
        rows = [_hero_row(curve, lowest) for curve in sorted(methods.values(), key=lambda curve: curve.sensitivity)]
        heads = ["method", "at its best rate", "lowest (start)", "worst (start)", "LR sensitivity", "above the lowest of all", "crashed",
                 "extra compute", "extra memory"]  # fmt: skip
        parts.append(table(heads, rows))
        ours = [curve for curve in methods.values() if curve.method.startswith(HDET)]
        if ours and FIXED in methods:
            parts.append(_recovery(ours, methods[FIXED]))
    return "\n".join(parts)


def _hero_row(curve: Curve, lowest: float) -> list[str]:
    probes = statistics.mean(record["probe_percent"] for record in curve.records)
    copies = max(record["copies"] for record in curve.records)
    return [
        curve.method,
        _value(curve, 0) if 0 in curve.scores else "",
        f"{_value(curve, curve.best)} ({_start(curve.best)})",
        f"{_value(curve, curve.worst)} ({_start(curve.worst)})",
        f"{curve.sensitivity:.3f}",
        f"{curve.above(lowest):.3f}",
        f"{curve.crashed} of {len(curve.records)}",
        f"{probes:.2f} %" if probes else "-",
        f"{copies:g} x parameters" if copies else "-",
    ]


def _recovery(ours: Sequence[Curve], fixed: Curve) -> str:
    heads = ["start", "fixed", *(f"{curve.method} | gap recovered" for curve in ours)]
    rows = []
    for exponent in sorted({*STARTS, 0} & set(fixed.scores)):
        row = [_start(exponent), _value(fixed, exponent)]
        for curve in ours:
            if exponent not in curve.scores:
                row.append(" | ")
                continue
            part = recovered(curve, fixed, exponent)
            against = curve.mean(exponent) - fixed.mean(exponent)
            row.append(f"{_value(curve, exponent)} | {f'{against:+.3f}' if part is None else f'{100 * part:.0f} %'}")
        rows.append(row)
    return table(heads, rows)


def _value(curve: Curve, exponent: int) -> str:
    return f"{curve.mean(exponent):.3f} ± {curve.error(exponent):.3f}"


def _start(exponent: int) -> str:
    return "best" if exponent == 0 else f"{2 ** abs(exponent)}x too {'high' if exponent > 0 else 'low'}"


def hero_figure(records: Sequence[Record]) -> Figure:
    """Loss against start, a panel for each problem; below, where HDET's base rate went from each start."""
    from matplotlib.figure import Figure

    found = curves(records)
    figure = Figure(figsize=(4.8 * len(found) + 1.2, 7.4), dpi=130, layout="constrained")
    panels = figure.subplots(2, len(found), squeeze=False, gridspec_kw={"height_ratios": [3, 2]})
    for column, (problem, methods) in enumerate(found.items()):
        _draw_losses(panels[0][column], problem, methods)
        shown = [curve for curve in methods.values() if curve.method.startswith(HDET)]
        _draw_rates(panels[1][column], shown[-1] if shown else next(iter(methods.values())))
    panels[0][0].set_ylabel("validation loss, nats")
    panels[1][0].set_ylabel("base rate / best peak rate")
    handles = {label: handle for axes in panels[0] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    return figure


def _draw_losses(axes: Axes, problem: str, methods: dict[str, Curve]) -> None:
    for curve in methods.values():
        starts = sorted(curve.scores)
        values = [curve.mean(e) for e in starts]
        axes.plot(starts, values, label=curve.method, **_style(curve.method, methods))
        if curve.method.startswith(HDET):
            low, high = ([v + sign * curve.error(e) for e, v in zip(starts, values, strict=True)] for sign in (-1, 1))
            axes.fill_between(starts, low, high, color=_style(curve.method, methods)["color"], alpha=0.2, linewidth=0)
    axes.set_title(problem, fontsize=11, loc="left")
    _frame(axes)


def _draw_rates(axes: Axes, curve: Curve) -> None:
    for exponent in sorted(curve.scores):
        run = next(record for record in curve.records if record["exponent"] == exponent)
        rates = [rate * 2.0**exponent / run["rate"] for rate in run["rates"]]
        if rates:
            axes.plot([(i + 0.5) / len(rates) for i in range(len(rates))], rates, color=GREY if exponent else "black", linewidth=1)
    axes.set_yscale("log", base=2)
    axes.set_ylim(2.0**-10, 2.0**7)
    axes.set_title(f"{curve.method}: the base rate from every start, first seed", fontsize=9, loc="left")
    axes.grid(True, color="#E3E3E3", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("part of the run")


def _style(method: str, methods: Iterable[str]) -> dict[str, Any]:
    """HDET in strong colours; fixed schedules grey; peers thin, a variant of one with the same colour, dotted."""
    if method.startswith(HDET):
        ours = [name for name in methods if name.startswith(HDET)]
        return {"color": COLOURS[ours.index(method) % 3], "linewidth": 2.4, "marker": "o", "markersize": 4, "zorder": 4}
    if method in ("onecycle", "wsd"):
        return {"color": GREY, "linewidth": 1.6, "linestyle": "-" if method == FIXED else "--", "zorder": 3}
    peers = list(dict.fromkeys(name.split("-")[0] for name in methods if not name.startswith(HDET) and name not in ("onecycle", "wsd")))
    colours = (*COLOURS[3:], "#8C6D31")
    return {
        "color": colours[peers.index(method.split("-")[0]) % len(colours)],
        "linewidth": 1.3,
        "linestyle": ":" if "-" in method else "-",
    }


def _frame(axes: Axes) -> None:
    axes.set_xlabel("log2 (starting rate / best rate of the method)")
    axes.grid(True, color="#E3E3E3", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
