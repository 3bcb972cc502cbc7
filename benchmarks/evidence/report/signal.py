"""Signal quality: what each controller says of the rate, against what forks of the run say at its end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hdet.report import COLOURS, GREY

from .curves import Record, of_one_kind, score, standard_error
from .markdown import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["FACTORS", "MOMENTS", "SEEDS", "STARTS", "signal_figure", "signal_tables"]

FACTORS = {"fork-0.7": 0.7, "fork-1.4": 1.4}
"""method of a fork -> what its schedule is multiplied by from the moment on"""
MOMENTS = (0.05, 0.1, 0.2, 0.4)
"""parts of the run"""
STARTS = (-4, -2, 0, 2, 4)
RUN = ("method", "moment", "exponent", "seed")
"""what makes two lines of a problem the same run"""
SEEDS = 5
SIGNALS = ("line", "probe", "probe (last weights)", "slope", "rank", "softmax", "hypergradient")
"""in the order of the table"""
IN_NATS = ("line", "probe", "probe (last weights)", "slope")
"""signals whose slope is that of a loss"""
CERTAIN = 2.0
"""standard errors; the truth's over seeds, a controller's own"""

CAPTION = """
The truth is d loss / d ln(rate) at the end of the run, (L(1.4) - L(0.7)) / ln 2 of two forks whose schedule is multiplied by this from the
moment on; nats, mean over seeds ± one standard error. Below 0 a higher rate is better. It counts where it is more than two standard errors from 0.
"""
EXPLAINED = """
*Right*: the sign is that of the truth, of all runs in which the truth counts and the controller says something. *Sure*: |t| > 2; softmax has no
error. *Scatter*: of the slope over seeds, in its own errors, root mean square over starts and moments; near 1 they tell how far seeds are apart, above it they are too
small. *Off the truth*: slope and truth differ by more than two of both errors together; what errors leave out is that a cycle is not the run.
Nothing was corrected in these runs; near the schedule's ends the rules do not act on what they say.
"""


@dataclass(frozen=True)
class Heard:
    """What a controller said in one run, at one moment, beside the truth of that start and moment over seeds."""

    exponent: int
    moment: float
    slope: float
    error: float | None
    t: float | None
    truth: float
    uncertainty: float

    @property
    def right(self) -> bool:
        return self.slope * self.truth > 0

    @property
    def sure(self) -> bool:
        return self.t is not None and abs(self.t) > CERTAIN

    @property
    def counts(self) -> bool:
        return known(self.truth, self.uncertainty)


def known(truth: float, uncertainty: float) -> bool:
    """A single seed has no error: then any difference counts."""
    return abs(truth) > CERTAIN * uncertainty


def truths(lines: Sequence[Record]) -> dict[tuple[int, float], tuple[float, float]]:
    """(start, moment) -> mean and standard error over the seeds that have both forks."""
    forks: dict[tuple[int, float], dict[int, dict[str, float]]] = {}
    for line in lines:
        if line["method"] in FACTORS:
            forks.setdefault((line["exponent"], line["moment"]), {}).setdefault(line["seed"], {})[line["method"]] = score(line)
    (low, below), (high, above) = FACTORS.items()
    found = {}
    for place, seeds in sorted(forks.items()):
        slopes = [(by[high] - by[low]) / math.log(above / below) for by in seeds.values() if len(by) == len(FACTORS)]
        if slopes:
            found[place] = statistics.mean(slopes), standard_error(slopes)
    return found


def heard(lines: Sequence[Record]) -> dict[str, list[Heard]]:
    """Signal -> all that it said where there is a truth, in the order of the table."""
    truth = truths(lines)
    found: dict[str, list[Heard]] = {}
    for line in lines:
        for said in line["said"]:
            place = line["exponent"], said["moment"]
            if said["slope"] is not None and place in truth:
                found.setdefault(said["signal"], []).append(Heard(*place, said["slope"], said["error"], said["t"], *truth[place]))
    return {name: found[name] for name in sorted(found, key=lambda name: (SIGNALS.index(name) if name in SIGNALS else len(SIGNALS), name))}


def scatter(said: Sequence[Heard]) -> float | None:
    """Standard deviation over seeds by the mean error, root mean square over starts and moments; None without two seeds, or errors."""
    cells: dict[tuple[int, float], list[Heard]] = {}
    for one in said:
        if one.error:
            cells.setdefault((one.exponent, one.moment), []).append(one)
    ratios = [
        statistics.variance(one.slope for one in cell) / statistics.mean(one.error**2 for one in cell if one.error)
        for cell in cells.values() if len(cell) > 1
    ]  # fmt: skip
    return math.sqrt(statistics.mean(ratios)) if ratios else None


def signal_tables(records: Sequence[Record]) -> str:
    """Markdown: for each problem the truth, and how often each controller knows it."""
    parts = ["# Signal quality\n", "![](signal.png)", CAPTION]
    for problem, lines in of_one_kind(records, RUN).items():
        parts += [f"## {problem}\n", _truth_table(lines), EXPLAINED, _signal_table(lines)]
    return "\n".join(parts)


def _truth_table(lines: Sequence[Record]) -> str:
    truth = truths(lines)
    starts, moments = sorted({e for e, _ in truth}), sorted({m for _, m in truth})
    rows = []
    for e in starts:
        cells = [truth.get((e, moment)) for moment in moments]
        rows.append(
            [f"2^{e}", *("" if cell is None else f"{cell[0]:+.3f} ± {cell[1]:.3f}{'' if known(*cell) else ' ?'}" for cell in cells)]
        )
    return table(["start", *(f"at {100 * moment:g} % of the run" for moment in moments)], rows)


def _signal_table(lines: Sequence[Record]) -> str:
    rows, moments = [], sorted({said["moment"] for line in lines for said in line["said"]})
    for name, said in heard(lines).items():
        counted, ratio = [one for one in said if one.counts], scatter(said)
        rows.append([
            name, _share(counted), _share(one for one in counted if one.sure),
            *(_share(one for one in counted if one.moment == moment) for moment in moments),
            *(_share(one for one in counted if chosen(one)) for chosen in (lambda h: h.truth < 0, lambda h: h.truth > 0)),
            "-" if ratio is None else f"{ratio:.1f}",
            _beyond(said) if name in IN_NATS else "-",
        ])  # fmt: skip
    heads = [
        "signal",
        "right",
        "right where sure",
        *(f"at {100 * moment:g} %" for moment in moments),
        "higher is better",
        "lower is better",
        "scatter",
        "off the truth",
    ]
    return table(heads, rows)


def _beyond(said: Iterable[Heard]) -> str:
    off = [abs(one.slope - one.truth) > CERTAIN * math.hypot(one.error, one.uncertainty) for one in said if one.error]
    return f"{100 * sum(off) / len(off):.0f} % of {len(off)}" if off else "-"


def _share(said: Iterable[Heard]) -> str:
    right = [one.right for one in said]
    return f"{100 * sum(right) / len(right):.0f} % of {len(right)}" if right else "-"


def signal_figure(records: Sequence[Record]) -> Figure:
    """A row for each problem, a panel for each controller with an error: t against the truth, with the truth's error; right signs lie in
    the shaded quarters, what lies between the dotted lines is not significant."""
    from matplotlib.figure import Figure

    rows = {problem: heard(lines) for problem, lines in of_one_kind(records, RUN).items()}
    names = list(dict.fromkeys(name for said in rows.values() for name, all_of in said.items() if any(one.t is not None for one in all_of)))
    figure = Figure(figsize=(2.7 * max(len(names), 2) + 0.8, 3.3 * len(rows) + 0.5), dpi=130, layout="constrained")
    panels = figure.subplots(len(rows), max(len(names), 1), squeeze=False, sharex=True, sharey=True)
    for row, (problem, said) in zip(panels, rows.items(), strict=True):
        for axes, name in zip(row, names, strict=False):
            _draw(axes, [one for one in said.get(name, []) if one.t is not None])
            axes.set_title(name, fontsize=10, loc="left")
        row[0].set_ylabel(f"{problem}: t of the controller's slope")
    figure.supxlabel("truth: d final loss / d ln(rate), nats (below 0: higher is better)", fontsize=10)
    handles = {text: handle for axes in panels.flat for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _draw(axes: Axes, said: Sequence[Heard]) -> None:
    style: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 4, "elinewidth": 0.8}
    for moment, colour in zip(sorted({one.moment for one in said}), COLOURS, strict=False):
        own = [one for one in said if one.moment == moment]
        axes.errorbar(
            [one.truth for one in own], [one.t or 0.0 for one in own], xerr=[one.uncertainty for one in own], yerr=1.0,
            color=colour, label=f"at {100 * moment:g} % of the run", **style,
        )  # fmt: skip
    axes.set_xscale("symlog", linthresh=0.02)
    axes.set_yscale("symlog", linthresh=CERTAIN)
    for sign in (-1, 1):
        axes.axhline(sign * CERTAIN, color=GREY, linestyle=":", linewidth=0.8)
        axes.fill([0, sign * 10, sign * 10, 0], [0, 0, sign * 1e3, sign * 1e3], color="#E9F2EA", zorder=0)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
