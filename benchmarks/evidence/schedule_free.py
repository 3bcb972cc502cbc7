"""AutoLR over FusedScheduleFreeAdamW beside fixed rates, from 1/32 to 32 times the best one.

    python -m benchmarks.evidence.schedule_free [--workloads mlp-friedman ...] [--steps 2000]

Rates are 2^exponent times 0.01. Held-out losses are those of the average, after ``eval()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

from torch import nn

import hdet

from ..tables import gap, grouped, percent, reached
from ..tables import table as markdown
from .experiment import Column, Experiment, Record
from .problems import Problem
from .training import Parts, search_of, train, untrained, with_ensemble
from .workloads import WORKLOADS

RATE, FAR = 0.01, 5
"""The exponent by which a start is far away."""
LEVELS = {"fixed": "fixed rate", "trial": "AutoLR"}


def build(level: str, problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
    optimizer = hdet.FusedScheduleFreeAdamW(problem.groups(model), lr=rate)
    search = search_of(level, model)
    parts, _ = with_ensemble(problem, model, optimizer, None, search, seed)

    def final() -> nn.Module:
        optimizer.eval()
        return model

    return replace(parts, final=final, resume=optimizer.train)


def run(workload: str, level: str, exponent: int, seed: int, steps: int) -> Record:
    chosen = WORKLOADS[workload]
    outcome = train(chosen.lasting(steps), partial(build, level), RATE * 2.0**exponent, seed)
    return {**outcome, "untrained": untrained(chosen.problem, seed)}


def table(records: Sequence[Record]) -> str:
    """Gaps to the best fixed rate, in percent of what that one learns."""
    rows = []
    for workload, lot in grouped(records, "workload").items():
        worst = lot[0]["untrained"]
        ends = {(r["level"], r["exponent"]): reached(r["validation"], worst) for r in lot}
        best, place = min((end, place) for (level, place), end in ends.items() if level == "fixed")
        gaps = {key: gap(end, best, worst) for key, end in ends.items()}
        for level, name in LEVELS.items():
            near = [one for (of, e), one in gaps.items() if of == level and abs(e - place) <= FAR]
            row = [gaps.get((level, place + off)) for off in (-FAR, 0, FAR)]
            shown = (*row, max(near), fmean(near))
            cells = ["" if one is None else percent(round(one, 1) + 0.0) for one in shown]
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
