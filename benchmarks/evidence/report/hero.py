"""The hero figure's page: what every method loses for not knowing its rate."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from .curves import Curve, Record, best_rate, curves
from .goals import HDET, ONE_CYCLE, Methods, goals_table, grid, lowest_of_all
from .markdown import table

__all__ = ["METHODS", "SEEDS", "STARTS", "hero_tables", "rank", "seeds_of"]

STARTS = (-8, -5, -3, -1, 0, 1, 2, 4, 6)
"""exponents of the whole figure"""
SEEDS = {"transformer": 3}
"""how many the whole figure has; five on the other problems"""
METHODS = (ONE_CYCLE, "wsd", "schedulefree", "prodigy", "dadapt", "dog", "hdet-softmax", "hdet-line-onecycle", "hdet-probe", "hdet-line")
"""those that the figure has to have, in the order of tables and legends; others stand between the peers and HDET"""

CAPTION = """
The rate that a run starts from is 2^start times the best one of the method (HDET's: of the schedule that it steers: WSD's under hdet-line and
hdet-probe, OneCycle's under the others), which was found on other seeds.
Losses are held-out, in nats, means over seeds ± one standard error. A run that crashed, or ended above it, counts as an untrained model.
LR sensitivity is E[min(l, l0)] - l* over starts even in ln(rate), l0 the untrained model's loss, l* the lowest mean of any method; beside
it, with the method's own lowest as l*.
"""


def seeds_of(problem: str) -> range:
    return range(SEEDS.get(problem, 5))


def rank(method: str) -> tuple[int, str]:
    others = sum(not name.startswith(HDET) for name in METHODS)
    if method in METHODS:
        return METHODS.index(method) + (method.startswith(HDET)), method
    return (len(METHODS) + 1 if method.startswith(HDET) else others), method


def hero_tables(records: Sequence[Record]) -> str:
    """Markdown: for each problem what every method loses, loss by start, HDET's goals, and what is missing."""
    parts = ["# Final validation loss against the starting rate\n", "![](hero.png)", CAPTION]
    for problem, methods in curves(records, rank).items():
        untrained = statistics.mean(score for curve in methods.values() for score in _of(curve.records, "untrained"))
        parts += [f"## {problem} (untrained: {untrained:.3f})\n", _overview(methods), _losses(methods)]
        parts += [part for part in (goals_table(methods), _missing(problem, methods)) if part]
    return "\n".join(parts)


def _overview(methods: Methods) -> str:
    starts, lowest = grid(methods), lowest_of_all(methods)
    rows = []
    for curve in methods.values():
        whole = curve.starts == starts
        probe, copies = statistics.mean(_of(curve.records, "probe_percent")), curve.highest("copies")
        rows.append([
            curve.method,
            f"{best_rate(curve.records[-1]):.3g}",
            f"{_value(curve, curve.best)} ({_start(curve.best)})",
            f"{_value(curve, curve.worst)} ({_start(curve.worst)})",
            f"{curve.sensitivity(lowest):.3f}" if whole else f"- ({len(curve.starts)} of {len(starts)} starts)",
            f"{curve.sensitivity(curve.lowest):.3f}" if whole else "-",
            f"{curve.failed} of {len(curve.records)}",
            f"{probe:.2f} %" if probe else "-",
            f"{copies:g}" if copies else "-",
        ])  # fmt: skip
    heads = ["method", "best rate", "at its best start", "worst", "LR sensitivity", "with its own l*", "crashed or learned nothing",
             "probe", "extra copies"]  # fmt: skip
    return table(heads, rows)


def _losses(methods: Methods) -> str:
    starts = grid(methods)
    rows = [[curve.method, *(f"{curve.mean(e):.3f}" if e in curve.runs else "" for e in starts)] for curve in methods.values()]
    return table(["method", *map(_start, starts)], rows)


def _missing(problem: str, methods: Methods) -> str:
    """What the whole figure has and these lines have not, in a line for each method; empty if nothing is missing."""
    lines = []
    for name in sorted({*METHODS, *methods}, key=rank):
        if name not in methods:
            lines.append(f"- {name}: every run\n")
            continue
        have = {exponent: set(runs) for exponent, runs in methods[name].runs.items()}
        lacks: dict[tuple[int, ...], list[int]] = {}  # seeds -> starts that lack them
        for exponent in STARTS:
            seeds = tuple(seed for seed in seeds_of(problem) if seed not in have.get(exponent, ()))
            if seeds:
                lacks.setdefault(seeds, []).append(exponent)
        if lacks:
            lines.append(f"- {name}: {'; '.join(_lack(seeds, starts) for seeds, starts in lacks.items())}\n")
    return "Missing:\n\n" + "".join(lines) if lines else ""


def _lack(seeds: Sequence[int], starts: Sequence[int]) -> str:
    at = "every start" if len(starts) == len(STARTS) else ", ".join(map(_start, starts))
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))} at {at}"


def _of(records: Iterable[Record], key: str) -> list[Any]:
    return [record[key] for record in records]


def _value(curve: Curve, exponent: int) -> str:
    return f"{curve.mean(exponent):.3f} ± {curve.error(exponent):.3f}"


def _start(exponent: int) -> str:
    return f"2^{exponent}"
