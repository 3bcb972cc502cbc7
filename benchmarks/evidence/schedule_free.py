"""AutoLR over FusedScheduleFreeAdamW beside fixed rates, from 1/32 to 32 times the best one.

    python -m benchmarks.evidence.schedule_free [--workloads mlp-friedman ...] [--steps 2000]
        [--jobs 2] [--quick] [--json FILE]

Rates are 2^exponent times 0.01. Held-out losses are those of the average, after ``eval()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

from torch import nn

import hdet

from ..tables import grouped
from ..tables import table as markdown
from . import fixed_rates
from .auto import controller_of, parts_of
from .experiment import Column, Experiment, Record
from .problems import Problem
from .training import Parts, train
from .workloads import WORKLOADS

RATE, FAR = 0.01, 5
"""The exponent by which a start is far away."""
LEVELS = {"fixed": "fixed rate", "trial": "AutoLR"}


def build(level: str, problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
    optimizer = hdet.FusedScheduleFreeAdamW(problem.groups(model), lr=rate)
    parts, _ = parts_of(problem, model, optimizer, None, controller_of(level, model), seed)

    def final() -> nn.Module:
        optimizer.eval()
        return model

    return replace(parts, final=final, resume=optimizer.train)


def run(workload: str, level: str, exponent: int, seed: int, steps: int) -> Record:
    problem = replace(WORKLOADS[workload].problem, steps=steps)
    outcome = train(problem, partial(build, level), RATE * 2.0**exponent, seed)
    return {**outcome, "untrained": fixed_rates.untrained(workload, seed)}


def table(records: Sequence[Record]) -> str:
    """Gaps to the best fixed rate, in percent of what that one learns."""
    rows = []
    for workload, lot in grouped(records, "workload").items():
        untrained = lot[0]["untrained"]
        ends = {
            (r["level"], r["exponent"]): fixed_rates.reached(r["validation"], untrained)
            for r in lot
        }
        best, place = min((end, place) for (level, place), end in ends.items() if level == "fixed")
        gaps = {key: 100 * (end - best) / (untrained - best) for key, end in ends.items()}
        for level, name in LEVELS.items():
            near = [gap for (of, e), gap in gaps.items() if of == level and abs(e - place) <= FAR]
            row = [gaps.get((level, place + off)) for off in (-FAR, 0, FAR)]
            cells = [
                "" if gap is None else f"{round(gap, 1) + 0.0:.1f} %"
                for gap in (*row, max(near), fmean(near))
            ]
            rows.append([workload, f"{RATE * 2.0**place:.2g}", name, *cells])
    far = 2**FAR
    starts = [f"from 1/{far}", "from the best", f"from {far} times"]
    return markdown(["workload", "best rate", "", *starts, "worst", "mean"], rows)


EXPERIMENT = Experiment(
    "schedule-free", __doc__, run,
    (
        Column("workload", ("mlp-friedman", "diffusion-digits"), ["mlp-friedman"], WORKLOADS),
        Column("level", tuple(LEVELS), tuple(LEVELS)),
        Column("exponent", range(-7, 8), [0]),
        Column("steps", (2000,), [100], option="steps"),
    ),
    table,
)  # fmt: skip

if __name__ == "__main__":
    EXPERIMENT.main()
