"""Several scalars at once: what they have become, and what the run was worth, against tuning them one at a time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from .curves import Record, longest
from .tables import mean, table

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

Methods = Mapping[str, Sequence[Record]]


def losses(records: Sequence[Record]) -> list[float]:
    return [_loss(record["validation"]) for record in records]


def _loss(value: float | None) -> float:
    return CRASHED if value is None else min(value, CRASHED)


def corners(records: Sequence[Record]) -> dict[str, Methods]:
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
            values = [statistics.geometric_mean(record["values"][name] for record in own) for name in names]
            rows.append([METHODS[method], mean(losses(own)), f"{examples(method, methods):,.0f}", *(f"{value:.3g}" for value in values)])
        parts += [f"## From the corner {corner!r}\n", table(["", "loss", "examples", *names], rows), _needed(methods)]
    return "\n".join(parts)


def examples(method: str, methods: Methods) -> float:
    """Seen in the mean; what tuning has found has cost its trials too."""
    both = [method, "one-at-a-time"] if method == "tuned" else [method]
    return sum(statistics.mean(record["samples"] for record in methods[name]) for name in both if name in methods)


def of_a_trial(methods: Methods) -> float:
    """Examples."""
    return examples("one-at-a-time", methods) / min(EQUAL, *(len(record["curve"]) for record in methods["one-at-a-time"]))


def _needed(methods: Methods) -> str:
    """How many trials one at a time is as good after; empty where one of both is missing."""
    if not {"hdet-probe", "one-at-a-time"} <= set(methods):
        return ""
    target = statistics.mean(losses(methods["hdet-probe"]))
    curve = tuned_curve(methods["one-at-a-time"])
    reached = [k for k, value in enumerate(curve, 1) if value <= target]
    k = min(reached, default=len(curve))
    needed = f"{'' if reached else 'more than '}{k} trial{'s' * (k > 1)}, {k * of_a_trial(methods):,.0f} examples"
    return f"To be as good as HDET, one at a time needs {needed}.\n"


def tuned_curve(lines: Sequence[Record]) -> list[float]:
    """Mean held-out loss after 1, 2, ... trials, as far as all seeds went."""
    return [statistics.mean(map(_loss, values)) for values in zip(*(record["curve"] for record in lines), strict=False)]
