"""The horizon: how long must a cycle be, and at which weights must replicas be scored, for the
probe to find the rate of the whole run?

    python -m benchmarks.evidence.horizon [--problems cnn-digits ...] [--intervals 0.002 ... 0.1]

Four co-resident replicas under a ProbeController, cycles of 0.2 % to 10 % of the run; replicas are
scored at the average of their weights over the cycle, or greedily at their last weights. All else
is as in benchmarks.evidence.hero, which has found the best rates.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

import hdet
from hdet.controllers.near_peak import END

from ..tables import crossed, grouped
from . import hero
from .experiment import Column, Experiment, Record, Task
from .peers import wsd
from .problems import PROBLEMS, Problem
from .replicated import probe, replicated
from .training import Parts, train, untrained

AVERAGED, LAST, FIXED = "averaged", "last", "fixed"
NAMES = {AVERAGED: "averaged weights", LAST: "last weights", FIXED: "fixed schedule"}
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
        "untrained": untrained(PROBLEMS[problem], seed),
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


def plan(options: argparse.Namespace) -> Iterator[Task]:
    """The fixed schedule has no interval."""
    known = hero.EXPERIMENT.read()
    for task in EXPERIMENT.grid(options):
        if (task["method"] == FIXED) == (task["interval"] == 0):
            problem = PROBLEMS[task["problem"]]
            best = hero.best_rate(known, problem.name, hero.FIXED, problem.steps)
            steps = hero.QUICK if options.quick else problem.steps
            yield {**task, "rate": best * 2.0 ** task["exponent"], "steps": steps}


def table(records: Sequence[Record]) -> str:
    """Votes from the best rate: of the cycles near the schedule's peak, where votes count, those in
    which |t| > 2 said higher, and lower. Neither should win."""
    votes = {
        cell: [t for line in lines for t in line["votes"]]
        for cell, lines in grouped(records, "interval", "problem", "method", "exponent").items()
        if cell[3] == 0 and cell[2] != FIXED
    }
    cycles = {f"{100 * interval:g} % of the run": interval for interval, *_ in sorted(votes)}
    columns = {f"{problem}: {method}": (problem, method) for _, problem, method, _ in sorted(votes)}

    def cell(interval: float, of: tuple[str, str]) -> str:
        found = votes.get((interval, *of, 0))
        if found is None:
            return ""
        higher, lower = sum(t < -SIGNIFICANT for t in found), sum(t > SIGNIFICANT for t in found)
        return f"{100 * higher / len(found):.0f}:{100 * lower / len(found):.0f}"

    return crossed("cycle", cycles, dict(sorted(columns.items())), cell)


EXPERIMENT = Experiment(
    "horizon", __doc__, run,
    (
        Column("problem", ("cnn-digits",), ["cnn-digits"], PROBLEMS),
        Column("method", (FIXED, AVERAGED, LAST), [AVERAGED, LAST], NAMES),
        Column("interval", (0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1), [0.05, 0.1]),
        Column("exponent", (-4, 0, 4), [-4, 4]),
    ),
    table,
    seeds=3,
    same=("problem", "method", "interval", "seed", "steps", "rate"),
    plan=plan,
)  # fmt: skip


if __name__ == "__main__":
    EXPERIMENT.main()
