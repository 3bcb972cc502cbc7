"""What each number and condition of AutoLR's rule is worth, by recorded trials: no training.

    python -m benchmarks.evidence.ablation

Every row changes one thing in `hdet.trial.rule`, decides all recorded trials of 10 000 steps again
(benchmarks.evidence.auto), and reads the final losses off the curves of fixed rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from zlib import crc32

from hdet.trial import rule
from hdet.trial.rule import Trial

from ..tables import table
from . import auto, fixed_rates
from .auto import NEAR, curves, summary
from .experiment import Record
from .workloads import DEVELOPMENT, REPEATED, TEST, WORKLOADS

LONG = 10_000
OFTEN = {
    *REPEATED, "matrix-factorization-ratings", "embedding-mlp-clicks", "transformer-grammar",
}  # fmt: skip
"""Examples are seen so often that runs overfit at good rates, too."""
FRESH = {name: one for name, one in DEVELOPMENT.items() if name not in OFTEN}
HALVES = [{name for name in (*FRESH, *TEST) if crc32(name.encode()) % 2 == half} for half in (0, 1)]
"""On the first half the exponent of the upper end was chosen, on the second it was run once."""
Change = Callable[[Trial], Trial]


@contextmanager
def _numbers(values: dict[str, float]) -> Iterator[None]:
    """Inside, the rule has these."""
    before = {name: getattr(rule, name) for name in values}
    vars(rule).update(values)
    try:
        yield
    finally:
        vars(rule).update(before)


CHANGES: dict[str, Change] = {
    "the rule": lambda trial: trial,
    "losses alone": lambda trial: replace(
        trial, arms=tuple(replace(arm, displacement=None) for arm in trial.arms)
    ),
    "displacement alone": lambda trial: replace(trial, first_losses=()),
    "the lower bound holds for trained weights, too": lambda trial: replace(
        trial, pretrained=False
    ),
    "losses count although no arm has learned anything": lambda trial: replace(
        trial, first_losses=tuple(1e9 for _ in trial.first_losses)
    ),
    "three arms: 1/8, 1, 8": lambda trial: replace(trial, arms=trial.arms[:3]),
}
NUMBERS: dict[str, dict[str, float]] = {
    "tie: 1 standard error": {"TIE": 1.0},
    "tie: 3 standard errors": {"TIE": 3.0},
    "exponent 0: the length of the run does not count": {"EXPONENT": 0.0},
    "exponent 0.2": {"EXPONENT": 0.2},
    "exponent 0.4": {"EXPONENT": 0.4},
    "lower bound 0.01": {"TOO_LITTLE": 0.01},
    "lower bound 0.03": {"TOO_LITTLE": 0.03},
    "upper bound 1": {"TOO_MUCH": 1.0},
    "upper bound 4": {"TOO_MUCH": 4.0},
    "from below to the nearest end": {"LITTLE": 0.0201},
    "from above to the nearest end": {"MUCH": 1.99},
}


def outcomes(
    records: Sequence[Record], fixed: Sequence[Record], change: Change, values: dict[str, float]
) -> list[tuple[float, float]]:
    """(gap with the fixed rate, gap with the changed rule), in percent, of every recorded trial."""
    known, found = curves(fixed), []
    for line in records:
        curve = known.get((line["workload"], line["steps"], line["seed"]))
        is_trial = line["trial"] is not None and not line["whole"] and line["steps"] == LONG
        if is_trial and curve is not None and line["exponent"] in curve.losses:
            with _numbers(values):
                now = change(Trial.from_dict(line["trial"])).interval(LONG).suggestion
            exponent = math.log2(now / WORKLOADS[line["workload"]].rate)
            found.append((curve.gap(curve.losses[line["exponent"]]), curve.at(exponent)))
    return found


def ablation(records: Sequence[Record], fixed: Sequence[Record]) -> str:
    """Of all workloads but those that see their examples often."""
    fresh = [line for line in records if line["workload"] in FRESH]
    heads = ["", "gap to the best run, mean", f"within {NEAR} %", "within 2 %",
             f"worse by over {NEAR} %", "worst"]  # fmt: skip
    kinds = {name: (change, {}) for name, change in CHANGES.items()}
    kinds |= {name: (CHANGES["the rule"], values) for name, values in NUMBERS.items()}
    pairs = {name: outcomes(fresh, fixed, *kind) for name, kind in kinds.items()}
    return table(heads, ([name, *summary(some)] for name, some in pairs.items() if some))


if __name__ == "__main__":
    print(ablation(auto.EXPERIMENT.read(), fixed_rates.EXPERIMENT.read()), end="")
