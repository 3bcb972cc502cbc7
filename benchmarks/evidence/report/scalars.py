"""Several scalars at once: what they have become, and what the run was worth, against tuning them one at a time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hdet.report import COLOURS, GREY

from .curves import Record, longest, standard_error
from .markdown import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["CORNERS", "EQUAL", "GOOD", "REPLICAS", "SEEDS", "scalars_figure", "scalars_tables"]

REPLICAS = 8
EQUAL = 9
"""trials that cost no less than eight replicas and their probes"""
SEEDS = 2
GOOD = {"lr/conv": 4e-3, "lr/dense": 4e-3, "weight_decay": 0.01, "dropout": 0.1, "label_smoothing": 0.02}
"""values in common use, which nobody has tuned"""
CORNERS = {
    "careful": {"lr/conv": 1.25e-4, "lr/dense": 5e-4, "weight_decay": 1.0, "dropout": 0.6, "label_smoothing": 0.3},
    "bold": {"lr/conv": 3.2e-2, "lr/dense": 1.6e-2, "weight_decay": 1e-4, "dropout": 0.01, "label_smoothing": 2e-3},
}
METHODS = {
    "corner": f"the corner's values, {REPLICAS} replicas",
    "hdet-probe": f"HDET, {REPLICAS} replicas",
    "one-at-a-time": f"one at a time, {EQUAL} trials",
    "tuned": f"its values, {REPLICAS} replicas",
    "good": f"usual values, {REPLICAS} replicas",
}
"""method -> its name, in the order of the table"""

CAPTION = f"""
Held-out loss in nats, mean over seeds ± one standard error; values are geometric means over seeds (a rate's: of its peak). Both have the same
budget, tuning if anything more of it: examples seen, where a pass forward alone, for the probe or for the choice between trials, counts as a third
of one that is trained on. Tuning and the probe choose by the same images, which are neither trained on nor reported. A run of {REPLICAS} replicas
trains on {REPLICAS} times the examples of a trial: that they are averaged is worth something by itself, so a line shows the usual values, and one what
tuning has found, on {REPLICAS} replicas, with the examples of both. A run that crashed counts as ln 10.
"""
CRASHED = math.log(10)


def loss(value: float | None) -> float:
    return CRASHED if value is None else min(value, CRASHED)


def corners(records: Sequence[Record]) -> dict[str, dict[str, list[Record]]]:
    """{corner: {method: lines}}; what has no corner is in all of them. The longest runs; of two lines of one run the later one counts."""
    lines = list({(r["method"], r["corner"], r["seed"]): r for r in longest(records)}.values())
    return {
        corner: {m: own for m in METHODS if (own := [r for r in lines if r["method"] == m and r["corner"] in ("", corner)])}
        for corner in dict.fromkeys(r["corner"] for r in lines if r["corner"])
    }


def scalars_tables(records: Sequence[Record]) -> str:
    """Markdown: for each corner the loss and the values of every method."""
    parts = ["# Several scalars at once\n", "![](scalars.png)", CAPTION]
    for corner, methods in corners(records).items():
        names = list(next(iter(methods.values()))[0]["values"])
        start = next(own[0]["start"] for own in methods.values() if own[0]["corner"])
        rows = [["the corner", "", "", *(f"{start[name]:.3g}" for name in names)]]
        for method, own in methods.items():
            losses = [loss(record["validation"]) for record in own]
            values = [statistics.geometric_mean(record["values"][name] for record in own) for name in names]
            cells = [f"{statistics.mean(losses):.3f} ± {standard_error(losses):.3f}", f"{examples(method, methods):,.0f}"]
            rows.append([METHODS[method], *cells, *(f"{value:.3g}" for value in values)])
        parts += [f"## From the corner {corner!r}\n", table(["", "loss", "examples", *names], rows), _needed(methods)]
    return "\n".join(parts)


def examples(method: str, methods: dict[str, list[Record]]) -> float:
    """Seen in the mean; what tuning has found has cost its trials too."""
    both = [method, "one-at-a-time"] if method == "tuned" else [method]
    return sum(statistics.mean(record["samples"] for record in methods[name]) for name in both if name in methods)


def of_a_trial(methods: dict[str, list[Record]]) -> float:
    """Examples."""
    return examples("one-at-a-time", methods) / min(EQUAL, *(len(record["curve"]) for record in methods["one-at-a-time"]))


def _needed(methods: dict[str, list[Record]]) -> str:
    """How many trials one at a time is as good after; empty where one of both is missing."""
    if not {"hdet-probe", "one-at-a-time"} <= set(methods):
        return ""
    target = statistics.mean(loss(record["validation"]) for record in methods["hdet-probe"])
    curve = tuned_curve(methods["one-at-a-time"])
    reached = [k for k, value in enumerate(curve, 1) if value <= target]
    k = min(reached, default=len(curve))
    needed = f"{'' if reached else 'more than '}{k} trial{'s' * (k > 1)}, {k * of_a_trial(methods):,.0f} examples"
    return f"To be as good as HDET, one at a time needs {needed}.\n"


def tuned_curve(lines: Sequence[Record]) -> list[float]:
    """Mean held-out loss after 1, 2, ... trials, as far as all seeds went."""
    return [statistics.mean(map(loss, values)) for values in zip(*(record["curve"] for record in lines), strict=False)]


def scalars_figure(records: Sequence[Record]) -> Figure:
    """A panel for each corner: the loss against the examples seen, of tuning after each trial."""
    from matplotlib.figure import Figure

    found = corners(records)
    figure = Figure(figsize=(5.0 * max(len(found), 1) + 1.6, 4.4), dpi=130, layout="constrained")
    panels = figure.subplots(1, max(len(found), 1), squeeze=False, sharey=True)[0]
    for axes, (corner, methods) in zip(panels, found.items(), strict=True):
        colours = iter(COLOURS)
        for method, own in methods.items():
            if method == "one-at-a-time":
                curve = tuned_curve(own)
                seen = [k * of_a_trial(methods) / 1000 for k in range(1, len(curve) + 1)]
                axes.plot(seen, curve, color=GREY, drawstyle="steps-post", label="one at a time")
                continue
            losses = [loss(record["validation"]) for record in own]
            axes.errorbar(
                [examples(method, methods) / 1000],
                [statistics.mean(losses)],
                yerr=[standard_error(losses)],
                marker="o",
                linestyle="none",
                color=next(colours),
                label=METHODS[method],
            )
        axes.set_title(f"from the corner {corner!r}", fontsize=11, loc="left")
        axes.set_xlabel("examples seen, thousands")
        axes.grid(True, color="#E3E3E3", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("held-out loss, nats")
    panels[0].legend(frameon=False, fontsize=8)
    return figure
