"""Small batches: how many runs the line lost, and how many it made worse, by problem and by start."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from .curves import Record, longest, score
from .tables import table

__all__ = ["FIXED", "LINE", "LOST", "WORSE", "lost", "small_batches_tables", "worse"]

FIXED, LINE = "fixed", "line"
LOST, WORSE = 0.1, 0.1
"""parts of what there is to gain: the untrained model's held-out loss less the mean of the fixed runs from the best rate"""
RUN = ("method", "batch", "power", "seed")
"""what makes two lines of a problem the same run, of which the last one counts"""

CAPTION = f"""
Held-out loss at the end of runs of the fixed schedule and of the line, from the same start with the same batches. What there is to gain is the untrained model's loss less
that of the fixed runs from the best rate (mean over seeds, by batch size). *Lost*: the loss is not finite, or above the untrained model's by more than {LOST:g} of what there is to gain.
*Worse*: the fixed run of the same start and seed is not lost, and the line's loss is above it by more than {WORSE:g} of what there is to gain. *Better*: the other way round.
"""


def lost(record: Record, gain: float) -> bool:
    """Not finite, or clearly above the untrained model."""
    return record["validation"] is None or record["validation"] > record["untrained"] + LOST * gain


def worse(record: Record, other: Record, gain: float) -> bool:
    """Is ``record`` clearly above ``other``, which is not lost?"""
    if lost(other, gain):
        return False
    return record["validation"] is None or record["validation"] > other["validation"] + WORSE * gain


def small_batches_tables(records: Sequence[Record]) -> str:
    """Markdown: for each problem a row for each start."""
    parts = ["# Small batches\n", CAPTION]
    for problem in sorted({record["problem"] for record in records}):
        runs = {tuple(line[name] for name in RUN): line for line in longest(records) if line["problem"] == problem}
        lines = list(runs.values())
        batches = sorted({line["batch"] for line in lines})
        gains = {batch: gain(lines, batch) for batch in batches}
        rows = []
        for power in sorted({line["power"] for line in lines}):
            pairs = [
                (runs[FIXED, batch, power, seed], line, gains[batch])
                for (method, batch, at, seed), line in runs.items()
                if method == LINE and at == power and (FIXED, batch, power, seed) in runs and math.isfinite(gains[batch])
            ]
            if pairs:
                rows.append([f"10^{power}", *counted(pairs)])
        heads = ["start", "runs", "fixed lost", "line lost", "line worse", "line better", "fixed, part of the gain missed", "line"]
        parts += [f"## {problem} (batches of {', '.join(map(str, batches))})\n", table(heads, rows)]
    return "\n".join(parts)


def gain(lines: Sequence[Record], batch: int) -> float:
    """What there is to gain; NaN without a fixed run from the best rate."""
    best = [line for line in lines if (line["method"], line["batch"], line["power"]) == (FIXED, batch, 0)]
    return statistics.mean(line["untrained"] - score(line) for line in best) if best else math.nan


def counted(pairs: Sequence[tuple[Record, Record, float]]) -> list[str]:
    """Of (fixed, line, gain) from one start; the last two are the mean over runs of (loss - best) / gain, losses no higher than untrained ones."""
    sides = [[(fixed, gain) for fixed, _, gain in pairs], [(line, gain) for _, line, gain in pairs]]
    missed = [statistics.mean(1 - (record["untrained"] - score(record)) / gain for record, gain in side) for side in sides]
    return [
        str(len(pairs)),
        *(str(sum(lost(record, gain) for record, gain in side)) for side in sides),
        str(sum(worse(line, fixed, gain) for fixed, line, gain in pairs)),
        str(sum(worse(fixed, line, gain) for fixed, line, gain in pairs)),
        *(f"{round(part, 2) + 0.0:.2f}" for part in missed),
    ]
