"""Rules of hdet beside AdamW, each at its best rate: which one learns more?

    python -m benchmarks.evidence.rules [--workloads mlp-friedman ...] [--methods mars ...]

Cosine with 5 % of warm-up; rates are 2^exponent times the authors' default, all else is theirs. The
table has what is missing of (untrained - best), in percent, means over the seeds: at the rate that
is best for the rule on each workload, then at its default.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean

import hdet

from ..tables import grouped, spaced
from ..tables import table as made_table
from .experiment import Column, Experiment, Record
from .scoreboard import DEFAULT, Make, annealed, ended, gaps_of, of_groups
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
    return ended(partial(annealed, RULES[method]), workload, exponent, seed, steps)


def table(records: Sequence[Record]) -> str:
    """One of each length."""
    lots = grouped(records, "steps")
    return "\n".join(_table(f"{spaced(steps)} steps", lot) for steps, lot in sorted(lots.items()))


def _table(name: str, records: Sequence[Record]) -> str:
    gaps = gaps_of(records)
    workloads = dict.fromkeys(workload for workload, _, _ in gaps)
    exponents = {exponent for _, _, exponent in gaps}
    rows = []
    ran = {method for _, method, _ in gaps}
    for method in [rule for rule in RULES if rule in ran]:
        by_exponent = [
            {e: gap for e in exponents if (gap := gaps.get((workload, method, e))) is not None}
            for workload in workloads
        ]
        best = [min(found, key=found.__getitem__) for found in by_exponent]
        least = [found[e] for found, e in zip(by_exponent, best, strict=True)]
        usual = fmean(found[0] for found in by_exponent)
        rows.append([method, f"{fmean(least):.1f}", f"{max(least):.1f}", f"{usual:.1f}"])
    heads = [name, "best rates: mean", "worst", "default: mean"]
    return made_table(heads, rows)


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
    seeds=2,
)  # fmt: skip

if __name__ == "__main__":
    EXPERIMENT.main()
