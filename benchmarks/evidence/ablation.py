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
from statistics import fmean
from typing import Any

from hdet.trial import rule
from hdet.trial.rule import Trial

from . import fixed_rates
from .auto import NEAR, RESULTS, curves
from .report.tables import table
from .runs import Record, read
from .workloads import WORKLOADS

LONG = 10_000
Change = Callable[[Trial], Trial]


@contextmanager
def _numbers(**values: float) -> Iterator[None]:
    """Inside, the rule has these."""
    before = {name: getattr(rule, name) for name in values}
    vars(rule).update(values)
    try:
        yield
    finally:
        vars(rule).update(before)


def _without_displacement(trial: Trial) -> Trial:
    return replace(trial, arms=tuple(replace(arm, displacement=None) for arm in trial.arms))


def _without_losses(trial: Trial) -> Trial:
    return replace(trial, first_losses=())


def _of_three(trial: Trial) -> Trial:
    return replace(trial, arms=trial.arms[:3])


def _always_learned(trial: Trial) -> Trial:
    return replace(trial, first_losses=tuple(1e9 for _ in trial.first_losses))


ROWS: dict[str, tuple[Change, dict[str, float]]] = {
    "the rule": (lambda trial: trial, {}),
    "losses alone": (_without_displacement, {}),
    "displacement alone": (_without_losses, {}),
    "the lower bound holds for trained weights, too": (
        lambda trial: replace(trial, pretrained=False),
        {},
    ),
    "losses count although no arm has learned anything": (_always_learned, {}),
    "three arms: 1/8, 1, 8": (_of_three, {}),
    "tie: 1 standard error": (lambda trial: trial, {"TIE": 1.0}),
    "tie: 3 standard errors": (lambda trial: trial, {"TIE": 3.0}),
    "exponent 0: the length of the run does not count": (lambda trial: trial, {"EXPONENT": 0.0}),
    "exponent 0.2": (lambda trial: trial, {"EXPONENT": 0.2}),
    "exponent 0.4": (lambda trial: trial, {"EXPONENT": 0.4}),
    "lower bound 0.01": (lambda trial: trial, {"TOO_LITTLE": 0.01}),
    "lower bound 0.03": (lambda trial: trial, {"TOO_LITTLE": 0.03}),
    "upper bound 1": (lambda trial: trial, {"TOO_MUCH": 1.0}),
    "upper bound 4": (lambda trial: trial, {"TOO_MUCH": 4.0}),
    "from below to the nearest end": (lambda trial: trial, {"LITTLE": 0.0201}),
    "from above to the nearest end": (lambda trial: trial, {"MUCH": 1.99}),
}


def outcomes(
    records: Sequence[Record], fixed: Sequence[Record], change: Change, **values: float
) -> list[tuple[float, float]]:
    """(gap with the fixed rate, gap with the changed rule), in percent, of every recorded trial."""
    known, found = curves(fixed), []
    for line in records:
        curve = known.get((line["workload"], line["steps"], line["seed"]))
        if (
            line["trial"] is None
            or line["whole"]
            or line["steps"] != LONG
            or curve is None
            or line["exponent"] not in curve.losses
        ):
            continue
        trial = Trial.from_dict(line["trial"])
        with _numbers(**values):
            now = change(trial).interval(LONG).suggestion
        exponent = math.log2(now / WORKLOADS[line["workload"]].rate)
        found.append((curve.gap(curve.losses[line["exponent"]]), curve.at(exponent)))
    return found


def ablation(records: Sequence[Record], fixed: Sequence[Record]) -> str:
    heads = [
        "",
        "gap to the best run, mean",
        f"within {NEAR} %",
        "within 2 %",
        f"worse by over {NEAR} %",
        "worst",
    ]
    rows: list[list[Any]] = []
    for name, (change, values) in ROWS.items():
        pairs = outcomes(records, fixed, change, **values)
        if pairs:
            harms = [after - before for before, after in pairs]
            rows.append(
                [
                    name,
                    (f"{fmean(after for _, after in pairs):.1f} %"),
                    str(sum(after <= NEAR for _, after in pairs)),
                    str(sum(after <= 2 for _, after in pairs)),
                    (f"{sum(harm > NEAR for harm in harms)} of {len(pairs)}"),
                    f"{max(0.0, *harms):.1f} %",
                ]
            )
    return table(heads, rows)


def main() -> None:
    from .auto_report import FRESH

    records = [line for line in read(RESULTS) if line["workload"] in FRESH]
    print(ablation(records, read(fixed_rates.RESULTS)), end="")


if __name__ == "__main__":
    main()
