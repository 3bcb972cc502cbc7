"""All that has been measured of AutoLR, from the lines in the repository: the tables of docs/evidence/autolr.md and of docs/results.md.

    python -m benchmarks.evidence.auto_report [--auto FILE] [--fixed FILE] [--write]

`--write` puts them into the pages, each between two comments that have its name.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hdet.core.rules.trial.costs import ARMS, CHECK, Costs

from . import fixed_rates, ranks, seconds
from .auto import HARM, RESULTS, Compared, compared, counted, each
from .report.tables import written
from .runs import read, spaced
from .workloads import DEVELOPMENT, HARDER, HIGH, JUDGED, MISLEADING, REPEATED, TEST, WORKLOADS, ZERO

STARTS = (-4, -2, 0, 2, 4)
FAR = (-6, *STARTS, 6)
LONG = 10_000
PAGES = ("docs/evidence/autolr.md", "docs/results.md")

Chosen = Callable[[Compared], bool]


def _of(half: Mapping[str, object], steps: int | None = None, first: bool | None = None, start: int | None = None) -> Chosen:
    """Runs of these workloads; of this length; with the first seed, or with another; from this start."""
    return lambda run: (
        run.record["workload"] in half
        and steps in (None, run.record["steps"])
        and first in (None, run.record["seed"] == 0)
        and start in (None, run.record["exponent"])
    )


USUAL = {**DEVELOPMENT, **TEST}
SECTIONS: dict[str, Chosen] = {
    "Development half": _of(DEVELOPMENT, LONG, first=True),
    "Test half": _of(TEST, LONG, first=True),
    "Other seeds": _of(USUAL, LONG, first=False),
    "30 000 steps": _of(USUAL, 30_000),
    "100 000 steps": _of(USUAL, 100_000),
    "Schedules that do not fall to zero": _of(HIGH),
    "Examples that come again": _of(REPEATED),
    "A judge": _of(JUDGED),
    "Data that gets harder": _of(HARDER),
    "Warm-ups that begin at 0": _of(ZERO),
    "Blocks, and a loss that rises at first": _of(MISLEADING),
}
COUNTED: dict[str, Chosen] = {
    "all": lambda run: True,
    "the test half": _of(TEST),
    f"fixed within {HARM} %": lambda run: run.fixed <= HARM,
    **{f"from 2^{start}": _of(USUAL, start=start) for start in FAR},
    **{f"{spaced(steps)} steps": _of(USUAL, steps) for steps in (LONG, 30_000, 100_000)},
    "schedules that stay high": _of(HIGH),
    "examples that come again": _of(REPEATED),
    "examples that come again, with a judge": _of(JUDGED),
    "data that gets harder": _of(HARDER),
    "warm-ups that begin at 0": _of(ZERO),
    "blocks, and a loss that rises at first": _of(MISLEADING),
}


def sections(runs: Sequence[Compared]) -> dict[str, str]:
    """By what they are of: how many runs are well, and all of them, folded. None of what has not been run."""
    chosen = {name: [run for run in runs if of(run)] for name, of in SECTIONS.items()}
    return {
        name: f'{counted({"these": these})}\n<details markdown="1"><summary>Every run</summary>\n\n{each(these)}\n</details>\n'
        for name, these in chosen.items()
        if these
    }


def by_workload(runs: Sequence[Compared]) -> str:
    """A line for each workload and length: missing with the fixed rate, and with AutoLR, from each start. First seeds."""
    found = {(run.record["workload"], run.record["steps"], run.record["exponent"]): run for run in runs if run.record["seed"] == 0}
    lines = ["| workload | " + " | ".join(f"from 2^{start}" for start in STARTS) + " |", "|---" * (1 + len(STARTS)) + "|"]
    for workload in USUAL:
        for steps in sorted({cell[1] for cell in found if cell[0] == workload}):
            name = workload if steps == LONG else f"{workload}, {spaced(steps)} steps"
            marked = f"*test half:* {name}" if workload in TEST else name
            cells = [found.get((workload, steps, start)) for start in STARTS]
            if any(cells):
                lines.append(f"| {marked} | " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(lines) + "\n"


def _cell(run: Compared | None) -> str:
    if run is None:
        return ""
    return f"{run.fixed:.1f} %, kept" if run.record["kept"] else f"{run.fixed:.1f} % → {run.auto:.1f} %"


def in_all(runs: Sequence[Compared]) -> str:
    """Counts of all runs, of the test half, and of each start on falling schedules."""
    chosen = {name: [run for run in runs if of(run)] for name, of in COUNTED.items()}
    return counted({name: these for name, these in chosen.items() if these})


def longer() -> str:
    """What the budget affords of a run that nobody has trained here: steps of the scan, of the check, and both in percent of the run."""
    lines = ["| steps of the run | of the scan | of the check | compute |", "|---|---|---|---|"]
    for total in (100_000, 300_000, 1_000_000):
        costs, part = Costs(0.03, total), 1 - CHECK
        scan = costs.steps(scan=True, anew=False, arms=ARMS, spent=0.0, left=total, pace=1.0)
        spent = costs.trial(ARMS, scan, from_first=True)
        check = costs.steps(scan=False, anew=False, arms=ARMS, spent=spent, left=int(part * total), pace=1.0)
        spent += costs.trial(ARMS, check, from_first=False)
        lines.append(f"| {spaced(total)} | {spaced(scan)} | {spaced(check)} | {100 * spent / total:.1f} % |")
    return "\n".join(lines) + "\n"


def workloads() -> str:
    """What each of them is, how it is trained, and its usual rate."""
    lines = ["| workload | what | optimizer | schedule | usual rate | examples a step |", "|---" * 6 + "|"]
    for name, one in WORKLOADS.items():
        marked = f"*test half:* {name}" if name in TEST or name in JUDGED else name
        lines.append(f"| {marked} | {one.what} | {one.optimizer} | {one.schedule} | {one.rate:g} | {one.problem.batch_size} |")
    return "\n".join(lines) + "\n"


def report(runs: Sequence[Compared]) -> dict[str, str]:
    """Tables by name."""
    tables = {
        "By workload": by_workload(runs),
        "In all": in_all(runs),
        "More ranks": ranks.table(read(ranks.RESULTS)),
        "Longer runs": longer(),
        "Workloads": workloads(),
        "Time": seconds.table(read(seconds.RESULTS)),
    }
    return {**sections(runs), **tables}


def of_files(auto: str = RESULTS, fixed: str = fixed_rates.RESULTS) -> list[Compared]:
    return compared(read(auto), read(fixed))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--auto", default=RESULTS, metavar="FILE")
    parser.add_argument("--fixed", default=fixed_rates.RESULTS, metavar="FILE")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    tables = report(of_files(options.auto, options.fixed))
    for path in map(Path, PAGES if options.write else ()):
        path.write_text(written(path.read_text(encoding="utf-8"), tables), encoding="utf-8")
    print("\n".join(f"## {name}\n\n{table}" for name, table in tables.items()), end="")


if __name__ == "__main__":
    main()
