"""What annealed trials say of a rate that is right, and of one that is wrong: by their length, and by the part of the run after which they begin.

    python -m benchmarks.evidence.survey [--workloads digits ...] [--starts 0 4] [--steps 10000] [--places 0.15 0.3] [--lengths 28 56 112 224]
                                         [--seeds 1] [--jobs 2] [--quick] [--json FILE]

The run keeps its rate, 2^start times the one that people would write first. At 15 % and 30 % of it, or at other places, arms train beside it at 1/4,
1/2, 2 and 4 times the rate, for 28, 56, 112 and 224 steps, and are scored on 48 batches (`hdet.AutoLR` affords 56 steps and 28 batches in a run of
10 000). A rule that is to tell a wrong rate from a right one needs figures that differ. Lines have all arms, with standard errors over the batches.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

import torch
from torch import nn

import hdet
from hdet.core.rules.trial.protocol import TRIALS, snapshots
from hdet.measure.trials import Trials

from . import auto, command, fixed_rates
from .problems import Problem
from .runs import Record, Task, identity
from .training import Method, Parts, train
from .workloads import OPTIMIZERS, SCHEDULES, WORKLOADS

RESULTS = "benchmarks/results/evidence/survey.jsonl"
OCTAVES, SCORES = (-2, -1, 0, 1, 2), 48


class Surveyed(Exception):
    """All trials have been told: the rest of the run says nothing more."""


class Survey(hdet.Controller):
    """One trial after the other, of which nothing follows."""

    name, needs_replicas, judges_held_out = "survey", False, True

    def __init__(self, model: nn.Module, steps: int, places: Sequence[float], lengths: Sequence[int]) -> None:
        super().__init__()
        self.trials = Trials(model)
        self.measurements = {TRIALS: self.trials}
        self.todo = [(math.ceil(place * steps), length) for place in places for length in lengths]
        self.told: list[dict[str, Any]] = []

    def plan(self, now: hdet.Moment) -> hdet.Plan:
        if not self.todo:
            return hdet.Plan(spread=False)
        due, length = self.todo[0]
        if now.step < due:
            return hdet.Plan(steps=due - now.step, spread=False)
        settings = {
            "trial": len(self.told), "multiples": [2.0**octave for octave in OCTAVES], "of": "base", "origin": "", "steps": length, "scores": SCORES,
        }  # fmt: skip
        return hdet.Plan(steps=length + SCORES, spread=False, judged=True, snapshots=snapshots(len(OCTAVES)), measure={TRIALS: settings})

    def decide(self, evidence: hdet.Evidence) -> list[hdet.Decision]:
        for row in evidence.measured.get(TRIALS, ()):
            if row is not None and self.todo:
                losses = torch.tensor(row[1 : 1 + len(OCTAVES) * SCORES]).view(len(OCTAVES), SCORES).tolist()
                _, length = self.todo.pop(0)
                self.told.append({"begins": evidence.step - length - SCORES, "steps": length, "losses": losses})
        return [hdet.Decision() for _ in evidence.knobs]


def run(workload: str, exponent: int, seed: int, steps: int, places: Sequence[float], lengths: Sequence[int]) -> Record:
    """One line of the results. Losses are means of arms, gains are over the run's own rate, batch by batch."""
    chosen = WORKLOADS[workload]
    seen: list[Survey] = []

    def build(problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
        optimizer = OPTIMIZERS[chosen.optimizer](problem.groups(model), rate)
        controller = Survey(model, steps, places, lengths)
        seen.append(controller)
        parts, _ = auto.beside(problem, model, optimizer, SCHEDULES[chosen.schedule](optimizer, steps), seed, controller)

        def after(batch: Any) -> None:
            parts.after(batch)
            if not controller.todo:
                raise Surveyed

        return replace(parts, after=after, crashes=(*parts.crashes, Surveyed))

    rate = chosen.rate * 2.0**exponent
    train(replace(chosen.problem, steps=steps), Method(chosen.optimizer, build, rate, None), rate, seed)
    if seen[0].todo:
        raise ValueError(f"{steps} steps are too few for {len(places) * len(lengths)} trials")
    trials = []
    for told in seen[0].told:
        own = told["losses"][OCTAVES.index(0)]
        gains = [[b - a for a, b in zip(arm, own, strict=True)] for arm in told["losses"]]
        trials.append(
            {"begins": told["begins"], "steps": told["steps"], "loss": mean(own), "gains": list(map(mean, gains)),
             "errors": [stdev(gain) / math.sqrt(SCORES) for gain in gains]}
        )  # fmt: skip
    return {
        "benchmark": "survey", "workload": workload, "exponent": exponent, "seed": seed, "steps": steps, "places": places, "lengths": lengths,
        "octaves": OCTAVES, "trials": trials,
        "untrained": fixed_rates.untrained(workload, seed), "torch": torch.__version__,
    }  # fmt: skip


key = identity("workload", "exponent", "seed", "steps", "places", "lengths")


def tasks(options: argparse.Namespace) -> list[Task]:
    return command.grid(
        seed=range(options.seeds), workload=options.workloads, exponent=options.starts, steps=[options.steps], places=[options.places], lengths=[options.lengths],
    )  # fmt: skip


def table(records: Sequence[Record], octaves: Sequence[int] = (-1, 2)) -> str:
    """How far the arms at these octaves are below the one at the run's own rate, by the trial's length: in percent of what that has learned, with the
    standard error, the least and the most of all places."""
    lengths = sorted({length for record in records for length in record["lengths"]})
    columns = [(octave, length) for octave in octaves for length in lengths]
    lines = [
        "| workload | start | " + " | ".join(f"2^{octave}, {length} steps" for octave, length in columns) + " |",
        "|---" * (2 + len(columns)) + "|",
    ]
    for record in sorted(records, key=lambda record: (record["workload"], record["seed"], record["exponent"])):
        cells = []
        for octave, length in columns:
            told = [trial for trial in record["trials"] if trial["steps"] == length]
            gains = [
                (trial["gains"][OCTAVES.index(octave)], trial["errors"][OCTAVES.index(octave)], record["untrained"] - trial["loss"])
                for trial in told
            ]
            shown = [f"{100 * gain / learned:+.1f} ± {100 * abs(error / learned):.1f}" for gain, error, learned in gains]
            cells.append("" if not shown else " to ".join(dict.fromkeys([min(shown, key=_first), max(shown, key=_first)])))
        lines.append(f"| {record['workload']} | 2^{record['exponent']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _first(shown: str) -> float:
    return float(shown.split()[0])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command.parser(__doc__, RESULTS, "one workload, 2 400 steps, one start", seeds=1)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["digits", "recsys", "recurrent", "transformer"])
    parser.add_argument("--starts", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--places", type=float, nargs="+", default=[0.15, 0.3])
    parser.add_argument("--lengths", type=int, nargs="+", default=[28, 56, 112, 224])
    parser.add_argument("--shown", type=int, nargs="+", choices=OCTAVES, default=[-1, 2], help="octaves from the run's rate")
    options = command.parsed(parser, arguments, workloads=["small"], starts=[0], steps=2400, seeds=1)
    print(table(command.complete(run, tasks(options), key, options), options.shown), end="")


if __name__ == "__main__":
    main()
