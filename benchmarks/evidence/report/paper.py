"""The paper's table: losses and crashes of its configurations, and which group's rate decays first."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from fractions import Fraction

from .curves import Record
from .markdown import table

__all__ = ["paper_tables"]

CAPTION = """
Rates are multiples of the baseline's best one, which was found on other seeds. The paper's low and high rates are 9 times apart. Losses are
in nats, means over seeds ± one standard error. A run has crashed, or learned nothing, if a loss is not finite, or if over its last tenth
the training loss is above that of the best constant prediction for the same interactions; where it is not finite it is left out of the means.
"""
ORDER = """
A group's rate against the geometric mean of the four, in %, halfway through the run (means over seeds ± one standard error; then floors
interfere): the lowest has decayed fastest. Only where a controller steers the groups.
"""


def paper_tables(records: Sequence[Record]) -> str:
    """Markdown: training loss, held-out loss and crashes by configuration and rate; then the groups' rates."""
    parts = ["# The paper's configurations on a recommender\n", CAPTION]
    parts += ["Crashed, or learned nothing:\n", _by_factor(records, _crashes)]
    parts += ["Final training loss:\n", _by_factor(records, lambda lines: _mean([line["train"] for line in lines]))]
    parts += ["Held-out loss:\n", _by_factor(records, lambda lines: _mean([line["validation"] for line in lines]))]
    steered = [line for line in records if line.get("bases") and len({f"{x:.9g}" for x in line["bases"][1].values()}) > 1]
    if steered:
        parts += [ORDER, _order(steered)]
    return "\n".join(parts)


def _by_factor(records: Sequence[Record], cell: Callable[[list[Record]], str]) -> str:
    factors = sorted({record["factor"] for record in records})
    rows = [
        [method, *(cell(lines) if (lines := _of(records, method, factor)) else "" for factor in factors)] for method in _methods(records)
    ]
    return table(["configuration", *(f"{Fraction(factor).limit_denominator(100)} x" for factor in factors)], rows)


def _order(records: Sequence[Record]) -> str:
    groups = list(records[0]["bases"][1])
    rows = []
    for method in _methods(records):
        for factor in sorted({record["factor"] for record in records}):
            lines = _of(records, method, factor)
            if not lines:
                continue
            by_line = [{group: math.log(line["bases"][1][group]) for group in groups} for line in lines]
            ahead = {group: [100 * math.expm1(logs[group] - statistics.mean(logs.values())) for logs in by_line] for group in groups}
            fastest = sorted(groups, key=lambda group: statistics.mean(ahead[group]))
            rows.append([
                method, f"{Fraction(factor).limit_denominator(100)} x", *(_mean(ahead[group], digits=1) for group in groups),
                ", ".join(_short(group) for group in fastest),
            ])  # fmt: skip
    return table(["configuration", "rate", *map(_short, groups), "fastest first"], rows)


def _short(group: str) -> str:
    return group.removeprefix("lr/")


def _methods(records: Sequence[Record]) -> list[str]:
    """In the order in which the benchmark ran them."""
    return list(dict.fromkeys(record["method"] for record in records))


def _of(records: Sequence[Record], method: str, factor: float) -> list[Record]:
    return [record for record in records if record["method"] == method and record["factor"] == factor]


def _crashes(lines: Sequence[Record]) -> str:
    return f"{sum(line['crashed'] for line in lines)} of {len(lines)}"


def _mean(values: Sequence[float | None], digits: int = 4) -> str:
    finite = [value for value in values if value is not None]
    if not finite:
        return "-"
    error = f" ± {statistics.stdev(finite) / math.sqrt(len(finite)):.{digits}f}" if len(finite) > 1 else ""
    return f"{statistics.mean(finite):.{digits}f}{error}"
