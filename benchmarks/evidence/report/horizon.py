"""The horizon: where the probe takes the rate, and how the run ends, by the length of the cycle and
the weights that are scored."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from .curves import Record, by, of_one_kind, score
from .tables import mean, percent, start, table

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
"""  # noqa: E501


def horizon_tables(records: Sequence[Record]) -> str:
    """Markdown: for each problem a row for each cycle and way of scoring."""
    parts = ["# The horizon\n", "![](horizon.png)", CAPTION]
    for problem, lines in of_one_kind(records, RUN).items():
        starts = sorted(by(lines, "exponent"))
        rows = []
        for (interval, method), cycle in sorted(by(lines, "interval", "method").items()):
            own = by(cycle, "exponent")
            cells = [cell for e in starts for cell in (_cells(own[e]) if e in own else [""] * 3)]
            rows.append([NAMES.get(method, method), percent(interval) if interval else "-", *cells])
        heads = [
            text
            for e in starts
            for text in (f"loss from {start(e)}", "rate went to", "higher : lower")
        ]
        parts += [f"## {problem}\n", table(["scored at", "cycle", *heads], rows)]
    return "\n".join(parts)


def _cells(lines: Sequence[Record]) -> list[str]:
    """Loss, rate, and how often a higher and a lower one was significantly better."""
    votes = [t for line in lines for t in line["votes"]]
    said = (
        f"{sum(t < -SIGNIFICANT for t in votes)} : {sum(t > SIGNIFICANT for t in votes)} of "
        f"{len(votes)}"
        if votes
        else ""
    )
    return [mean([score(line) for line in lines]), f"2^{went_to(lines):+.1f}", said]


def went_to(lines: Sequence[Record]) -> float:
    """log2 of the corrected peak over the best fixed rate."""
    return statistics.mean(line["exponent"] + math.log2(line["correction"]) for line in lines)
