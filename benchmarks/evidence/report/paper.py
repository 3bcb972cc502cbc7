"""The paper's table: losses and crashes of its configurations, and which group's rate decays
first."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from fractions import Fraction

from .curves import Record, by
from .tables import crossed, mean, table

CAPTION = """
Rates are multiples of the baseline's best one, which was found on other seeds. The paper's low and high rates are 9 times apart. Losses are
in nats, means over seeds ± one standard error. A run has crashed, or learned nothing, if a loss is not finite, or if over its last tenth
the training loss is above that of the best constant prediction for the same interactions; where it is not finite it is left out of the means.
"""  # noqa: E501
ORDER = """
A group's rate against the geometric mean of the four, in %, halfway through the run (means over seeds ± one standard error; then floors
interfere): the lowest has decayed fastest. Only where a controller steers the groups.
"""  # noqa: E501


def paper_tables(records: Sequence[Record]) -> str:
    """Markdown: training loss, held-out loss and crashes by configuration and rate; then the
    groups' rates."""
    factors = {times(factor): factor for factor in sorted(by(records, "factor"))}
    methods = {method: by(own, "factor") for method, own in by(records, "method").items()}

    def by_factor(cell: Callable[[list[Record]], str]) -> str:
        return crossed(
            "configuration",
            methods,
            factors,
            lambda own, factor: cell(own[factor]) if factor in own else "",
        )

    parts = ["# The paper's configurations on a recommender\n", CAPTION]
    parts += [
        "Crashed, or learned nothing:\n",
        by_factor(lambda lines: f"{sum(line['crashed'] for line in lines)} of {len(lines)}"),
    ]
    parts += [
        "Final training loss:\n",
        by_factor(lambda lines: _mean([line["train"] for line in lines])),
    ]
    parts += [
        "Held-out loss:\n",
        by_factor(lambda lines: _mean([line["validation"] for line in lines])),
    ]
    steered = [
        line
        for line in records
        if line.get("bases") and len({f"{x:.9g}" for x in line["bases"][1].values()}) > 1
    ]
    if steered:
        parts += [ORDER, _order(steered)]
    return "\n".join(parts)


def times(factor: float) -> str:
    return f"{Fraction(factor).limit_denominator(100)} x"


def _order(records: Sequence[Record]) -> str:
    """Methods in the order in which the benchmark ran them."""
    groups = {group: group.removeprefix("lr/") for group in records[0]["bases"][1]}
    rows = []
    for method, own in by(records, "method").items():
        for factor, lines in sorted(by(own, "factor").items()):
            by_line = [
                {group: math.log(line["bases"][1][group]) for group in groups} for line in lines
            ]
            ahead = {
                group: [
                    100 * math.expm1(logs[group] - statistics.mean(logs.values()))
                    for logs in by_line
                ]
                for group in groups
            }
            fastest = sorted(groups, key=lambda group: statistics.mean(ahead[group]))
            rows.append(
                [
                    method,
                    times(factor),
                    *(_mean(ahead[g], digits=1) for g in groups),
                    ", ".join(groups[g] for g in fastest),
                ]
            )
    return table(["configuration", "rate", *groups.values(), "fastest first"], rows)


def _mean(values: Sequence[float | None], digits: int = 4) -> str:
    finite = [value for value in values if value is not None]
    return mean(finite, digits) if len(finite) > 1 else f"{finite[0]:.{digits}f}" if finite else "-"
