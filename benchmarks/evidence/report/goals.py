"""What HDET was to reach on the hero figure, and what it has reached."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .curves import Curve
from .markdown import table

__all__ = ["HDET", "ONE_CYCLE", "goals_table", "recovered"]

ONE_CYCLE = "onecycle"
"""the fixed schedule that a method of ours steers, and is measured against, if `STEERED` names no other"""
STEERED = {"hdet-line": "wsd", "hdet-probe": "wsd"}
"""the schedule that a method steers, where it is another; what it borrows its best rate from (benchmarks/evidence/methods.py)"""
HDET = "hdet-"
"""how our methods begin; all others are peers"""
SMALLEST_GAP = 0.02
"""nats; where the fixed schedule loses less by its start, there is nothing to recover"""

Methods = Mapping[str, Curve]


@dataclass(frozen=True)
class Reached:
    """A cell: the figure, and whether it is good enough; None where that cannot be told."""

    text: str
    met: bool | None = None

    def __str__(self) -> str:
        return self.text if self.met is None else f"{self.text} {'met' if self.met else '**missed**'}"


@dataclass(frozen=True)
class Goal:
    text: str
    target: str
    reached: Callable[[Curve, Methods], Reached]


UNKNOWN = Reached("-")


def goals_table(methods: Methods) -> str:
    """A row for each goal, a column for each method of ours; empty without one. ``methods`` are those of one problem."""
    ours = [curve for curve in methods.values() if curve.method.startswith(HDET)]
    rows = [[goal.text, goal.target, *(str(goal.reached(curve, methods)) for curve in ours)] for goal in GOALS]
    return table(["goal", "target", *(curve.method for curve in ours)], rows) if ours else ""


def recovered(curve: Curve, fixed: Curve, exponent: int) -> float | None:
    """Part of what the fixed schedule loses by this start that ``curve`` does not: (fixed(e) - curve(e)) / (fixed(e) - fixed(best)).

    None: a start is missing, or less than `SMALLEST_GAP` is lost.
    """
    if exponent not in curve.runs or exponent not in fixed.runs:
        return None
    gap = fixed.mean(exponent) - fixed.lowest
    return (fixed.mean(exponent) - curve.mean(exponent)) / gap if gap >= SMALLEST_GAP else None


def fixed_of(curve: Curve) -> str:
    return STEERED.get(curve.method, ONE_CYCLE)


def grid(methods: Methods) -> list[int]:
    """The starts that any method has: only who has all of them has an LR sensitivity."""
    return sorted({exponent for curve in methods.values() for exponent in curve.runs})


def lowest_of_all(methods: Methods) -> float:
    """l* of every method's LR sensitivity: to be evenly bad is no virtue."""
    return min(curve.lowest for curve in methods.values())


def _peers(methods: Methods) -> list[Curve]:
    return [curve for curve in methods.values() if not curve.method.startswith(HDET)]


def _gap(exponent: int, target: float) -> Goal:
    def reached(curve: Curve, methods: Methods) -> Reached:
        fixed = methods.get(fixed_of(curve))
        if fixed is None:
            return UNKNOWN
        part = recovered(curve, fixed, exponent)
        if part is not None:
            return Reached(f"{100 * part:.1f} %", part >= target)
        against = curve.over(fixed, exponent)
        return Reached(f"no gap ({against[0]:+.3f})") if against else UNKNOWN

    text = f"gap recovered, starting {2 ** abs(exponent)} times too {'high' if exponent > 0 else 'low'}"
    return Goal(text, f"≥ {100 * target:.0f} %", reached)


def _at_best(curve: Curve, methods: Methods) -> Reached:
    fixed = methods.get(fixed_of(curve))
    against = curve.over(fixed, 0) if fixed else None
    return Reached(f"{against[0]:+.4f} ± {against[1]:.4f}", against[0] <= 0.01) if against else UNKNOWN


def _failed(curve: Curve, methods: Methods) -> Reached:
    return Reached(f"{curve.failed} of {len(curve.records)}", curve.failed == 0)


def _sensitivity(curve: Curve, methods: Methods) -> Reached:
    starts, lowest = grid(methods), lowest_of_all(methods)
    found = {peer.sensitivity(lowest): peer.method for peer in _peers(methods) if peer.starts == starts}
    if curve.starts != starts or not found:
        return UNKNOWN
    own, best = curve.sensitivity(lowest), min(found)
    return Reached(f"{best / own:.2f} ({found[best]})" if own else "nothing lost", best >= 2 * own)


def _best_start(curve: Curve, methods: Methods) -> Reached:
    best = min(_peers(methods), key=lambda peer: peer.lowest, default=None)
    if best is None:
        return UNKNOWN
    part = curve.lowest / best.lowest - 1
    return Reached(f"{100 * part:+.2f} % ({best.method})", part <= 0.005)


def _probe(curve: Curve, methods: Methods) -> Reached:
    """The mean: a run that crashed has probed less."""
    part = statistics.mean(record["probe_percent"] for record in curve.records)
    return Reached(f"{part:.2f} %", part <= 2)


def _memory(curve: Curve, methods: Methods) -> Reached:
    return Reached(f"{curve.highest('copies'):g}", curve.highest("copies") <= 2)


GOALS = (
    *(_gap(exponent, target) for exponent, target in ((-3, 0.97), (-5, 0.95), (-8, 0.90), (2, 0.80), (4, 0.80), (6, 0.80))),
    Goal("runs that crashed or learned nothing", "0", _failed),
    Goal("from the best rate: loss minus the schedule's alone, nats", "≤ +0.01", _at_best),
    Goal("LR sensitivity: the best peer's over its own", "≥ 2", _sensitivity),
    Goal("loss at the best start, against the best peer's best", "≤ +0.5 %", _best_start),
    Goal("compute of the probe", "≤ 2 %", _probe),
    Goal("extra memory, copies of the parameters", "≤ 2", _memory),
)
"""the figures to reach, as far as these runs tell them; one set for all problems"""
