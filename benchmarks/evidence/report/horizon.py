"""The horizon: where the probe takes the rate, and how the run ends, by the length of the cycle and the weights that are scored."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hdet.report import COLOURS, GREY

from .curves import Record, of_one_kind, score, standard_error
from .markdown import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["AVERAGED", "FIXED", "INTERVALS", "LAST", "SEEDS", "STARTS", "horizon_figure", "horizon_tables"]

AVERAGED, LAST, FIXED = "averaged", "last", "fixed"
NAMES = {AVERAGED: "cycle-averaged weights", LAST: "last weights (greedy)", FIXED: "fixed schedule"}
INTERVALS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
"""parts of the run"""
STARTS = (-4, 0, 4)
RUN = ("method", "interval", "exponent", "seed")
"""what makes two lines of a problem the same run"""
SEEDS = 3
SIGNIFICANT = 2.0

CAPTION = """
Held-out loss at the end in nats, mean over seeds ± one standard error, and where the rate went: 2^x times the best fixed rate, mean of x.
*Higher : lower*: of the cycles near the schedule's peak, where votes count, those in which |t| > 2 said so. From the best rate neither should win.
Starts are 2^start times the best fixed rate. A run that crashed, or ended above it, counts as an untrained model.
"""

Cells = dict[tuple[str, float, int], list[Record]]


def horizon_tables(records: Sequence[Record]) -> str:
    """Markdown: for each problem a row for each cycle and way of scoring."""
    parts = ["# The horizon\n", "![](horizon.png)", CAPTION]
    for problem, lines in of_one_kind(records, RUN).items():
        found = cells(lines)
        starts = sorted({start for _, _, start in found})
        rows = []
        for method, interval in sorted({(method, interval) for method, interval, _ in found}, key=lambda row: (row[1], row[0])):
            row = [NAMES.get(method, method), f"{100 * interval:g} %" if interval else "-"]
            for start in starts:
                own = found.get((method, interval, start))
                row += [_loss(own), f"2^{went_to(own):+.1f}", _votes(own)] if own else [""] * 3
            rows.append(row)
        heads = [text for start in starts for text in (f"loss from 2^{start}", "rate went to", "higher : lower")]
        parts += [f"## {problem}\n", table(["scored at", "cycle", *heads], rows)]
    return "\n".join(parts)


def cells(lines: Sequence[Record]) -> Cells:
    found: Cells = {}
    for line in lines:
        found.setdefault((line["method"], line["interval"], line["exponent"]), []).append(line)
    return found


def went_to(lines: Sequence[Record]) -> float:
    """log2 of the corrected peak over the best fixed rate."""
    return statistics.mean(line["exponent"] + math.log2(line["correction"]) for line in lines)


def _votes(lines: Sequence[Record]) -> str:
    """How often a higher and a lower rate was significantly better."""
    votes = [t for line in lines for t in line["votes"]]
    return f"{sum(t < -SIGNIFICANT for t in votes)} : {sum(t > SIGNIFICANT for t in votes)} of {len(votes)}" if votes else ""


def _loss(lines: Sequence[Record]) -> str:
    losses = [score(line) for line in lines]
    return f"{statistics.mean(losses):.3f} ± {standard_error(losses):.3f}"


def horizon_figure(records: Sequence[Record]) -> Figure:
    """A column for each problem: the final loss against the cycle, below it where the rate went; a colour for each start."""
    from matplotlib.figure import Figure

    problems = of_one_kind(records, RUN)
    figure = Figure(figsize=(5.2 * len(problems) + 1.6, 6.8), dpi=130, layout="constrained")
    panels = figure.subplots(2, len(problems), squeeze=False, sharex="col")
    for column, (problem, lines) in enumerate(problems.items()):
        found = cells(lines)
        _draw(panels[0][column], found, lambda own: statistics.mean(map(score, own)))
        _draw(panels[1][column], found, went_to)
        panels[0][column].set_title(problem, fontsize=11, loc="left")
        panels[1][column].axhline(0, color=GREY, linewidth=0.8)
        panels[1][column].set_xlabel("cycle, % of the run")
    panels[0][0].set_ylabel("final held-out loss, nats")
    panels[1][0].set_ylabel("log2 (rate / best fixed rate)")
    handles = {text: handle for axes in panels[0] for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _draw(axes: Axes, found: Cells, value: object) -> None:
    assert callable(value)
    starts = sorted({start for _, _, start in found})
    for start, colour in zip(starts, COLOURS, strict=False):
        for method, style in ((AVERAGED, "-"), (LAST, "--")):
            intervals = sorted(i for m, i, s in found if (m, s) == (method, start))
            values = [value(found[method, interval, start]) for interval in intervals]
            label = f"from 2^{start}, {NAMES[method]}"
            axes.plot([100 * i for i in intervals], values, color=colour, linestyle=style, marker="o", markersize=3, label=label)
        if (FIXED, 0.0, start) in found:
            axes.axhline(value(found[FIXED, 0.0, start]), color=colour, linestyle=":", linewidth=0.9)
    axes.set_xscale("log")
    axes.grid(True, color="#E3E3E3", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
