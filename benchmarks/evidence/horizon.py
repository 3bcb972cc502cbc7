"""The horizon: how long must a cycle be, and at which weights must replicas be scored, for the
probe to find the rate of the whole run?

    python -m benchmarks.evidence.horizon [--problems cnn-digits ...] [--exponents -4 0 4]
                                          [--intervals 0.002 ... 0.1] [--seeds 3] [--jobs 2]
                                          [--quick] [--json FILE] [--hero FILE]

Four co-resident replicas under a ProbeController, cycles of 0.2 % to 10 % of the run; replicas are
scored at the average of their weights over the cycle, or greedily at their last weights. All else
is as in the hero figure (replicated.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

import hdet
from hdet.controllers.probe_rule import END

from . import command, training
from .hero import RESULTS as HERO
from .hero import best_fixed, untrained
from .methods import METHODS
from .problems import PROBLEMS, Problem
from .replicated import probe, replicated
from .report.horizon import AVERAGED, FIXED, INTERVALS, LAST, SEEDS, STARTS, horizon_tables
from .runs import Record, Task, identity
from .training import Method, Parts, train

RESULTS = "benchmarks/results/evidence/horizon.jsonl"
QUICK = 40


def run(
    problem: str, method: str, interval: float, exponent: int, rate: float, seed: int, steps: int
) -> Record:
    """One line of the results.

    ``interval``: part of the run that a cycle takes; 0 for the fixed schedule.
    """
    controllers: list[Corrected] = []
    length = max(1, round(interval * steps))

    def build(problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
        def controller(probed: list[int]) -> hdet.ProbeController:
            every = (
                1 if method == AVERAGED else length
            )  # sampled once a cycle is sampled at its end
            made = probe(
                problem,
                model,
                seed,
                probed,
                length,
                kind=Corrected,
                average_every=every,
            )
            controllers.append(made)
            return made

        return replicated(problem, model, rate, seed, controller, interval=length)

    chosen = METHODS[training.FIXED] if method == FIXED else Method(method, build, rate, None)
    outcome = train(replace(PROBLEMS[problem], steps=steps), chosen, rate, seed)
    return {
        "benchmark": "horizon",
        "problem": problem,
        "method": method,
        "interval": interval,
        "exponent": exponent,
        "rate": rate,
        "seed": seed,
        "steps": steps,
        **outcome.to_dict(),
        "correction": controllers[0].correction if controllers else 1.0,
        "votes": controllers[0].votes if controllers else [],
        "untrained": untrained(problem, seed),
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


key = identity("problem", "method", "interval", "seed", "steps", "rate")


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    """Seed by seed, so that a benchmark that is stopped has something of everything."""
    best = {problem: best_fixed(problem, options) for problem in options.problems}
    cells = [
        (FIXED, 0.0),
        *((method, interval) for interval in options.intervals for method in (AVERAGED, LAST)),
    ]
    for seed in range(options.seeds):
        for problem in options.problems:
            for method, interval in cells:
                for e in options.exponents:
                    yield {
                        "problem": problem,
                        "method": method,
                        "interval": interval,
                        "exponent": e,
                        "rate": best[problem] * 2.0**e,
                        "seed": seed,
                        "steps": QUICK if options.quick else PROBLEMS[problem].steps,
                    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command.parser(
        __doc__,
        RESULTS,
        f"one seed, {QUICK} steps on cnn-digits, two cycles",
        seeds=SEEDS,
        problems=["cnn-digits"],
    )
    parser.add_argument("--exponents", type=int, nargs="+", default=list(STARTS))
    parser.add_argument(
        "--intervals",
        type=float,
        nargs="+",
        default=list(INTERVALS),
        help="cycles, as parts of the run",
    )
    parser.add_argument(
        "--hero", default=HERO, metavar="FILE", help="where the best fixed rates are"
    )
    options = command.parsed(
        parser,
        arguments,
        problems=["cnn-digits"],
        exponents=[-4, 4],
        intervals=[0.05, 0.1],
        seeds=1,
    )
    print(horizon_tables(command.complete(run, tasks(options), key, options)), end="")


if __name__ == "__main__":
    main()
