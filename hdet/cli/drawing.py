"""Runs as a picture, by matplotlib: the losses of each trial, losses, learning rates."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from io import BytesIO

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hdet.cli.runs import LARGEST, Points, RecordedRun

# Okabe and Ito's colours are told apart with any kind of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MOST_MARKS = 20
"""Of moves. A controller that moves in each cycle would fill the picture."""
GREY = "#6B6B6B"
"""Of runs without cycles, with which the others are compared."""
STYLE = {
    "axes.grid": True, "axes.axisbelow": True, "axes.titlelocation": "left",
    "axes.titlesize": "medium", "axes.spines.top": False, "axes.spines.right": False,
    "grid.color": "#E3E3E3", "legend.frameon": False, "legend.fontsize": "small",
}  # fmt: skip


def draw_runs(runs: Sequence[RecordedRun], kind: str) -> bytes:
    """The contents of a file of this kind: png, svg or pdf."""
    trials = [(run, step, interval) for run in runs for step, interval in run.trials]
    with matplotlib.style.context(["default", STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a name in a script that the font lacks
        rows = 2 + len(trials)
        figure = Figure(figsize=(9, 3.2 * rows), dpi=130, layout="constrained")
        *others, losses, rates = figure.subplots(rows, 1)
        _draw_losses(losses, runs)
        _draw_rates(rates, runs)
        for axes, (run, step, interval) in zip(others, trials, strict=True):
            interval.plot(axes)
            axes.set_title(f"{_plain(run.name)}: trial before step {step:.0f}")
        file = BytesIO()
        figure.savefig(file, format=kind)
        return file.getvalue()


def _colours(runs: Sequence[RecordedRun]) -> list[str]:
    """Those without cycles come first."""
    others = sum(not run.cycles for run in runs)
    return [GREY] * others + [COLOURS[i % len(COLOURS)] for i in range(len(runs) - others)]


def _draw_losses(axes: Axes, runs: Sequence[RecordedRun]) -> None:
    framed = list[float]()
    for run, colour in zip(runs, _colours(runs), strict=True):
        # "in": matplotlib leaves out a label that begins with _
        last = f"{run.validation[-1][1]:.4f} " if run.validation else ""
        axes.plot(*_columns(run.losses), color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(
            *_columns(_smooth(run.losses)), color=colour, label=f"{last}in {_plain(run.name)}"
        )
        axes.plot(*_columns(run.validation), "o", color=colour, markeredgecolor="white")
        for step in run.moves[:MOST_MARKS]:
            axes.axvline(step, color=colour, linestyle=":", linewidth=1)
        # The first steps, which fall far, would flatten the rest.
        start = 0.1 * max((step for step, _ in run.losses), default=0.0)
        framed += [loss for step, loss in run.losses if step > start and math.isfinite(loss)]
        framed += [loss for _, loss in run.validation if math.isfinite(loss)]
    if framed:
        margin = 0.05 * (max(framed) - min(framed)) or 0.1 * abs(framed[0]) or 0.1
        axes.set_ylim(min(framed) - margin, max(framed) + margin)
    title = "Training loss (smoothed) and validation loss (points)"
    if any(run.moves for run in runs):
        title += "; dotted: where a value moved"
    axes.set(title=title, xlabel="step")
    axes.legend()


def _draw_rates(axes: Axes, runs: Sequence[RecordedRun]) -> None:
    for run, colour in zip(runs, _colours(runs), strict=True):
        axes.plot(*_columns(run.rates), color=colour, label=f"in {_plain(run.name)}")
        axes.plot(*_columns(run.schedule), color="black", linestyle="--", linewidth=1)
    rates = [rate for run in runs for _, rate in (*run.rates, *run.schedule)]
    top = max((rate for rate in rates if rate > 1 / LARGEST), default=1.0)
    axes.set_yscale("log")
    axes.set_ylim(top / 1e4, 2 * top)  # the end of a schedule may leave the frame
    axes.set(title="Learning rate: base value, and the untouched schedule (dashed)", xlabel="step")
    axes.legend()


def _plain(name: str) -> str:
    """Dollar signs would begin a formula."""
    return name.replace("$", r"\$")


def _columns(points: Points) -> tuple[list[float], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def _smooth(points: Points, half: int = 3) -> Points:
    """Centred running mean. What is not finite stays a gap and counts nowhere."""
    smoothed = []
    for i, (step, value) in enumerate(points):
        near = [v for _, v in points[max(0, i - half) : i + half + 1] if math.isfinite(v)]
        smoothed.append((step, sum(near) / len(near) if math.isfinite(value) else math.nan))
    return smoothed
