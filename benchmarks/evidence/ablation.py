"""What each number and condition of AutoLR's rule is worth, by recorded trials: no training.

    python -m benchmarks.evidence.ablation

Every row changes one thing in `hdet.trial.rule`, decides all recorded trials of 10 000 steps again
(benchmarks.evidence.auto), and reads the final losses off the curves of fixed rates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from statistics import fmean
from typing import Any
from unittest.mock import patch
from zlib import crc32

from hdet.trial import rule
from hdet.trial.rule import RateInterval, Trial

from ..tables import table
from . import auto, fixed_rates
from .auto import NEAR, Compared, compared, summary
from .experiment import Record
from .workloads import DEVELOPMENT, REPEATED

LONG = 10_000
OFTEN = {
    *REPEATED, "matrix-factorization-ratings", "embedding-mlp-clicks", "transformer-grammar",
}  # fmt: skip
"""Examples are seen so often that runs overfit at good rates, too."""
FRESH = {name: one for name, one in DEVELOPMENT.items() if name not in OFTEN}
HALVES = [{name for name in FRESH if crc32(name.encode()) % 2 == half} for half in (0, 1)]
"""On the first half the upper end's exponent and the best guess were chosen; the second was looked
at once, afterwards."""
Change = Callable[[Trial], Trial]


CHANGES: dict[str, Change] = {
    "the rule": lambda trial: trial,
    "losses alone": lambda trial: replace(
        trial, arms=tuple(replace(arm, displacement=None) for arm in trial.arms)
    ),
    "displacement alone": lambda trial: replace(trial, first_losses=()),
    "the lower bound holds for trained weights, too": lambda of: replace(of, pretrained=False),
    "losses count although no arm has learned anything": lambda trial: replace(
        trial, first_losses=tuple(1e9 for _ in trial.first_losses)
    ),
    "three arms: 1/8, 1, 8": lambda trial: replace(trial, arms=trial.arms[:3]),
}
NUMBERS: dict[str, dict[str, float]] = {
    "tie: 1 standard error": {"TIE": 1.0},
    "tie: 2 standard errors": {"TIE": 2.0},
    "lower end, exponent 0": {"LOW_EXPONENT": 0.0},
    "lower end, exponent 0.2": {"LOW_EXPONENT": 0.2},
    "lower end, exponent 0.4": {"LOW_EXPONENT": 0.4},
    "upper end, exponent 0": {"HIGH_EXPONENT": 0.0},
    "upper end, exponent 0.3": {"HIGH_EXPONENT": 0.3},
    "lower bound 0.03": {"TOO_LITTLE": 0.03},
    "upper bound 1": {"TOO_MUCH": 1.0},
    "upper bound 4": {"TOO_MUCH": 4.0},
    "from below to the nearest end": {"LITTLE": 0.0201},
    "from above to the nearest end": {"MUCH": 1.99},
}


def trials_of(records: Sequence[Record]) -> list[Record]:
    return [line for line in records if line["trial"] is not None and not line["whole"]]


def decided(
    records: Sequence[Record],
    fixed: Sequence[Record],
    change: Change = CHANGES["the rule"],
    values: Mapping[str, float] | None = None,
    choose: Callable[[RateInterval], float] = lambda found: found.suggestion,
) -> list[Compared]:
    """Every recorded trial with the changed rule, beside the fixed rate of its start."""
    trials = trials_of(records)
    with patch.dict(vars(rule), values or {}):
        found = [change(Trial.from_dict(of["trial"])).interval(of["steps"]) for of in trials]
        rates = [choose(interval) for interval in found]
    pairs = zip(trials, rates, strict=True)
    return compared([{**line, "factor": rate / line["rate"]} for line, rate in pairs], fixed)


def ablation(records: Sequence[Record], fixed: Sequence[Record]) -> str:
    """Of all workloads but those that see their examples often."""
    fresh = [line for line in records if line["workload"] in FRESH]
    heads = ["", "gap, %", f"within {NEAR} %", "within 2 %", f"worse by over {NEAR} %", "worst, %"]
    kinds = {name: decided(fresh, fixed, change) for name, change in CHANGES.items()}
    kinds |= {name: decided(fresh, fixed, values=values) for name, values in NUMBERS.items()}
    pairs = {name: [(run.fixed, run.read_off) for run in runs] for name, runs in kinds.items()}
    return table(heads, ([name, *summary(some)] for name, some in pairs.items()))


def halves(records: Sequence[Record], fixed: Sequence[Record]) -> str:
    """The upper end and the best guess on each half of the workloads: gaps in percent, by start."""
    starts, rows = range(-6, 7, 2), []
    rules: dict[str, tuple[str, dict[str, Any]]] = {
        "fixed rate": ("fixed", {}),
        "upper end: highest tie": ("read_off", {"values": {"HIGH_EXPONENT": 0.0}}),
        "the rule": ("read_off", {}),
        "best guess": ("read_off", {"choose": lambda found: found.best or found.suggestion}),
    }
    for half, (name, (end, options)) in product(HALVES, rules.items()):
        runs = decided([line for line in records if line["workload"] in half], fixed, **options)
        by = [[run for run in runs if run.record["exponent"] == start] for start in starts]
        gaps = [f"{fmean(getattr(run, end) for run in some):.1f}" for some in (runs, *by)]
        worse = [sum(getattr(run, end) > run.fixed + by for run in runs) for by in (NEAR, 2)]
        rows.append([f"{HALVES.index(half) + 1}, {len(runs)} runs", name, *gaps, *worse])
    heads = ["half", "", "gap", *(Fraction(2) ** start for start in starts),
             f"worse by {NEAR} %", "by 2 %"]  # fmt: skip
    return table(heads, rows)


if __name__ == "__main__":
    recorded = auto.EXPERIMENT.read(), fixed_rates.EXPERIMENT.read()
    print(ablation(*recorded), halves(*recorded), sep="\n", end="")
