"""What a run did, as a table, and as one picture or one page. Needs a run's files only, no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hdet.cli.charts import smooth
from hdet.cli.html_report import page
from hdet.cli.job.run_files import REPORT, RunFolderError
from hdet.cli.runs import RunFiles, find_runs
from hdet.cli.trial_figure import in_words
from hdet.owned_folder import atomic_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart with any kind of colour vision; what HDET is compared with stays grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#6B6B6B"


def run(options: argparse.Namespace) -> int:
    runs = find_runs(options.runs)
    folders = {run.folder.parent for run in runs} if len(runs) > 1 else {runs[0].folder}
    picture = options.out
    if picture is None and options.html is None:
        picture = (folders.pop() if len(folders) == 1 else Path()) / REPORT
    for name, path, example in (("out", picture, REPORT), ("html", options.html, "report.html")):
        if path is not None:
            _check_place(name, path, example)
    found = trial_lines(runs)
    if options.html is not None:
        write_page(runs, options.html)
    if picture is not None:
        plot(runs, picture)
    print_table(runs)
    for line in found:
        print(line)
    for what, path in (("picture", picture), ("page", options.html)):
        if path is not None:
            print(f"{what}: {path}")
    return 0


def _check_place(name: str, path: Path, example: str) -> None:
    if not path.resolve().parent.is_dir():
        raise ValueError(f"{name} is {str(path)!r}: its folder does not exist, create it first")
    if path.is_dir():
        raise ValueError(f"{name} is {str(path)!r}, which is a folder: pass a file in it, e.g. {path / example}")


def write_page(runs: Sequence[RunFiles], path: Path) -> None:
    """Write the page to ``path``; see `hdet.cli.html_report.page`."""
    text = page(runs).encode()
    try:
        with atomic_file(path) as file:
            file.write(text)
    except OSError as error:
        raise RunFolderError(f"page {str(path)!r} cannot be written ({error.strerror}): pass hdet report another --html FILE") from error


# -- table ---------------------------------------------------------------------------------------------------------------


def print_table(runs: Sequence[RunFiles]) -> None:
    """Run, validation loss, time, and what probes and converges cost, to standard output."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("run")
    for heading in ("validation loss", "time", "probe cost", "converge cost"):
        table.add_column(heading, justify="right")
    for run in runs:
        end = run.end
        loss = "-" if run.validation is None else f"{run.validation:.4f}"
        time = "-" if end is None else f"{end['seconds']:.1f} s"
        costs = (None if end is None or run.is_fixed else end[key] for key in ("probe_percent", "converge_percent"))
        shown = ("-" if cost is None else f"{cost:.2f} %" for cost in costs)
        table.add_row(run.name, loss + " (not ended)" * (end is None), time, *shown)
    Console().print(table)


def trial_lines(runs: Sequence[RunFiles]) -> list[str]:
    """What controller auto has found, and what that took. Raises RunFolderError for a damaged
    record."""
    lines = []
    for run in runs:
        lines += [f"{run.name}: {' '.join(in_words(interval))}" for _, interval in run.trials]
        cost = run.trial_cost
        lines += [f"{run.name}: the trial cost as much as {cost:.0f} steps"] * bool(cost)
    return lines


# -- picture ---------------------------------------------------------------------------------------------------------------


def plot(runs: Sequence[RunFiles], path: Path) -> None:
    """Write the picture to ``path``: losses; base rate beside the untouched schedule; slope with its error band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), dpi=130, layout="constrained")
    losses, rates, slopes = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [3, 2.4, 1.7]})
    colours = iter(COLOURS)
    for run in runs:
        colour = GREY if run.is_fixed else next(colours, GREY)
        _draw_losses(losses, run, colour)
        _draw_rates(rates, run, colour)
        _draw_slopes(slopes, run, colour)
    _label(losses, "loss, nats per byte", "Training loss (lines, smoothed) and validation loss (points)")
    _frame_losses(losses, runs)
    _frame_rates(rates, runs)
    _label(rates, "learning rate", "Base rate (solid) beside the untouched schedule (dashed)")
    slopes.axhline(0, color="black", linewidth=0.8)
    _label(slopes, "d loss / d ln rate", "Slope ± one standard error: below zero, a higher rate was better")
    slopes.set_xlabel("step")
    _frame_slopes(slopes, runs)
    figure.suptitle(headline(runs), fontsize=12, fontweight="bold")
    _write(figure, path)


def _draw_losses(axes: Axes, run: RunFiles, colour: str) -> None:
    points = [(r["step"], r["loss"]) for r in run.of("train") if r["loss"] is not None]
    if points:
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, color=colour, alpha=0.2, linewidth=0.8)
        axes.plot(steps, smooth(values), color=colour, linewidth=1.6, label=run.name)
    marks = [(r["step"], r["loss"]) for r in run.of("validation") if r["loss"] is not None]
    if marks:
        steps, values = zip(*marks, strict=True)
        axes.plot(steps, values, "o", color=colour, markersize=5, markeredgecolor="white", clip_on=False, zorder=3)
        axes.annotate(f" {values[-1]:.3f}", (steps[-1], values[-1]), color=colour, va="center", annotation_clip=False, fontsize=9)


def _draw_rates(axes: Axes, run: RunFiles, colour: str) -> None:
    train = run.of("train")
    steps = [r["step"] for r in train]
    axes.plot(steps, [r["lr"] for r in train], color=colour, linewidth=1.8, label=run.name, zorder=2 + (not run.is_fixed))
    if not run.is_fixed:
        # The correction multiplies the schedule, so the quotient is the schedule.
        schedule = [r["lr"] / r["correction"] for r in train]
        axes.plot(steps, schedule, "--", color="black", linewidth=1, zorder=4, label=f"schedule of {run.name}, untouched")


def _draw_slopes(axes: Axes, run: RunFiles, colour: str) -> None:
    points = []
    for record in run.of("cycle"):
        slope, error = (next(iter(record[key].values()), None) for key in ("slopes", "errors"))
        if slope is not None and error is not None:
            points.append((record["step"], slope, error))
    if points:
        steps, values, errors = zip(*points, strict=True)
        low, high = ([v + sign * e for v, e in zip(values, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(steps, low, high, color=colour, alpha=0.25, linewidth=0)
        axes.plot(steps, values, "o-", color=colour, markersize=3, linewidth=1.2, label=run.name)


def _label(axes: Axes, unit: str, title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_ylabel(unit)
    axes.grid(True, which="major", color="#E3E3E3", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)


def _frame_losses(axes: Axes, runs: Sequence[RunFiles]) -> None:
    """The first steps fall from ln 256 and would flatten the rest: they may leave the frame at the top."""
    shown = [r["loss"] for run in runs for r in run.of("train") if r["loss"] is not None and r["step"] > 0.1 * run.config["steps"]]
    shown += [r["loss"] for run in runs for r in run.of("validation") if r["loss"] is not None]
    if shown:
        margin = 0.05 * (max(shown) - min(shown)) or 0.1
        axes.set_ylim(min(shown) - margin, max(shown) + margin)


def _frame_rates(axes: Axes, runs: Sequence[RunFiles]) -> None:
    """OneCycle ends at a 250 000th of its peak: the last steps may leave the frame at the bottom."""
    axes.set_yscale("log")
    peaks = [max((r["lr"] for r in run.of("train")), default=None) for run in runs]
    known = [peak for peak in peaks if peak]
    if known:
        axes.set_ylim(min(known) / 300, 2 * max(known))


def _frame_slopes(axes: Axes, runs: Sequence[RunFiles]) -> None:
    """Slopes fall by a factor of a hundred in a run: linear near zero, where their errors are, logarithmic beyond."""
    errors = sorted(e for run in runs for r in run.of("cycle") for e in r["errors"].values() if e)
    if errors:
        axes.set_yscale("symlog", linthresh=4 * errors[len(errors) // 2], linscale=1.5)


def headline(runs: Sequence[RunFiles]) -> str:
    """What the picture shows, in a sentence."""
    fixed = [run for run in runs if run.is_fixed]
    others = [run for run in runs if not run.is_fixed]
    if len(others) != 1 or len(fixed) > 1 or others[0].validation is None:
        return "   ".join(f"{run.name}: {run.validation:.3f}" for run in runs if run.validation is not None) or "No validation yet"
    run = others[0]
    highest = max((r["lr"] for r in run.of("train")), default=0.0)
    moved = f"peak of the schedule {run.config['max_lr']:g}, highest base rate {highest:.2g}"
    beside = "" if not fixed or fixed[0].validation is None else f", the fixed schedule at {fixed[0].validation:.3f}"
    return f"HDET ends at {run.validation:.3f} nats per byte{beside}\n{moved}"


def _write(figure: Figure, path: Path) -> None:
    try:
        with atomic_file(path) as file:
            figure.savefig(file, format="png")
    except OSError as error:
        raise RunFolderError(f"picture {str(path)!r} cannot be written ({error.strerror}): pass hdet report another --out FILE") from error
