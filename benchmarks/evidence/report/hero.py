"""The hero figure's page: what every method loses for not knowing its rate."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from .curves import Curve, Record, best_rate, curves
from .tables import crossed, mean, start, table

ONE_CYCLE = "onecycle"
HDET = "hdet-"
"""how our methods begin; all others are peers"""
STARTS = (-8, -5, -3, -1, 0, 1, 2, 4, 6)
"""exponents of the whole figure"""
SEEDS = {"gpt-python": 3}
"""how many the whole figure has; five on the other problems"""
METHODS = (ONE_CYCLE, "wsd", "schedulefree", "prodigy", "dadapt", "dog", "hdet-softmax")
"""those that the figure has to have, in the order of tables and legends; others stand between the
peers and HDET"""

CAPTION = """
The rate that a run starts from is 2^start times the best one of the method (hdet-softmax: of OneCycle, which it steers),
which was found on other seeds.
Losses are held-out, in nats, means over seeds ± one standard error. A run that crashed, or ended above it, counts as an untrained model.
LR sensitivity is E[min(l, l0)] - l* over starts even in ln(rate), l0 the untrained model's loss, l* the lowest mean of any method; beside
it, with the method's own lowest as l*.
"""  # noqa: E501


Methods = Mapping[str, Curve]
"""of one problem"""


def grid(methods: Methods) -> list[int]:
    """The starts that any method has: only who has all of them has an LR sensitivity."""
    return sorted({exponent for curve in methods.values() for exponent in curve.runs})


def lowest_of_all(methods: Methods) -> float:
    """l* of every method's LR sensitivity: to be evenly bad is no virtue."""
    return min(curve.lowest for curve in methods.values())


def seeds_of(problem: str) -> range:
    return range(SEEDS.get(problem, 5))


def rank(method: str) -> tuple[int, str]:
    others = sum(not name.startswith(HDET) for name in METHODS)
    if method in METHODS:
        return METHODS.index(method) + (method.startswith(HDET)), method
    return (len(METHODS) + 1 if method.startswith(HDET) else others), method


def untrained(methods: Methods) -> float:
    return statistics.mean(loss for curve in methods.values() for loss in curve.of("untrained"))


def hero_tables(records: Sequence[Record]) -> str:
    """Markdown: for each problem what every method loses, loss by start, and what is missing."""
    parts = ["# Final validation loss against the starting rate\n", "![](hero.png)", CAPTION]
    for problem, methods in curves(records, rank).items():
        losses = crossed("method", methods, {start(e): e for e in grid(methods)}, _loss)
        parts += [
            f"## {problem} (untrained: {untrained(methods):.3f})\n",
            _overview(methods),
            losses,
        ]
        parts += filter(None, [_missing(problem, methods)])
    return "\n".join(parts)


def _loss(curve: Curve, exponent: int) -> str:
    return f"{curve.mean(exponent):.3f}" if exponent in curve.runs else ""


def _overview(methods: Methods) -> str:
    starts, lowest = grid(methods), lowest_of_all(methods)
    rows = []
    for curve in methods.values():
        whole = curve.starts == starts
        copies = max(curve.of("copies"))
        rows.append(
            [
                curve.method,
                f"{best_rate(curve.records[-1]):.3g}",
                *(f"{mean(curve.scores(e))} ({start(e)})" for e in (curve.best, curve.worst)),
                f"{curve.sensitivity(lowest):.3f}"
                if whole
                else (f"- ({len(curve.starts)} of {len(starts)} starts)"),
                f"{curve.sensitivity(curve.lowest):.3f}" if whole else "-",
                f"{curve.failed} of {len(curve.records)}",
                f"{copies:g}" if copies else "-",
            ]
        )
    heads = [
        "method",
        "best rate",
        "at its best start",
        "worst",
        "LR sensitivity",
        "with its own l*",
        "crashed or learned nothing",
        "extra copies",
    ]
    return table(heads, rows)


def _missing(problem: str, methods: Methods) -> str:
    """What the whole figure has and these lines have not, in a line for each method; empty if
    nothing is missing."""
    lines = []
    for name in sorted({*METHODS, *methods}, key=rank):
        if name not in methods:
            lines.append(f"- {name}: every run\n")
            continue
        lacks: dict[tuple[int, ...], list[int]] = {}  # seeds -> starts that lack them
        for exponent in STARTS:
            seeds = tuple(
                seed
                for seed in seeds_of(problem)
                if seed not in methods[name].runs.get(exponent, ())
            )
            if seeds:
                lacks.setdefault(seeds, []).append(exponent)
        if lacks:
            lines.append(
                f"- {name}: {'; '.join(_lack(seeds, starts) for seeds, starts in lacks.items())}\n"
            )
    return "Missing:\n\n" + "".join(lines) if lines else ""


def _lack(seeds: Sequence[int], starts: Sequence[int]) -> str:
    at = "every start" if len(starts) == len(STARTS) else ", ".join(map(start, starts))
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))} at {at}"
