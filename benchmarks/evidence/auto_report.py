"""The tables of AutoLR's evidence, from the lines in the repository.

    python -m benchmarks.evidence.auto_report [--write]

``--write`` puts them into docs/evidence/autolr.md and docs/results.md, each between two comments
that have its name.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from .. import first_tries
from . import fixed_rates, ranks, seconds
from .ablation import ablation
from .auto import NEAR, RESULTS, Compared, compared, drawn, key, of_length
from .report.tables import table, written
from .runs import Record, read, spaced
from .workloads import (
    CHANGING,
    DEVELOPMENT,
    FIELDS,
    FROM_ZERO,
    MISLEADING,
    NOT_TO_ZERO,
    REPEATED,
    TEST,
    WORKLOADS,
)  # fmt: skip

PAGES = ("docs/evidence/autolr.md", "docs/results.md")
LONG = 10_000
OTHER = (1500, 30_000, 100_000)
"""Lengths of which the same trials say something, too."""
OFTEN = {
    *REPEATED, "matrix-factorization-ratings", "embedding-mlp-clicks", "transformer-grammar",
}  # fmt: skip
"""Examples are seen so often that runs overfit at good rates, too."""
FRESH = {name: one for name, one in DEVELOPMENT.items() if name not in OFTEN}
STARTS = {
    -6: ("64 times too low"),
    -4: ("16 times too low"),
    -2: ("4 times too low"),
    0: ("the usual rate"),
    2: "4 times the usual rate",
    4: "16 times",
    6: "64 times",
}
LEVELS = ("free", "trial")


def counted(kinds: Mapping[str, Sequence[Compared]]) -> str:
    """A line for each kind of run and level, with the fixed rates of the same runs."""
    heads = ["runs", "", "gap to the best run, mean", f"within {NEAR} %", "within 2 %",
             f"worse than the fixed rate by over {NEAR} %", "worst",
             "interval holds a good rate"]  # fmt: skip
    rows = []
    for name, runs in kinds.items():
        by_level = {
            level: [run for run in runs if run.record["level"] == level] for level in LEVELS
        }
        most = max(by_level.values(), key=len)
        if not most:
            continue
        gaps = [run.fixed for run in most]
        rows.append(
            [
                name,
                f"fixed rate, {len(most)} runs",
                f"{fmean(gaps):.1f} %",
                *(str(sum(gap <= within for gap in gaps)) for within in (NEAR, 2)),
                "",
                "",
                "",
            ]
        )
        for level, these in by_level.items():
            if these:
                harms = [run.auto - run.fixed for run in these]
                rows.append(
                    ["", f"AutoLR, {level}", f"{fmean(run.auto for run in these):.1f} %",
                     *(str(sum(run.auto <= within for run in these)) for within in (NEAR, 2)),
                     f"{sum(harm > NEAR for harm in harms)} of {len(these)}",
                     f"{max(0.0, *harms):.1f} %", f"{sum(run.holds for run in these)}"]
                )  # fmt: skip
    return table(heads, rows)


def real_and_read_off(runs: Sequence[Compared]) -> str:
    """Runs to the end beside what their curve says, and the largest differences."""
    both = [run for run in runs if run.real is not None]
    if not both:
        return "No run to the end is in the results yet.\n"
    rows = []
    for level in LEVELS:
        these = [run for run in both if run.record["level"] == level]
        if these:
            differences = sorted(abs(run.auto - run.read_off) for run in these)
            rows.append(
                [
                    f"AutoLR, {level}",
                    str(len(these)),
                    (f"{fmean(r.fixed for r in these):.1f} %"),
                    f"{fmean(r.read_off for r in these):.1f} %",
                    f"{fmean(r.auto for r in these):.1f} %",
                    f"{differences[len(differences) // 2]:.1f} %",
                    f"{sum(r.auto - r.fixed > NEAR for r in these)}",
                ]
            )
    heads = [
        "",
        "runs",
        "fixed rate",
        "read off",
        "real",
        "median difference",
        "worse in real runs",
    ]
    return table(heads, rows)


def harmed(runs: Sequence[Compared]) -> str:
    """Every run that ends worse than its fixed rate."""
    worse = sorted(
        (run for run in runs if run.auto - run.fixed > NEAR), key=lambda run: run.fixed - run.auto
    )
    if not worse:
        return "None.\n"
    heads = ["workload", "steps", "started at", "level", "fixed", "AutoLR", "factor", "real"]
    return table(
        heads,
        [
            [
                run.record["workload"],
                spaced(run.record["steps"]),
                STARTS.get(run.record["exponent"], ""),
                run.record["level"],
                f"{run.fixed:.1f} %",
                f"{run.auto:.1f} %",
                f"{run.record['factor']:.2g}",
                "read off" if run.real is None else "real",
            ]
            for run in worse
        ],
    )


def repeated(records: Sequence[Record]) -> str:
    """Data that is seen many times: mean gaps by the best checkpoint, and by the last loss."""
    lines = [line for line in records if line["whole"] and line["workload"] in OFTEN]
    levels, cells = ("fixed", *LEVELS), dict[tuple[str, str], dict[tuple[int, str], float]]()
    for workload in {line["workload"] for line in lines}:
        these = [line for line in lines if line["workload"] == workload]
        for by in ("best", "validation"):
            cells[workload, by] = _gaps(these, by)
    rows = []
    for start, name in STARTS.items():
        complete = {
            workload
            for workload, by in cells
            if by == "best" and all((start, level) in cells[workload, by] for level in levels)
        }
        if not complete:
            continue
        rows.append([name, str(len(complete))])
        for by in ("best", "validation"):
            gaps = {level: [cells[w, by][start, level] for w in complete] for level in levels}
            rows[-1] += [f"{fmean(gaps[level]):.1f} %" for level in levels]
            if by == "best":
                harms = [a - b for a, b in zip(gaps["trial"], gaps["fixed"], strict=True)]
                rows[-1].append(f"{max(0.0, *harms):.1f} %")
    heads = ["started at", "workloads", "best checkpoint: fixed", "free", "trial", "worst",
             "last loss: fixed", "free", "trial"]  # fmt: skip
    return table(heads, rows) if rows else "Nothing is in the results yet.\n"


def _gaps(lines: Sequence[Record], by: str) -> dict[tuple[int, str], float]:
    """By start and level."""
    reached = {
        (line["exponent"], line["level"]): min(
            line[by] if line[by] is not None else math.inf, line["untrained"]
        )
        for line in lines
    }
    best, untrained = min(reached.values()), lines[0]["untrained"]
    return {cell: 100 * (loss - best) / (untrained - best) for cell, loss in reached.items()}


def by_workload(runs: Sequence[Compared]) -> str:
    """A line for each workload: gaps with the fixed rate and with the trial, by start."""
    cells = {(r.record["workload"], r.record["exponent"]): r for r in runs
             if r.record["level"] == "trial" and r.record["steps"] == LONG}  # fmt: skip
    starts = [start for start in STARTS if -4 <= start <= 4]
    rows = []
    for workload in dict.fromkeys(cell[0] for cell in cells):
        of = [cells.get((workload, start)) for start in starts]
        shown = ["" if one is None else f"{one.fixed:.1f} % → {one.auto:.1f} %" for one in of]
        rows.append([workload, *shown])
    return table(["workload", *(STARTS[start] for start in starts)], rows)


def workloads() -> str:
    """What each of them is, how it is trained, and its usual rate."""
    heads = ["workload", "field", "what", "optimizer", "schedule", "usual rate", "batch"]
    return table(
        heads,
        [
            [
                name,
                one.field,
                one.what,
                one.optimizer,
                one.schedule,
                f"{one.rate:g}",
                str(one.problem.batch_size),
            ]
            for name, one in WORKLOADS.items()
        ],
    )


def report(records: Sequence[Record], fixed: Sequence[Record]) -> dict[str, str]:
    """Tables by name."""
    trials = [
        line
        for line in records
        if line["trial"] is not None and not line["whole"] and line["steps"] == LONG
    ]
    runs = compared(
        [*records, *(of_length(line, steps) for line in trials for steps in OTHER)], fixed
    )
    fresh = [run for run in runs if run.record["workload"] in FRESH]

    def those(of: Callable[[Compared], bool], among: Sequence[Compared] = fresh) -> list[Compared]:
        return [run for run in among if of(run)]

    long, chosen = those(lambda run: run.record["steps"] == LONG), drawn()
    groups = {"schedules that do not fall to zero": NOT_TO_ZERO, "warm-ups from 0": FROM_ZERO,
              "data that gets harder": CHANGING, "misleading first steps": MISLEADING}  # fmt: skip
    return {
        "In all": counted(
            {
                "10 000 steps": long,
                **{
                    name: those(lambda run, s=start: run.record["exponent"] == s, long)
                    for start, name in STARTS.items()
                },
                **{
                    (f"{spaced(steps)} steps"): those(lambda run, s=steps: run.record["steps"] == s)
                    for steps in OTHER
                },
                **{
                    name: those(lambda run, g=group: run.record["workload"] in g, runs)
                    for name, group in groups.items()
                },
            }
        ),
        "By field": counted(
            {
                field: those(
                    lambda run, f=field: WORKLOADS[run.record["workload"]].field == f, long
                )
                for field in FIELDS
            }
        ),
        "Read off and real": real_and_read_off(those(lambda run: key(run.record) in chosen, runs)),
        "Worse": harmed(those(lambda run: run.record["workload"] not in OFTEN, runs)),
        "Test set": counted({"test set": those(lambda run: run.record["workload"] in TEST, runs)})
        + "\n"
        + harmed(those(lambda run: run.record["workload"] in TEST, runs)),
        "Examples that are seen many times": repeated(records),
        "Conditions": ablation([line for line in records if line["workload"] in FRESH], fixed),
        "First tries": "\n".join(first_tries.table(read(first_tries.RESULTS))) + "\n",
        "By workload": by_workload(long),
        "More ranks": ranks.table(read(ranks.RESULTS)),
        "Time": seconds.table(read(seconds.RESULTS)),
        "Workloads": workloads(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    found = report(read(RESULTS), read(fixed_rates.RESULTS))
    for path in map(Path, PAGES if options.write else ()):
        path.write_text(written(path.read_text(encoding="utf-8"), found), encoding="utf-8")
    print("\n".join(f"## {name}\n\n{one}" for name, one in found.items()), end="")


if __name__ == "__main__":
    main()
