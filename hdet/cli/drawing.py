"""Runs as charts, by matplotlib: the losses of each trial, losses, learning rates."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hdet.cli.runs import LARGEST, Points, RecordedRun
from hdet.trial.rule import RateInterval

Chart = Callable[[Axes], None]

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


def charts_of(runs: Sequence[RecordedRun]) -> tuple[list[Chart], Chart, Chart]:
    """The losses of each trial over its rates; losses over steps; learning rates over steps."""
    trials = [partial(_draw_trial, run, *trial) for run in runs for trial in run.trials]
    return list(trials), partial(_draw_losses, runs), partial(_draw_rates, runs)


def draw(charts: Sequence[Chart], kind: str) -> bytes:
    """Under one another: the contents of a file of this kind, png, svg or pdf."""
    with matplotlib.style.context(["default", STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a name in a script that the font lacks
        figure = Figure(figsize=(6.4, 3.2 * len(charts)), dpi=150, layout="constrained")
        for chart, axes in zip(charts, figure.subplots(len(charts), squeeze=False), strict=True):
            chart(axes[0])
        file = BytesIO()
        figure.savefig(file, format=kind)
        return file.getvalue()


def _draw_trial(run: RecordedRun, step: float, interval: RateInterval, axes: Axes) -> None:
    interval.plot(axes)
    steps = interval.trial.steps
    axes.set_title(
        f"{_plain(run.name)}: loss after {steps} steps at each rate, before step {step:.0f}"
    )


def _colours(runs: Sequence[RecordedRun]) -> list[str]:
    """Those without cycles come first."""
    others = sum(not run.cycles for run in runs)
    return [GREY] * others + [COLOURS[i % len(COLOURS)] for i in range(len(runs) - others)]


def _draw_losses(runs: Sequence[RecordedRun], axes: Axes) -> None:
    framed = list[float]()
    for run, colour in zip(runs, _colours(runs), strict=True):
        last = f": {run.validation[-1][1]:.4f}" if run.validation else ""
        axes.plot(*_columns(run.losses), color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(*_columns(_smooth(run.losses)), color=colour, label=_label(run) + last)
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
    if any(run.moves for run in runs):
        axes.plot([], [], color="black", linestyle=":", linewidth=1, label="a value moved")
    points = ", points: validation" if any(run.validation for run in runs) else ""
    axes.set(title=f"Training loss, smoothed{points}", xlabel="step")
    axes.legend()


def _draw_rates(runs: Sequence[RecordedRun], axes: Axes) -> None:
    for run, colour in zip(runs, _colours(runs), strict=True):
        axes.plot(*_columns(run.rates), color=colour, label=_label(run))
        axes.plot(*_columns(run.schedule), color="black", linestyle="--", linewidth=1)
    rates = [rate for run in runs for _, rate in (*run.rates, *run.schedule)]
    top = max((rate for rate in rates if rate > 1 / LARGEST), default=1.0)
    axes.set_yscale("log")
    axes.set_ylim(top / 1e4, 2 * top)  # the end of a schedule may leave the frame
    axes.set(title="Learning rate, dashed: your schedule as it was", xlabel="step")
    axes.legend()


def _label(run: RecordedRun) -> str:
    """Matplotlib leaves out a label that begins with _."""
    return f"run {_plain(run.name)}"


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
