"""Runs of one method from many starts, and what is said of them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Record = dict[str, Any]
"""a line of the results"""


def score(record: Record) -> float:
    """Held-out loss in nats; an untrained model's if the run crashed or ended above it."""
    validation = record["validation"]
    return float(
        record["untrained"] if validation is None else min(validation, record["untrained"])
    )


@dataclass(frozen=True)
class Curve:
    """A method on a problem, from several starts: exponents, which are log2 (start / the method's
    best rate)."""

    method: str
    runs: dict[int, dict[int, Record]]
    """exponent -> seed -> line, both rising; no start is empty"""

    @property
    def starts(self) -> list[int]:
        return list(self.runs)

    @property
    def records(self) -> list[Record]:
        return [record for runs in self.runs.values() for record in runs.values()]

    def of(self, key: str) -> list[Any]:
        return [record[key] for record in self.records]

    def scores(self, exponent: int) -> list[float]:
        return [score(record) for record in self.runs[exponent].values()]

    def mean(self, exponent: int) -> float:
        return self._means[exponent]

    @property
    def best(self) -> int:
        """The start with the lowest mean."""
        return min(self.runs, key=self.mean)

    @property
    def worst(self) -> int:
        return max(self.runs, key=self.mean)

    @property
    def lowest(self) -> float:
        return self.mean(self.best)

    @property
    def failed(self) -> int:
        """Runs that crashed, or ended no better than untrained."""
        return sum(
            record["validation"] is None or record["validation"] >= record["untrained"]
            for record in self.records
        )

    def sensitivity(self, lowest: float) -> float:
        """LR sensitivity E[min(l, l0)] - l* (Wortsman et al., arXiv 2309.14322), l0 an untrained
        model's loss, l* = ``lowest``; nats.

        The expectation is over starts that are even in ln(rate): the trapezoid rule, so a grid that
        is denser somewhere weighs right.
        """
        if len(self.starts) == 1:
            return self.mean(self.starts[0]) - lowest
        area = sum(
            (b - a) * (self.mean(a) + self.mean(b)) / 2 for a, b in itertools.pairwise(self.starts)
        )
        return area / (self.starts[-1] - self.starts[0]) - lowest

    @cached_property
    def _means(self) -> dict[int, float]:
        return {exponent: statistics.mean(self.scores(exponent)) for exponent in self.runs}


def curves(
    records: Iterable[Record], rank: Callable[[str], Any] = str
) -> dict[str, dict[str, Curve]]:
    """{problem: {method: Curve}}, methods in the order of ``rank``; of the longest runs, what is
    around the best rate of a method's last line."""
    found: dict[str, dict[str, Curve]] = {}
    for problem, lines in sorted(by(longest(records), "problem").items()):
        methods = by(lines, "method")
        found[problem] = {
            name: _curve(name, latest(methods[name], ("exponent", "seed")))
            for name in sorted(methods, key=rank)
        }
    return found


def _curve(method: str, lines: Iterable[Record]) -> Curve:
    rising = by(sorted(lines, key=lambda line: (line["exponent"], line["seed"])), "exponent")
    return Curve(
        method, {exponent: {line["seed"]: line for line in own} for exponent, own in rising.items()}
    )


def longest(records: Iterable[Record]) -> list[Record]:
    """Without the shortened runs of problems of which there are longer ones."""
    lines = list(records)
    steps = {
        problem: max(line["steps"] for line in own) for problem, own in by(lines, "problem").items()
    }
    return [line for line in lines if line["steps"] == steps[line["problem"]]]


def latest(lines: Sequence[Record], names: Sequence[str]) -> list[Record]:
    """Without runs around a best rate that the last line has replaced; of lines in which all of
    ``names`` are the same the last one."""
    around = [
        line for line in lines if math.isclose(best_rate(line), best_rate(lines[-1]), rel_tol=1e-5)
    ]
    return list({tuple(line[name] for name in names): line for line in around}.values())


def of_one_kind(records: Iterable[Record], names: Sequence[str]) -> dict[str, list[Record]]:
    """{problem: the `latest` of the `longest` runs}, of benchmarks in which all methods count from
    one best rate."""
    return {
        problem: latest(lines, names)
        for problem, lines in sorted(by(longest(records), "problem").items())
    }


def by(lines: Iterable[Record], *names: str) -> dict[Any, list[Record]]:
    """The lines by the value of ``names[0]``, or by the tuple of several; in the order in which
    they first come."""
    found: dict[Any, list[Record]] = {}
    for line in lines:
        key = tuple(line[name] for name in names)
        found.setdefault(key if len(names) > 1 else key[0], []).append(line)
    return found


def best_rate(record: Record) -> float:
    """The rate that the exponents of a method count from."""
    return float(record["rate"] / 2.0 ** record["exponent"])
