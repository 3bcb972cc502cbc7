"""Runs of one method from many starts, and what is said of them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Curve", "Record", "curves", "recovered"]

Record = dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """A method on a problem: one score for each seed and start. A score is a held-out loss in nats, at most an untrained model's."""

    problem: str
    method: str
    scores: dict[int, list[float]]
    """exponent (log2 of the start by the method's best rate) -> scores, in the order of seeds"""
    records: list[Record]

    def mean(self, exponent: int) -> float:
        return statistics.mean(self.scores[exponent])

    def error(self, exponent: int) -> float:
        """Standard error of the mean; 0 for a single seed."""
        scores = self.scores[exponent]
        return statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else 0.0

    @property
    def best(self) -> int:
        """The exponent with the lowest mean."""
        return min(self.scores, key=self.mean)

    @property
    def worst(self) -> int:
        return max(self.scores, key=self.mean)

    @property
    def crashed(self) -> int:
        return sum(record["validation"] is None for record in self.records)

    def above(self, floor: float) -> float:
        """E[min(l, l0)] - ``floor`` over starts that are even in ln(rate): the trapezoid rule, so an uneven grid weighs right."""
        starts = sorted(self.scores)
        if len(starts) < 2:
            return self.mean(starts[0]) - floor
        area = sum((b - a) * (self.mean(a) + self.mean(b)) / 2 for a, b in itertools.pairwise(starts))
        return area / (starts[-1] - starts[0]) - floor

    @property
    def sensitivity(self) -> float:
        """LR sensitivity (Wortsman et al., arXiv 2309.14322): how much is lost on average by not knowing the method's own best rate."""
        return self.above(self.mean(self.best))


def curves(records: Iterable[Record]) -> dict[str, dict[str, Curve]]:
    """{problem: {method: Curve}}. The latest of two lines of one run counts; a run that was made shorter is not mixed with whole ones."""
    latest: dict[tuple[str, str, int, int], Record] = {}
    for record in records:
        latest[record["problem"], record["method"], record["exponent"], record["seed"]] = record
    by: dict[str, dict[str, dict[int, list[Record]]]] = {}
    for (problem, method, exponent, _), record in sorted(latest.items()):
        by.setdefault(problem, {}).setdefault(method, {}).setdefault(exponent, []).append(record)
    return {
        problem: {
            method: Curve(problem, method, {e: [_score(r) for r in runs] for e, runs in starts.items()}, [r for runs in starts.values() for r in runs])
            for method, starts in methods.items()
        }
        for problem, methods in by.items()
    }  # fmt: skip


def _score(record: Record) -> float:
    validation = record["validation"]
    return float(record["untrained"] if validation is None else min(validation, record["untrained"]))


def recovered(curve: Curve, fixed: Curve, exponent: int) -> float | None:
    """Part of the gap between the fixed schedule's loss from this start and its best one that ``curve`` closes; None below 0.02 nats."""
    gap = fixed.mean(exponent) - fixed.mean(fixed.best)
    return (fixed.mean(exponent) - curve.mean(exponent)) / gap if gap > 0.02 else None
