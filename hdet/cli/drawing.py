"""Runs as charts, by matplotlib: trials, losses, learning rates, what replicas tried."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from textwrap import wrap

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hdet.cli.runs import LARGEST, Points, RecordedRun
from hdet.trial.rule import RateInterval

# Okabe and Ito's colours are told apart with any kind of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MOST_MARKS = 20
"""Of moves. A controller that moves in each cycle would fill the picture."""
GREY = "#6B6B6B"
"""Of runs without cycles, with which the others are compared."""
STYLE = {
    "axes.grid": True, "axes.axisbelow": True, "axes.titlelocation": "left",
    "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False,
    "grid.color": "#E3E3E3", "legend.frameon": False, "legend.fontsize": "small",
}  # fmt: skip


@dataclass(frozen=True)
class Chart:
    draw: Callable[[Axes], None]
    text: str
    """What it shows, for whoever does not see it."""


def charts_of(runs: Sequence[RecordedRun]) -> list[Chart]:
    """The losses of each trial over its rates; losses over steps; learning rates over steps; what
    replicas tried in each cycle, by knob."""
    losses, rates = partial(_draw_losses, runs), partial(_draw_rates, runs)
    return [
        *(_trial(run, *trial) for run in runs for trial in run.trials),
        Chart(losses, "Loss over steps. " + _ends(runs, [run.losses for run in runs])),
        Chart(rates, "Learning rate over steps. " + _ends(runs, [run.rates for run in runs])),
        *(_explored(run, name) for run in runs for name in run.explored),
    ]


def draw(charts: Sequence[Chart], kind: str) -> bytes:
    """Under one another: the contents of a file of this kind, png, svg or pdf."""
    with matplotlib.style.context(["default", STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a name in a script that the font lacks
        figure = Figure(figsize=(4.4, 3.1 * len(charts)), dpi=150, layout="constrained")
        for chart, axes in zip(charts, figure.subplots(len(charts), squeeze=False), strict=True):
            chart.draw(axes[0])
        file = BytesIO()
        figure.savefig(file, format=kind)
        return file.getvalue()


def _ends(runs: Sequence[RecordedRun], series: Sequence[Points]) -> str:
    """First and last value of each."""
    return " ".join(
        f"{run.name}: from {points[0][1]:.4g} at step {points[0][0]:.0f} to {points[-1][1]:.4g} "
        f"at step {points[-1][0]:.0f}."
        for run, points in zip(runs, series, strict=True)
        if points
    )


def _trial(run: RecordedRun, step: float, interval: RateInterval) -> Chart:
    losses = ", ".join(f"{arm.loss:.4g} at {arm.rate:.2g}" for arm in interval.trial.arms)
    text = f"{run.name}: loss over learning rates in a trial before step {step:.0f}: {losses}."
    return Chart(partial(_draw_trial, run, step, interval), text)


def _explored(run: RecordedRun, name: str) -> Chart:
    cycles = run.explored[name]
    text = f"{run.name}: values of {name} that replicas had in {len(cycles)} cycles, coloured by "
    return Chart(partial(_draw_explored, run, name), text + "their losses beside the cycle's mean.")


def _draw_trial(run: RecordedRun, step: float, interval: RateInterval, axes: Axes) -> None:
    interval.plot(axes)
    _title(axes, f"{run.name}: losses of the trial before step {step:.0f}")


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
        framed += [loss for _, loss in _smooth(run.losses) if math.isfinite(loss)]
        framed += [loss for _, loss in run.validation if math.isfinite(loss)]
    if framed:
        margin = 0.05 * (max(framed) - min(framed)) or 0.1 * abs(framed[0]) or 0.1
        axes.set_ylim(min(framed) - margin, max(framed) + margin)
    if any(run.moves for run in runs):
        axes.plot([], [], color="black", linestyle=":", linewidth=1, label="a value moved")
    points = ", points: validation" if any(run.validation for run in runs) else ""
    _title(axes, f"Training loss, smoothed{points}")
    axes.set_xlabel("step")
    axes.legend()


def _draw_rates(runs: Sequence[RecordedRun], axes: Axes) -> None:
    for run, colour in zip(runs, _colours(runs), strict=True):
        axes.plot(*_columns(run.rates), color=colour, label=_label(run))
        axes.plot(*_columns(run.schedule), color="black", linestyle="--", linewidth=1)
    rates = [rate for run in runs for _, rate in (*run.rates, *run.schedule)]
    top = max((rate for rate in rates if rate > 1 / LARGEST), default=1.0)
    axes.set_yscale("log")
    axes.set_ylim(top / 1e4, 2 * top)  # the end of a schedule may leave the frame
    _title(axes, "Learning rate, dashed: your schedule as it was")
    axes.set_xlabel("step")
    axes.legend()


def _draw_explored(run: RecordedRun, name: str, axes: Axes) -> None:
    """A replica's value in each cycle, its colour the loss beside the mean of that cycle's."""
    steps, values, beside = list[float](), list[float](), list[float]()
    for step, pairs in run.explored[name]:
        finite = [(value, loss) for value, loss in pairs if math.isfinite(loss)]
        for value, loss in finite:
            steps.append(step)
            values.append(value)
            beside.append(loss - sum(loss for _, loss in finite) / len(finite))
    widest = max(map(abs, beside), default=0.0) or 1.0
    colours = {"cmap": "coolwarm", "vmin": -widest, "vmax": widest}
    points = axes.scatter(steps, values, 12, beside, **colours)  # type: ignore[arg-type]
    assert axes.figure is not None
    axes.figure.colorbar(points, ax=axes, label="loss - mean")
    if min(values, default=0.0) > 0:
        axes.set_yscale("log")
    _title(axes, f"{run.name}: {name} of each replica, by cycle")
    axes.set_xlabel("step")


def _label(run: RecordedRun) -> str:
    """Matplotlib leaves out a label that begins with _."""
    return _plain(f"run {run.name}" if len(run.name) < 30 else f"run {run.name[:30]}…")


def _title(axes: Axes, text: str) -> None:
    """In lines as long as a narrow picture is wide."""
    axes.set_title(_plain("\n".join(wrap(text, 50))))


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
