"""Runs as a picture, by matplotlib: losses, learning rates, and the losses of each trial."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from io import BytesIO

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hdet.cli.runs import LARGEST, RecordedRun

# Okabe and Ito's colours are told apart with any kind of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#6B6B6B"
"""Of runs without cycles, with which the others are compared."""


def draw_runs(runs: Sequence[RecordedRun], kind: str) -> bytes:
    """The contents of a file of this kind: png, svg or pdf."""
    trials = [(run, step, interval) for run in runs for step, interval in run.trials]
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rc("axes", grid=True, axisbelow=True, titlelocation="left", titlesize="medium")
        matplotlib.rc("axes.spines", top=False, right=False)
        matplotlib.rc("grid", color="#E3E3E3")
        matplotlib.rc("legend", frameon=False, fontsize="small")
        warnings.filterwarnings("ignore", "Glyph")  # a name in a script that the font lacks
        rows = 2 + len(trials)
        figure = Figure(figsize=(9, 3.2 * rows), dpi=130, layout="constrained")
        losses, rates, *others = figure.subplots(rows, 1)
        _draw_losses(losses, runs)
        _draw_rates(rates, runs)
        for axes, (run, step, interval) in zip(others, trials, strict=True):
            interval.plot(axes)
            axes.set_title(f"{_plain(run.name)}: trial before step {step:.0f}")
        file = BytesIO()
        figure.savefig(file, format=kind)
        return file.getvalue()


def _colours(runs: Sequence[RecordedRun]) -> list[str]:
    with_cycles = [run for run in runs if run.cycles]
    return [COLOURS[with_cycles.index(run) % len(COLOURS)] if run.cycles else GREY for run in runs]


def _draw_losses(axes: Axes, runs: Sequence[RecordedRun]) -> None:
    shown = list[float]()
    for run, colour in zip(runs, _colours(runs), strict=True):
        last = "" if run.last_loss is None else f"{run.last_loss:.4f} "
        label = f"{last}in {_plain(run.name)}"  # matplotlib leaves out a label that begins with _
        axes.plot(*_columns(run.losses), color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(*_columns(_smooth(run.losses)), color=colour, label=label)
        axes.plot(*_columns(run.validation), "o", color=colour, markeredgecolor="white")
        end = max((step for step, _ in run.losses), default=0.0)
        shown += [loss for step, loss in run.losses if step > 0.1 * end]
        shown += [loss for _, loss in run.validation]
    framed = [loss for loss in shown if math.isfinite(loss)]
    if framed:  # the first steps, which fall far, would flatten the rest
        margin = 0.05 * (max(framed) - min(framed)) or 0.1 * abs(framed[0]) or 0.1
        axes.set_ylim(min(framed) - margin, max(framed) + margin)
    axes.set(title="Training loss (smoothed) and validation loss (points)", xlabel="step")
    axes.legend()


def _draw_rates(axes: Axes, runs: Sequence[RecordedRun]) -> None:
    drawn = [rates for run in runs for rates in (run.rates, run.schedule)]
    peaks = [max((rate for _, rate in rates), default=0.0) for rates in drawn]
    peaks = [peak for peak in peaks if peak > 1 / LARGEST]
    floor = min(peaks, default=1.0) / 300  # the end of a schedule may leave the frame
    for run, colour in zip(runs, _colours(runs), strict=True):
        for rates, style in ((run.rates, {"color": colour, "label": f"in {_plain(run.name)}"}),
                             (run.schedule, {"color": "black", "ls": "--", "lw": 1})):  # fmt: skip
            axes.plot(*_columns([(step, max(rate, floor / 10)) for step, rate in rates]), **style)
    axes.set_yscale("log")
    axes.set_ylim(floor, 2 * max(peaks, default=1.0))
    axes.set(title="Learning rate: base value, and the untouched schedule (dashed)", xlabel="step")
    axes.legend()


def _plain(name: str) -> str:
    """Dollar signs would begin a formula."""
    return name.replace("$", r"\$")


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def _smooth(points: Sequence[tuple[float, float]], half: int = 3) -> list[tuple[float, float]]:
    """Centred running mean. What is not finite stays a gap and counts nowhere."""
    smoothed = []
    for i, (step, value) in enumerate(points):
        near = [v for _, v in points[max(0, i - half) : i + half + 1] if math.isfinite(v)]
        smoothed.append((step, sum(near) / len(near) if math.isfinite(value) else math.nan))
    return smoothed
