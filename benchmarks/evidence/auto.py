"""AutoLR against the fixed rate of the same start, on every workload.

    python -m benchmarks.evidence.auto [--workloads llama-bytes ...] [--group development|...]
        [--levels trial free fixed] [--starts -4 -2 0 2 4] [--whole | --drawn 80]

Starts are exponents of 2 times the rate that people would write first. A search is over after 28
or 56 steps, and what follows is a run at a fixed rate. So by default a run ends with its search,
and its final loss is *read off* the curve of fixed rates of the workload
(benchmarks.evidence.fixed_rates), between whose points it is interpolated. ``--whole`` trains to
the end; ``--drawn N`` does that for N pairs of workload and start that a seed draws. On data that
is seen many times the lowest of 60 validation losses is recorded, too, which is the loss of the
best checkpoint; there ``--levels fixed`` trains at the fixed rate.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from hdet.trial.rule import Trial

from ..tables import gap, grouped, percent, reached
from ..tables import table as markdown
from . import fixed_rates, workloads
from .experiment import Column, Experiment, Record, Task, finite
from .problems import Batch, Problem
from .training import Parts, scheduled, search_of, train, untrained, with_ensemble
from .workloads import REPEATED, WORKLOADS

GROUPS = {
    name: getattr(workloads, name.upper().replace("-", "_"))
    for name in (
        "development", "test", "repeated", "not-to-zero", "from-zero", "changing", "misleading"
    )
}  # fmt: skip
STARTS = (-4, -2, 0, 2, 4)
VALIDATIONS = 60
SEED_OF_DRAW = 41


class Searched(Exception):
    """The search is over, and nobody wants the rest of the run."""


def run(workload: str, exponent: int, seed: int, steps: int, level: str, whole: bool) -> Record:
    chosen, best, searches = WORKLOADS[workload], math.inf, list[Any]()

    def build(problem: Problem, model: nn.Module, exponent: float, seed: int) -> Parts:
        optimizer = chosen.optimizer_for(model, exponent)
        scheduler, search = chosen.scheduler_for(optimizer, steps), search_of(level, model)
        searches.append(search)
        if search is None:
            return scheduled(problem, model, optimizer, scheduler)
        parts, _ = with_ensemble(problem, model, optimizer, scheduler, search, seed)

        def after(batch: Batch) -> None:
            parts.after(batch)
            if search.done and not whole:
                raise Searched

        return replace(parts, after=after, crashes=(*parts.crashes, Searched))

    def watch(step: int, validate: Any) -> None:
        nonlocal best
        if whole and workload in REPEATED and step and step % (steps // VALIDATIONS) == 0:
            loss = validate()
            best = min(best, loss if math.isfinite(loss) else math.inf)

    loss = train(chosen.lasting(steps), build, exponent, seed, watch)["validation"]
    [search], rate = searches, chosen.rate * 2.0**exponent
    found = search and search.interval
    nothing = {"factor": 1.0, "low": None, "high": None, "reason": ""}
    return {
        "rate": rate,
        "validation": loss,
        "best": finite(min(best, math.inf if loss is None else loss)),
        "untrained": untrained(chosen.problem, seed),
        **(_interval(found, rate) if found else nothing),
        "cost": search.cost if search else 0.0,
        "trial": _short(found.to_dict()["trial"]) if found and level != "free" else None,
    }


def _interval(found: Any, rate: float) -> Record:
    return {
        "factor": found.suggestion / rate,
        "low": found.low or None,
        "high": finite(found.high),
        "reason": found.reason,
    }


def _short(trial: Any) -> Any:
    """With six digits, for benchmarks.evidence.ablation."""
    if isinstance(trial, dict):
        return {name: _short(value) for name, value in trial.items()}
    if isinstance(trial, (list, tuple)):
        return [_short(value) for value in trial]
    return float(f"{trial:.6g}") if isinstance(trial, float) else trial


def of_length(record: Record, steps: int) -> Record:
    """What the same trial says of a run of another length: its arms would be the same ones."""
    found = Trial.from_dict(record["trial"]).interval(steps)
    return {**record, "steps": steps, **_interval(found, record["rate"])}


# -- how far a run ends from the best one ----------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Final losses of one workload and length at fixed rates."""

    losses: dict[float, float]
    """By exponent, rising."""
    untrained: float

    def gap(self, loss: float | None) -> float:
        """To the best fixed rate, in percent of what that one learns."""
        return gap(loss, min(self.losses.values()), self.untrained)

    def at(self, exponent: float) -> float:
        """The gap at a rate: interpolated, beyond the ends that of the nearest one."""
        return self.gap(float(np.interp(exponent, [*self.losses], [*self.losses.values()])))


def curves(fixed: Sequence[Record]) -> dict[tuple[str, int, int], Curve]:
    """By workload, steps and seed; those of at least four rates."""
    found = {}
    for cell, lines in grouped(fixed, "workload", "steps", "seed").items():
        losses = {
            line["exponent"]: reached(line["validation"], line["untrained"])
            for line in sorted(lines, key=lambda line: line["exponent"])
        }
        if len(losses) >= 4:
            found[cell] = Curve(losses, lines[-1]["untrained"])
    return found


@dataclass(frozen=True)
class Compared:
    """A run beside the fixed rate of its start."""

    record: Record
    fixed: float
    """The fixed rate's gap to the best run, in percent."""
    read_off: float
    """AutoLR's, read off the fixed rates' curve."""
    real: float | None
    """AutoLR's, of a run to the end; None: there was none."""
    holds: bool
    """Is a rate of the curve within 0.5 % of the best in the interval?"""

    @property
    def auto(self) -> float:
        """The real gap, where there is one."""
        return self.read_off if self.real is None else self.real


NEAR = 0.5
"""Percent of what the best run learns."""


def summary(pairs: Sequence[tuple[float, float]]) -> list[str]:
    """Of (gap with the fixed rate, gap with AutoLR), in percent: mean gap, within `NEAR` and 2 %,
    worse by over `NEAR`, worst."""
    fixed, auto = np.array(pairs).T
    harms = auto - fixed
    return [
        f"{auto.mean():.1f}",
        *(str((auto <= within).sum()) for within in (NEAR, 2)),
        str((harms > NEAR).sum()),
        f"{max(0.0, harms.max()):.1f}",
    ]


def compared(records: Sequence[Record], fixed: Sequence[Record]) -> list[Compared]:
    """In the order of the workloads."""
    found, known = dict[Any, Compared](), curves(fixed)
    order = list(WORKLOADS)
    for line in sorted(records, key=lambda line: line["whole"]):
        curve = known.get((line["workload"], line["steps"], line["seed"]))
        if curve is None or line["exponent"] not in curve.losses or line["level"] == "fixed":
            continue
        usual = WORKLOADS[line["workload"]].rate
        low = math.log2((line["low"] or 1e-30) / usual)
        high = math.log2((line["high"] or 1e30) / usual)
        near = [e for e, loss in curve.losses.items() if curve.gap(loss) <= NEAR]
        cell = (line["workload"], line["steps"], line["seed"], line["level"], line["exponent"])
        found[cell] = Compared(
            line,
            curve.gap(curve.losses[line["exponent"]]),
            curve.at(line["exponent"] + math.log2(line["factor"])),
            curve.gap(line["validation"]) if line["whole"] else None,
            any(low - 0.01 <= e <= high + 0.01 for e in near),
        )
    return [
        found[cell] for cell in sorted(found, key=lambda cell: (order.index(cell[0]), *cell[1:]))
    ]


def table(records: Sequence[Record]) -> str:
    """A line for each run."""
    heads = ["workload", "steps", "start", "level", "fixed", "read off", "real", "factor", "reason"]
    rows = []
    for one in compared(records, fixed_rates.EXPERIMENT.read()):
        line, real = one.record, "" if one.real is None else percent(one.real)
        cells = [line["workload"], line["steps"], f"2^{line['exponent']}", line["level"]]
        gaps = [percent(one.fixed), percent(one.read_off), real]
        rows.append([*cells, *gaps, f"{line['factor']:.3g}", line["reason"]])
    return markdown(heads, rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--group", choices=GROUPS, help="in the place of workloads")
    parser.add_argument("--whole", action="store_true", help="train to the end")
    whole = "N whole runs that a seed draws"
    parser.add_argument("--drawn", type=int, default=0, metavar="N", help=whole)


def plan(options: argparse.Namespace) -> list[Task]:
    if options.group:
        options.workloads = list(GROUPS[options.group])
    grid = [{**task, "whole": options.whole} for task in EXPERIMENT.grid(options)]
    if options.drawn:
        drawn = random.Random(SEED_OF_DRAW).sample(grid, min(options.drawn, len(grid)))
        grid = [{**task, "whole": True} for task in drawn]
    return grid


def drawn() -> set[Any]:
    """Keys of the runs to the end that a seed has drawn."""
    starts = map(str, (-6, *STARTS, 6))
    options = EXPERIMENT.parsed(["--drawn", "80", "--starts", *starts])
    return set(map(EXPERIMENT.key, plan(options)))


EXPERIMENT = Experiment(
    "auto", __doc__, run,
    (
        Column("steps", (10_000,), [1000], option="lengths"),
        Column("workload", list(GROUPS["development"]), ["llama-bytes"], WORKLOADS),
        Column("exponent", STARTS, [-4, 0], option="starts"),
        Column("level", ("trial", "free"), ["free"], ("trial", "free", "fixed")),
    ),
    table,
    same=("workload", "exponent", "seed", "steps", "level", "whole"),
    plan=plan,
    add_options=add_options,
)  # fmt: skip

if __name__ == "__main__":
    EXPERIMENT.main()
