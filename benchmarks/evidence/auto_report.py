"""The tables of the evidence and of docs/results.md, from the lines in the repository.

python -m benchmarks.evidence.auto_report [--write]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any

from ..harness import parser_of
from ..tables import gap, grouped, percent, reached, show, spaced, table
from . import (
    auto,
    averages,
    first_tries,
    fixed_rates,
    hero,
    horizon,
    paper,
    quality,
    ranks,
    rules,
    scoreboard,
    seconds,
    votes,
)  # fmt: skip
from .ablation import FRESH, LONG, OFTEN, ablation, halves, trials_of
from .auto import NEAR, Compared, compared, drawn, of_length
from .experiment import Record
from .workloads import CHANGING, FIELDS, FROM_ZERO, MISLEADING, NOT_TO_ZERO, TEST, WORKLOADS

PAGES = ("docs/evidence/autolr.md", "docs/evidence/replicas.md", "docs/results.md")
OTHERS: dict[str, Any] = {
    "Main job": quality, "First tries": first_tries, "More ranks": ranks, "Time": seconds,
    "Horizon": horizon, "Paper": paper, "Averages": averages, "Votes": votes,
    "Rules": rules,
}  # fmt: skip
OTHER = (1500, 30_000, 100_000)
"""Lengths of which the same trials say something, too."""
STARTS = {
    -6: "64 times too low",
    -4: "16 times too low",
    -2: "4 times too low",
    0: "the usual rate",
    2: "4 times the usual rate",
    4: "16 times",
    6: "64 times",
}
LEVELS = ("free", "trial")


def _level(runs: Sequence[Compared], level: str) -> list[Compared]:
    return [run for run in runs if run.record["level"] == level]


def counted(kinds: Mapping[str, Sequence[Compared]]) -> str:
    """A line for each kind of run: the fixed rates, without a closure (free), and with a trial."""
    heads = ["", "runs", "gap, %: fixed rate", "free", "trial", "within 2 %: fixed rate", "free",
             "trial", f"worse by over {NEAR} %: free", "trial", "worst, %",
             "interval holds a good rate"]  # fmt: skip
    rows = []
    for name, runs in kinds.items():
        free, trial = (_level(runs, level) for level in LEVELS)
        if most := max(free, trial, key=len):
            of_auto = ([run.auto for run in of] for of in (free, trial))
            gaps = [[run.fixed for run in most], *of_auto]
            harms = [[run.auto - run.fixed for run in of] for of in (free, trial)]
            rows.append([
                name, len(most), *(f"{fmean(of):.1f}" if of else "" for of in gaps),
                *(sum(gap <= 2 for gap in of) if of else "" for of in gaps),
                *(sum(harm > NEAR for harm in of) if of else "" for of in harms),
                f"{max(0.0, *harms[0], *harms[1]):.1f}", sum(run.holds for run in trial),
            ])  # fmt: skip
    return table(heads, rows)


def real_and_read_off(runs: Sequence[Compared]) -> str:
    """Runs to the end beside what their curve says."""
    rows = []
    for level in LEVELS:
        these = [run for run in _level(runs, level) if run.real is not None]
        if these:
            ends = ("fixed", "read_off", "auto")
            gaps = (fmean(getattr(run, end) for run in these) for end in ends)
            differences = sorted(abs(run.auto - run.read_off) for run in these)
            worse = sum(run.auto - run.fixed > NEAR for run in these)
            means = [*map(percent, gaps), percent(differences[len(differences) // 2])]
            rows.append([f"AutoLR, {level}", len(these), *means, worse])
    heads = ["", "runs", "fixed rate", "read off", "real", "median difference",
             "worse in real runs"]  # fmt: skip
    return table(heads, rows)


def harmed(runs: Sequence[Compared], by: float) -> str:
    """Every run that ends worse than its fixed rate by more than that."""
    worse = [run for run in runs if run.auto - run.fixed > by]
    heads = ["workload", "steps", "started at", "level", "fixed", "AutoLR", "factor", "real"]
    rows = []
    for run in sorted(worse, key=lambda run: run.fixed - run.auto):
        line, gaps = run.record, [percent(run.fixed), percent(run.auto)]
        which = [line["workload"], spaced(line["steps"]), STARTS.get(line["exponent"], "")]
        real = "read off" if run.real is None else "real"
        rows.append([*which, line["level"], *gaps, f"{line['factor']:.2g}", real])
    return table(heads, rows)


def repeated(records: Sequence[Record]) -> str:
    """Data that is seen many times: mean gaps by the best checkpoint, and by the last loss."""
    lines = [line for line in records if line["whole"] and line["workload"] in OFTEN]
    levels, by = ("fixed", *LEVELS), ("best", "validation")
    cells = [{b: _gaps(own, b) for b in by} for own in grouped(lines, "workload").values()]
    rows = []
    for start, name in STARTS.items():
        whole = [of for of in cells if all((start, level) in of["best"] for level in levels)]
        if whole:
            pairs = product(by, levels)
            gaps = {(b, level): [of[b][start, level] for of in whole] for b, level in pairs}
            means = [percent(fmean(values)) for values in gaps.values()]
            pairs = zip(gaps["best", "trial"], gaps["best", "fixed"], strict=True)
            worst = percent(max(0.0, *(a - b for a, b in pairs)))
            rows.append([name, len(whole), *means[:3], worst, *means[3:]])
    heads = ["started at", "workloads", "best checkpoint: fixed", "free", "trial", "worst",
             "last loss: fixed", "free", "trial"]  # fmt: skip
    return table(heads, rows)


def _gaps(lines: Sequence[Record], by: str) -> dict[tuple[int, str], float]:
    """By start and level."""
    untrained = lines[0]["untrained"]
    ends = {(one["exponent"], one["level"]): reached(one[by], one["untrained"]) for one in lines}
    best = min(ends.values())
    return {cell: gap(loss, best, untrained) for cell, loss in ends.items()}


def by_workload(runs: Sequence[Compared]) -> str:
    """A line for each workload: gaps with the fixed rate and with the trial, by start."""
    cells = {(run.record["workload"], run.record["exponent"]): run for run in _level(runs, "trial")}
    starts = [start for start in STARTS if -4 <= start <= 4]
    rows = []
    for workload in dict.fromkeys(cell[0] for cell in cells):
        of = [cells.get((workload, start)) for start in starts]
        shown = ("" if one is None else f"{one.fixed:.1f} % → {one.auto:.1f} %" for one in of)
        rows.append([workload, *shown])
    return table(["workload", *(STARTS[start] for start in starts)], rows)


def workloads() -> str:
    """What each of them is, how it is trained, and its usual rate."""
    heads = ["workload", "field", "what", "optimizer", "schedule", "usual rate", "batch"]
    rows = ([name, of.field, of.what, of.optimizer, of.schedule, f"{of.rate:g}",
             of.problem.batch_size] for name, of in WORKLOADS.items())  # fmt: skip
    return table(heads, rows)


def report() -> dict[str, str]:
    """Tables by name."""
    records, fixed = auto.EXPERIMENT.read(), fixed_rates.EXPERIMENT.read()
    long_trials = (x for x in trials_of(records) if x["steps"] == LONG)
    others = [of_length(line, steps) for line in long_trials for steps in OTHER]
    runs = compared([*records, *others], fixed)

    def of(group: object, among: Sequence[Compared] = runs) -> list[Compared]:
        return [run for run in among if run.record["workload"] in group]  # type: ignore[operator]

    def that(has: Callable[[Record], bool], among: Sequence[Compared]) -> list[Compared]:
        return [run for run in among if has(run.record)]

    fresh, test, chosen = of(FRESH), of(TEST), drawn()
    long = that(lambda line: line["steps"] == LONG, fresh)
    groups = {"schedules that do not fall to zero": NOT_TO_ZERO, "warm-ups from 0": FROM_ZERO,
              "data that gets harder": CHANGING, "misleading first steps": MISLEADING}  # fmt: skip
    kinds = {"10 000 steps": long}
    for start, name in STARTS.items():
        kinds[name] = that(lambda line, s=start: line["exponent"] == s, long)  # type: ignore[misc]
    for steps in OTHER:
        kinds[f"{spaced(steps)} steps"] = that(lambda line, s=steps: line["steps"] == s, fresh)
    fields = {
        field: [run for run in long if WORKLOADS[run.record["workload"]].field == field]
        for field in FIELDS
    }
    return {
        "In all": counted({**kinds, **{name: of(group) for name, group in groups.items()}}),
        "By field": counted(fields),
        "Read off and real": real_and_read_off(
            that(lambda x: auto.EXPERIMENT.key(x) in chosen, runs)
        ),
        "Worse": harmed([run for run in runs if run.record["workload"] not in {*OFTEN, *TEST}], 2),
        "Test set": counted({"test set": test}) + "\n" + harmed(test, NEAR),
        "Examples that are seen many times": repeated(records),
        "Conditions": ablation(records, fixed),
        "Halves": halves(records, fixed),
        "By workload": by_workload(long),
        "Workloads": workloads(),
        **{
            name: module.EXPERIMENT.table(module.EXPERIMENT.read())
            for name, module in OTHERS.items()
        },
        **{
            f"Scoreboard: {spaced(steps)} steps": scoreboard.table(lot)
            for steps, lot in grouped(scoreboard.EXPERIMENT.read(), "steps").items()
        },
        **{
            f"Other methods: {problem}": found
            for problem, found in hero.overviews(hero.EXPERIMENT.read()).items()
        },
    }


if __name__ == "__main__":
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--write", action="store_true", help=f"into {', '.join(PAGES)}")
    show(report(), PAGES if parser.parse_args().write else ())
