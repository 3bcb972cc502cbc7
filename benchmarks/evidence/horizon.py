"""The horizon: how long must a cycle be, and at which weights must replicas be scored, for the
probe to find the rate of the whole run?

    python -m benchmarks.evidence.horizon [--problems cnn-digits ...] [--exponents -4 0 4]
        [--intervals 0.002 ... 0.1] [--seeds 3] [--jobs 2] [--quick] [--json FILE]

Four co-resident replicas under a ProbeController, cycles of 0.2 % to 10 % of the run; replicas are
scored at the average of their weights over the cycle, or greedily at their last weights. All else
is as in benchmarks.evidence.hero, which has found the best rates.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from torch import nn

import hdet
from hdet.controllers.probe_rule import END

from ..tables import grouped, mean, table
from . import hero
from .experiment import Column, Experiment, Record, Task
from .peers import wsd
from .problems import PROBLEMS, Problem
from .replicated import probe, replicated
from .training import Parts, train

AVERAGED, LAST, FIXED = "averaged", "last", "fixed"
NAMES = {AVERAGED: "cycle-averaged weights", LAST: "last weights (greedy)", FIXED: "fixed schedule"}
SIGNIFICANT = 2.0


def run(
    problem: str, method: str, interval: float, exponent: int, rate: float, seed: int, steps: int
) -> Record:
    """``interval``: part of the run that a cycle takes; 0 for the fixed schedule."""
    controllers: list[Corrected] = []
    length = max(1, round(interval * steps))

    def build(problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
        def controller(probed: list[int]) -> hdet.ProbeController:
            # sampled once a cycle is sampled at its end
            every = 1 if method == AVERAGED else length
            settings = {"kind": Corrected, "average_every": every}
            controllers.append(probe(problem, model, seed, probed, length, **settings))
            return controllers[0]

        return replicated(problem, model, rate, seed, controller, interval=length)

    chosen = wsd if method == FIXED else build
    outcome = train(replace(PROBLEMS[problem], steps=steps), chosen, rate, seed)
    return {
        **outcome,
        "correction": controllers[0].correction if controllers else 1.0,
        "votes": controllers[0].votes if controllers else [],
        "untrained": hero.untrained(problem, seed),
    }


class Corrected(hdet.ProbeController):
    """The controller as it is; keeps what the schedule has been multiplied by, and each t that
    counted, near the schedule's peak."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.correction = 1.0
        self.votes: list[float] = []

    def decide(self, evidence: hdet.Evidence) -> list[hdet.Decision]:
        decisions = super().decide(evidence)
        self.correction = evidence.corrections[0] * decisions[0].factor
        is_near_peak = self.warm[0] and self.phase[0] >= END
        if is_near_peak and decisions[0].t is not None:
            self.votes.append(round(decisions[0].t, 2))
        return decisions


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    """The fixed schedule has no interval."""
    known = hero.EXPERIMENT.read()
    for task in EXPERIMENT.tasks(options):
        if (task["method"] == FIXED) == (task["interval"] == 0):
            problem = PROBLEMS[task["problem"]]
            best = hero.best_rate(known, problem.name, hero.FIXED, problem.steps)
            steps = hero.QUICK if options.quick else problem.steps
            yield {**task, "rate": best * 2.0 ** task["exponent"], "steps": steps}


# -- tables ----------------------------------------------------------------------------------------

CAPTION = """
Held-out loss at the end in nats, mean over seeds ± one standard error, and where the rate went: 2^x
times the best fixed rate, mean of x. *Higher : lower*: of the cycles near the schedule's peak,
where votes count, those in which |t| > 2 said so. From the best rate neither should win. Starts are
2^start times the best fixed rate. A run that crashed, or ended above it, counts as an untrained
model.
"""


def tables(records: Sequence[Record]) -> str:
    """Markdown: for each problem a row for each cycle and way of scoring."""
    problems = dict(sorted(grouped(records, "problem").items()))
    parts = ["# The horizon\n", CAPTION, "Votes from the best rate, higher : lower:\n"]
    parts.append(_votes_from_the_best(problems))
    for problem, lines in problems.items():
        starts = sorted(grouped(lines, "exponent"))
        rows = []
        for (interval, method), cycle in sorted(grouped(lines, "interval", "method").items()):
            own = grouped(cycle, "exponent")
            cells = [cell for e in starts for cell in (_cells(own[e]) if e in own else [""] * 3)]
            rows.append([NAMES[method], f"{100 * interval:g} %" if interval else "-", *cells])
        heads = ["scored at", "cycle"]
        for e in starts:
            heads += [f"loss from 2^{e}", "rate went to", "higher : lower"]
        parts += [f"## {problem}\n", table(heads, rows)]
    return "\n".join(parts)


def _votes_from_the_best(problems: Mapping[str, Sequence[Record]]) -> str:
    """A row for each cycle; for each problem how often the averaged and the last weights said
    higher and lower."""
    lines = [line for own in problems.values() for line in own if line["exponent"] == 0]
    found = grouped(lines, "interval", "problem", "method")
    columns = [(problem, method) for problem in problems for method in (AVERAGED, LAST)]
    rows = [
        [f"{100 * cycle:g} % of the run", *(_votes(found.get((cycle, *of), [])) for of in columns)]
        for cycle in sorted({line["interval"] for line in lines if line["interval"]})
    ]
    return table(["cycle", *(f"{problem}: {method}" for problem, method in columns)], rows)


def _cells(lines: Sequence[Record]) -> list[str]:
    """Loss, rate, and votes."""
    went_to = fmean(line["exponent"] + math.log2(line["correction"]) for line in lines)
    return [mean(list(map(hero.score, lines))), f"2^{went_to:+.1f}", _votes(lines)]


def _votes(lines: Sequence[Record]) -> str:
    """How often a higher and a lower rate was significantly better, of all votes."""
    votes = [t for line in lines for t in line["votes"]]
    higher, lower = sum(t < -SIGNIFICANT for t in votes), sum(t > SIGNIFICANT for t in votes)
    return f"{higher} : {lower} of {len(votes)}" if votes else ""


EXPERIMENT = Experiment(
    "horizon", __doc__, run,
    (
        Column("problem", ("cnn-digits",), ["cnn-digits"], PROBLEMS),
        Column("method", (FIXED, AVERAGED, LAST), [AVERAGED, LAST], NAMES),
        Column("interval", (0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1), [0.05, 0.1]),
        Column("exponent", (-4, 0, 4), [-4, 4]),
    ),
    tables,
    seeds=3,
    same=("problem", "method", "interval", "seed", "steps", "rate"),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    options = EXPERIMENT.parsed(arguments)
    print(tables(EXPERIMENT.complete(tasks(options), options)), end="")


if __name__ == "__main__":
    main()
