"""Draws the documents' figures: `python -m docs.figures`, from the root of the repository.

Those of docs/concepts.md and docs/results.md go into docs/figures/; docs/rates.png is the trial of
README.md's program. Needs matplotlib and scikit-learn. Multipliers are hdet's own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from benchmarks.evidence import auto, auto_report, fixed_rates
from hdet.core.spread import assignment, multipliers

FOLDER = Path(__file__).parent / "figures"
README = Path(__file__).parents[1] / "README.md"
COLOURS = ["#3b6fb6", "#59a14f", "#e08a2e", "#c4474f"]
GREY = "#777777"


def box(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    text: str,
    colour: str,
    alpha: float = 0.25,
) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0.02",
            facecolor=colour,
            alpha=alpha,
            edgecolor=colour,
        )
    )
    axes.text(
        x + width / 2,
        y + height / 2,
        text,
        ha="center",
        va="center",
        fontsize=9,
    )


def bare(axes: Axes, width: float, height: float) -> None:
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")


def replica(axes: Axes) -> None:
    bare(axes, 8, 2.2)
    for r in range(2):
        box(axes, 0.1 + 4 * r, 0.1, 3.7, 2.0, "", COLOURS[r], 0.1)
        axes.text(
            1.95 + 4 * r,
            1.9,
            f"replica {r}: one copy of the model",
            ha="center",
            va="center",
            fontsize=9,
            color=COLOURS[r],
        )
        for k in range(4):
            box(
                axes,
                0.3 + 4 * r + 1.75 * (k % 2),
                0.95 - 0.75 * (k // 2),
                1.55,
                0.6,
                f"rank {4 * r + k}",
                COLOURS[r],
            )


def cycle(axes: Axes) -> None:
    steps, length = 12, 4
    for r, rho in enumerate(multipliers(4, 0.5)):
        xs = [i / 20 for i in range(20 * steps + 1)]
        ys = [
            -0.25 * x
            + (1 - rho) * 0.45 * (x % length) * (-1) ** int(x // length)
            for x in xs
        ]
        for c in range(steps // length):
            axes.plot(
                xs[80 * c : 80 * c + 80],
                ys[80 * c : 80 * c + 80],
                color=COLOURS[r],
                label=f"replica {r}" if c == 0 else None,
            )
    for c in range(steps // length + 1):
        axes.plot(
            length * c,
            -0.25 * length * c,
            "o",
            color="black",
            markersize=5,
            zorder=3,
        )
        axes.axvline(length * c, color=GREY, linewidth=0.6, linestyle=":")
    for c in range(steps // length):
        axes.text(
            length * (c + 0.5),
            0.75,
            f"cycle {c}",
            ha="center",
            color=GREY,
            fontsize=9,
        )
    axes.set(
        xlabel="optimizer steps (here T = 4)",
        ylabel="a weight",
        yticks=[],
        xticks=range(0, steps + 1, 2),
        ylim=(-4.2, 1.1),
    )
    axes.legend(frameon=False, fontsize=8, loc="lower left", ncols=2)


def knob(axes: Axes) -> None:
    bare(axes, 8, 2.2)
    rows = [
        ("learning rate", "param_groups", ("inside optimizer.step()")),
        ("weight decay", "param_groups", ("inside optimizer.step()")),
        ("dropout", "the model's modules", "inside explore()"),
    ]
    for i, row in enumerate(rows):
        for j, (text, x, width) in enumerate(
            zip(row, (0.1, 2.3, 5.1), (1.9, 2.5, 2.8), strict=True)
        ):
            box(axes, x, 1.2 - 0.55 * i, width, 0.42, text, COLOURS[j])
    for text, x in (
        ("knob", 1.05),
        ("where its value lives", 3.55),
        ("where replicas differ", 6.5),
    ):
        axes.text(x, 1.9, text, ha="center", color=GREY, fontsize=9)


def multiplier(axes: Axes) -> None:
    grid, cycles = multipliers(4, 0.3), 6
    for c in range(cycles):
        for r, place in enumerate(assignment(0, c, "lr", 4)):
            axes.plot(
                c + 0.1 * (r - 1.5),
                grid[place],
                "o",
                color=COLOURS[r],
                markersize=7,
                label=f"replica {r}" if c == 0 else None,
            )
    axes.axhline(1, color=GREY, linewidth=0.6)
    axes.set(
        xlabel="cycle",
        ylabel="multiplier",
        xticks=range(cycles),
        yticks=[round(m, 2) for m in grid],
        ylim=(0.6, 1.55),
    )
    axes.legend(frameon=False, fontsize=8, loc="upper center", ncols=4)


def schedule(part: float) -> float:
    """Warm-up to 1, then a cosine to 0."""
    return (
        part / 0.1
        if part < 0.1
        else 0.5 * (1 + math.cos(math.pi * (part - 0.1) / 0.9))
    )


def base_value(axes: Axes) -> None:
    parts = [i / 400 for i in range(401)]
    axes.plot(
        parts,
        [2 * schedule(p) for p in parts],
        color="black",
        label="base value: at rest, on every rank",
    )
    for r, rho in enumerate(multipliers(4, 0.3)):
        axes.plot(
            parts,
            [2 * rho * schedule(p) for p in parts],
            color=COLOURS[r],
            linewidth=0.7,
            label=f"replica {r}, inside step()",
        )
    axes.set(xlabel="part of the run", ylabel="learning rate", yticks=[])
    axes.legend(frameon=False, fontsize=8)


def correction(axes: Axes) -> None:
    parts = [i / 400 for i in range(401)]
    factors = [1.0 if p < 0.15 else 1.6 if p < 0.22 else 2.4 for p in parts]
    axes.plot(
        parts,
        [schedule(p) for p in parts],
        color=GREY,
        linestyle="--",
        label="schedule",
    )
    axes.plot(
        parts,
        [schedule(p) * c for p, c in zip(parts, factors, strict=True)],
        color="black",
        label="base value = schedule x correction",
    )
    axes.step(
        parts,
        factors,
        color=COLOURS[2],
        linewidth=1,
        label="correction: what the controller has learned",
    )
    axes.set(xlabel="part of the run", yticks=[0, 1, 2])
    axes.legend(frameon=False, fontsize=8)


FIGURES: dict[str, tuple[Callable[[Axes], None], float]] = {
    "replica": (replica, 1.8),
    "cycle": (cycle, 2.6),
    "knob": (knob, 1.8),
    "multiplier": (multiplier, 2.4),
    "base-value": (base_value, 2.4),
    "correction": (correction, 2.4),
}


STARTS = {-4: "16 times too low", 0: "usual rate", 4: "16 times too high"}


def before_and_after() -> Figure:
    """A grey and a blue dot for each workload: the gap of its fixed rate, and that of AutoLR."""
    compared = auto.compared(
        auto.EXPERIMENT.read(), fixed_rates.EXPERIMENT.read()
    )
    runs = [
        run
        for run in compared
        if run.record["workload"] in auto_report.FRESH
        and run.record["steps"] == auto_report.LONG
        and run.record["level"] == "trial"
    ]
    figure, row = plt.subplots(
        1, 3, figsize=(6.4, 2.9), layout="constrained", sharey=True
    )
    for axes, (exponent, title) in zip(row, STARTS.items(), strict=True):
        these = [run for run in runs if run.record["exponent"] == exponent]
        these.sort(key=lambda run: (run.fixed, run.auto))
        for x, run in enumerate(these):
            axes.plot(
                [x, x],
                [run.fixed, run.auto],
                color=GREY,
                linewidth=0.6,
                alpha=0.6,
            )
        fixed, moved = [run.fixed for run in these], [run.auto for run in these]
        axes.plot(fixed, "o", color=GREY, markersize=3.5, label="fixed rate")
        axes.plot(
            moved, "o", color=COLOURS[0], markersize=3.5, label="with AutoLR"
        )
        axes.set(
            title=title,
            xlabel=f"{len(these)} workloads, sorted",
            xticks=[],
            ylim=(-3, 103),
        )
        axes.grid(axis="y", linewidth=0.4)
    row[0].set_ylabel("gap to the best run, %")
    row[0].legend(frameon=False, loc="upper left")
    return figure


def rates() -> None:
    """docs/rates.png: the trial of README.md's first program."""
    names: dict[str, Any] = {}
    program = re.findall(
        r"^```python\n(.*?)^```",
        README.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )[0]
    exec(program, names)  # noqa: S102 - running the program of the page is the point
    names["auto"].interval.plot().figure.savefig(
        FOLDER.parent / "rates.png", dpi=150
    )
    plt.close("all")


def main() -> None:
    rates()
    FOLDER.mkdir(exist_ok=True)
    plt.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "hdet",
            "font.family": "sans-serif",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    for name, (draw, height) in FIGURES.items():
        figure, axes = plt.subplots(figsize=(6.4, height), layout="constrained")
        draw(axes)
        figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)
    before_and_after().savefig(
        FOLDER / "before-after.svg", metadata={"Date": None}
    )


if __name__ == "__main__":
    main()
