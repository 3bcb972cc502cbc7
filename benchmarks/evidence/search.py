"""Equal compute against search: one HDET run against random search, successive halving and population-based training.

    python -m benchmarks.evidence.search [--problems digits ...] [--methods hdet-probe ...] [--members 4 8] [--trials 16] [--draws 5]
                                         [--seeds 5] [--jobs 2] [--quick] [--json FILE]

All know as much about the rate: it is drawn log-uniformly from 2^-8 to 2^6 times the best fixed one, which `hero --find --methods
wsd` has found. A trial is a full run of AdamW under WSD, the schedule that HDET steers, on the full batch. HDET is one run from such a rate;
population-based training has its members at such rates, each on its part of the batch. Random search and successive halving (Optuna's) are played through
with the recorded trials in random orders, so nothing is trained twice. Runs that are in the file already are not repeated.

The compute is counted in examples: one is a forward and a backward pass of it, a pass forward alone is a third. Validations are free.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor, nn

from . import command, hero, pbt
from .methods import METHODS
from .problems import PROBLEMS, Batch, Problem
from .report.search import TRIAL, search_tables
from .runs import Record, Task, finite, identity
from .training import FIXED, train, wsd_shape

RESULTS = "benchmarks/results/evidence/search.jsonl"
LOW, HIGH = -8.0, 6.0
"""log2 of the prior's ends, over the best fixed rate"""
POINTS = 20
"""of a run's curve, evenly spaced; population-based training is ready to exploit at each"""
QUICK = 8
"""steps of a run under --quick"""


# -- the runs ----------------------------------------------------------------------------------------------------------------


def run(problem: str, method: str, draw: int, seed: int, best: float, steps: int) -> Record:
    """One line of the results. Draw d of a seed is the same rate for a trial and for HDET; a population's is its best member's last."""
    began = time.perf_counter()
    chosen = replace(PROBLEMS[problem], steps=steps)
    if method.startswith("pbt-"):
        rng = random.Random(f"{problem} {method} {seed} {draw}")
        rate, curve = pbt.train(
            chosen, int(method[4:]), seed, rng, lambda: best * 2.0 ** rng.uniform(LOW, HIGH), wsd_shape(steps), interval(steps)
        )
        outcome: Record = {"validation": finite(curve[-1][1])}
    else:
        rate = best * 2.0 ** random.Random(f"{problem} {seed} {draw}").uniform(LOW, HIGH)
        watch = Watch(chosen)
        outcome = train(watch.problem, METHODS[FIXED if method == TRIAL else method], rate, seed).to_dict()
        curve = [*watch.curve, (watch.samples, math.inf if outcome["validation"] is None else outcome["validation"])]
    return {
        "benchmark": "search", "problem": problem, "method": method, "exponent": math.log2(rate / best), "rate": rate, "best": best,
        "draw": draw, "seed": seed, "steps": steps, "batch": chosen.batch_size, **outcome, "samples": curve[-1][0],
        "curve": [(samples, finite(loss)) for samples, loss in curve], "seconds": time.perf_counter() - began,
    }  # fmt: skip


class Watch:
    """``problem`` is the one it was given, and writes down what its training costs and how good the model is in between.

    The model is validated when a method asks for the batch of a step, `POINTS` times in a run. HDET's cycles divide these parts, so its
    replicas have just been averaged then.
    """

    def __init__(self, problem: Problem) -> None:
        self.inner = problem
        self.problem = replace(problem, build=self._build, batch=self._batch, losses=self._losses)
        self.curve: list[tuple[float, float]] = []  # (examples, loss)
        self._forward_passes = 0  # of examples; backward counts as two

    @property
    def samples(self) -> float:
        return self._forward_passes / 3

    def _build(self, seed: int) -> nn.Module:
        self.model = self.inner.build(seed)
        return self.model

    def _batch(self, seed: int, step: int) -> Batch:
        if step < self.inner.steps and step == interval(self.inner.steps) * len(self.curve):
            self.curve.append((self.samples, self.inner.validate(self.model)))
        return self.inner.batch(seed, step)

    def _losses(self, model: nn.Module, batch: Batch) -> Tensor:
        losses = self.inner.losses(model, batch)
        self._forward_passes += (3 if losses.requires_grad else 1) * len(losses)
        return losses


def interval(steps: int) -> int:
    return max(1, steps // POINTS)


key = identity("problem", "method", "draw", "seed", "steps", "best")


# -- the command ---------------------------------------------------------------------------------------------------------------


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    best = {problem: hero.best_fixed(problem, options) for problem in options.problems}
    counts = {TRIAL: options.trials} | dict.fromkeys([*options.methods, *(f"pbt-{n}" for n in options.members)], options.draws)
    for seed, problem in hero.turns(options):
        for method, count in counts.items():
            for draw in range(count):
                yield {"problem": problem, "method": method, "draw": draw, "seed": seed, "best": best[problem], "steps": QUICK if options.quick else PROBLEMS[problem].steps}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command.parser(__doc__, RESULTS, f"one seed, {QUICK} steps on digits, 4 trials", seeds=None, problems=list(PROBLEMS))
    ours = [name for name in METHODS if name.startswith("hdet-")]
    parser.add_argument("--methods", nargs="*", choices=ours, default=[name for name in ours if name in ("hdet-probe", "hdet-line")])
    parser.add_argument("--members", type=int, nargs="*", default=[4, 8], help="sizes of the populations")
    parser.add_argument("--trials", type=int, default=16, help="of random search, for each seed")
    parser.add_argument("--draws", type=int, default=5, help="runs of HDET and of populations, for each seed")
    parser.add_argument("--hero", default=hero.RESULTS, metavar="FILE", help="where the best fixed rates are")
    options = command.parsed(parser, arguments, problems=["digits"], trials=4, draws=1, members=[4], seeds=1)
    print(search_tables(command.complete(run, tasks(options), key, options)), end="")


if __name__ == "__main__":
    main()
