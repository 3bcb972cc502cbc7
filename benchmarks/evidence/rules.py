"""Rules of hdet beside AdamW, each at its best rate: which one learns more?

    python -m benchmarks.evidence.rules [--workloads mlp-friedman ...] [--methods mars ...]

Cosine with 5 % of warm-up; rates are 2^exponent times the authors' default, all else is theirs. The
table has what is missing of (untrained - best), in percent, means over the seeds: at the rate that
is best for a rule on that workload (*: the lowest or highest that was tried), then means over the
workloads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

import hdet

from ..tables import table as made_table
from .experiment import Column, Experiment, Record
from .scoreboard import DEFAULT, Make, annealed, gaps_of, of_groups
from .training import train, untrained
from .workloads import WORKLOADS

RULES: dict[str, Make] = {
    "adamw": of_groups(hdet.FusedAdamW, DEFAULT),
    "cautious": of_groups(hdet.FusedCautiousAdamW, DEFAULT),
    "adopt": of_groups(hdet.FusedADOPT, 1e-3),
    "mars": of_groups(hdet.FusedMARS, 3e-3),
    "adan": of_groups(hdet.FusedAdan, 1e-3),
    "lion": of_groups(hdet.FusedLion, 1e-4),
    "cautious-lion": of_groups(hdet.FusedCautiousLion, 1e-4),
}
EXPONENTS = (0, 1, 2, 3, 4, 5)


def run(method: str, workload: str, exponent: int, seed: int, steps: int) -> Record:
    chosen = WORKLOADS[workload]
    build = partial(annealed, RULES[method])
    outcome = train(chosen.lasting(steps), build, 2.0**exponent, seed)
    return {**outcome, "untrained": untrained(chosen.problem, seed)}


def table(records: Sequence[Record]) -> str:
    gaps = gaps_of(records)
    methods = [method for method in RULES if any(cell[1] == method for cell in gaps)]
    workloads = list(dict.fromkeys(workload for workload, _, _ in gaps))
    exponents = {exponent for _, _, exponent in gaps}
    edges = min(exponents), max(exponents)

    def best(method: str, workload: str) -> int:
        return min(exponents, key=lambda e: gaps.get((workload, method, e), math.inf))

    def mean(method: str, exponent: Callable[[str, str], int]) -> str:
        cells = [(workload, method, exponent(method, workload)) for workload in workloads]
        return f"{fmean(gaps[cell] for cell in cells):.1f}"

    def cell(workload: str, method: str) -> str:
        exponent = best(method, workload)
        return f"{gaps[workload, method, exponent]:.1f}{'*' if exponent in edges else ''}"

    rows = [[workload, *(cell(workload, method) for method in methods)] for workload in workloads]
    rows.append(["mean, best rates", *(mean(method, best) for method in methods)])
    rows.append(["mean, default", *(mean(method, lambda *_: 0) for method in methods)])
    return made_table(["gap, %", *methods], rows)


EXPERIMENT = Experiment(
    "rules", __doc__, run,
    (
        Column("workload", (
            "mlp-friedman", "poisson-counts", "mlp-word-tags", "vae-digits", "two-towers-views",
            "gnn-triangles", "cnn-digits", "transformer-brackets",
        ), ["mlp-friedman"], WORKLOADS),
        Column("method", tuple(RULES), tuple(RULES), RULES),
        Column("exponent", EXPONENTS, [0]),
        Column("steps", (1500,), [100], option="steps"),
    ),
    table,
    seeds=3,
)  # fmt: skip

if __name__ == "__main__":
    EXPERIMENT.main()
