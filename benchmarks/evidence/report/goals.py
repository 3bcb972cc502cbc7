"""What HDET was to reach on the hero figure, and what it has reached."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from .curves import Curve
from .tables import table

ONE_CYCLE = "onecycle"
"""the fixed schedule that a method of ours steers, and is measured against, if `STEERED` names no other"""
STEERED = {"hdet-line": "wsd", "hdet-probe": "wsd"}
"""the schedule that a method steers, where it is another; what it borrows its best rate from (methods.py)"""
HDET = "hdet-"
"""how our methods begin; all others are peers"""
SMALLEST_GAP = 0.02
"""nats; where the fixed schedule loses less by its start, there is nothing to recover"""

Methods = Mapping[str, Curve]
Reached = tuple[str, bool | None] | None
"""the figure, and whether it is good enough (None: that cannot be told); None: there is no figure"""
Goal = tuple[str, str, Callable[[Curve, Methods], Reached]]
"""what, the target, and what a method has reached among all methods of a problem"""


def goals_table(methods: Methods) -> str:
    """A row for each goal, a column for each method of ours; empty without one. ``methods`` are those of one problem."""
    ours = [curve for curve in methods.values() if curve.method.startswith(HDET)]
    rows = [[text, target, *(_cell(reached(curve, methods)) for curve in ours)] for text, target, reached in GOALS]
    return table(["goal", "target", *(curve.method for curve in ours)], rows) if ours else ""


def _cell(reached: Reached) -> str:
    text, met = reached or ("-", None)
    return text if met is None else f"{text} {'met' if met else '**missed**'}"


def recovered(curve: Curve, fixed: Curve, exponent: int) -> float | None:
    """Part of what the fixed schedule loses by this start that ``curve`` does not: (fixed(e) - curve(e)) / (fixed(e) - fixed(best)).

    None: a start is missing, or less than `SMALLEST_GAP` is lost.
    """
    if exponent not in curve.runs or exponent not in fixed.runs:
        return None
    gap = fixed.mean(exponent) - fixed.lowest
    return (fixed.mean(exponent) - curve.mean(exponent)) / gap if gap >= SMALLEST_GAP else None


def fixed_of(curve: Curve, methods: Methods) -> Curve | None:
    """The schedule that a method steers, by itself."""
    return methods.get(STEERED.get(curve.method, ONE_CYCLE))


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
        fixed = fixed_of(curve, methods)
        if fixed is None:
            return None
        part = recovered(curve, fixed, exponent)
        if part is not None:
            return f"{100 * part:.1f} %", part >= target
        against = curve.over(fixed, exponent)
        return (f"no gap ({against[0]:+.3f})", None) if against else None

    text = f"gap recovered, starting {2 ** abs(exponent)} times too {'high' if exponent > 0 else 'low'}"
    return text, f"≥ {100 * target:.0f} %", reached


def _at_best(curve: Curve, methods: Methods) -> Reached:
    fixed = fixed_of(curve, methods)
    against = curve.over(fixed, 0) if fixed else None
    return (f"{against[0]:+.4f} ± {against[1]:.4f}", against[0] <= 0.01) if against else None


def _failed(curve: Curve, methods: Methods) -> Reached:
    return f"{curve.failed} of {len(curve.records)}", curve.failed == 0


def _sensitivity(curve: Curve, methods: Methods) -> Reached:
    starts, lowest = grid(methods), lowest_of_all(methods)
    found = {peer.sensitivity(lowest): peer.method for peer in _peers(methods) if peer.starts == starts}
    if curve.starts != starts or not found:
        return None
    own, best = curve.sensitivity(lowest), min(found)
    return f"{best / own:.2f} ({found[best]})" if own else "nothing lost", best >= 2 * own


def _best_start(curve: Curve, methods: Methods) -> Reached:
    best = min(_peers(methods), key=lambda peer: peer.lowest, default=None)
    if best is None:
        return None
    part = curve.lowest / best.lowest - 1
    return f"{100 * part:+.2f} % ({best.method})", part <= 0.005


def _probe(curve: Curve, methods: Methods) -> Reached:
    """The mean: a run that crashed has probed less."""
    part = statistics.mean(curve.of("probe_percent"))
    return f"{part:.2f} %", part <= 2


def _memory(curve: Curve, methods: Methods) -> Reached:
    copies = max(curve.of("copies"))
    return f"{copies:g}", copies <= 2


GOALS: tuple[Goal, ...] = (
    *(_gap(exponent, target) for exponent, target in ((-3, 0.97), (-5, 0.95), (-8, 0.90), (2, 0.80), (4, 0.80), (6, 0.80))),
    ("runs that crashed or learned nothing", "0", _failed),
    ("from the best rate: loss minus the schedule's alone, nats", "≤ +0.01", _at_best),
    ("LR sensitivity: the best peer's over its own", "≥ 2", _sensitivity),
    ("loss at the best start, against the best peer's best", "≤ +0.5 %", _best_start),
    ("compute of the probe", "≤ 2 %", _probe),
    ("extra memory, copies of the parameters", "≤ 2", _memory),
)
"""the figures to reach, as far as these runs tell them; one set for all problems"""
