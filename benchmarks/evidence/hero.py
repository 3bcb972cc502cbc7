"""Final validation loss against the starting rate, 2^-8 to 2^6 times the best, for HDET and what
people use today (the "hero figure").

    python -m benchmarks.evidence.hero [--problems cnn-digits ...] [--methods onecycle ...]

Each method first looks for its own best rate on a grid of powers of 2, then runs from 2^exponent
times it; HDET starts from that of the schedule which it steers. Same steps, mini-batches and seeds
for all. gpt-python has three seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from statistics import fmean
from typing import Any

import numpy as np

from ..tables import grouped, mean, reached, table
from . import peers, replicated
from .experiment import Column, Experiment, Record, Task
from .problems import PROBLEMS
from .training import Build, train, untrained


@dataclass(frozen=True)
class Method:
    """A way of training, and how to look for its best rate."""

    build: Build
    start: float
    """A rate near which the best one is looked for, in powers of 2."""
    search: tuple[int, int] | None = None
    """Exponents between which every second one is tried; None: ``start`` is the best rate by
    definition."""
    borrows: str | None = None
    """The method whose best rate this one starts from."""
    package: str | None = None


_ADAM, _FREE = (-4, 4), (-8, 6)
"""Where to search: around 1e-2 for a rate, wider for what should not need any."""
METHODS = {
    "onecycle": Method(peers.one_cycle, 1e-2, _ADAM),
    "wsd": Method(peers.wsd, 1e-2, _ADAM),
    "schedulefree": Method(peers.schedule_free, 1e-2, _ADAM, package="schedulefree"),
    "prodigy": Method(peers.prodigy, 1.0, _FREE, package="prodigyopt"),
    "dadapt": Method(peers.dadapt, 1.0, _FREE, package="dadaptation"),
    "dog": Method(peers.dog, 1.0, _FREE, package="dog-optimizer"),
    "dadapt-d0": Method(peers.dadapt_d0, 1e-6, None, package="dadaptation"),
    "dog-movement": Method(peers.dog_movement, 1e-4, (-6, 8), package="dog-optimizer"),
    "prodigy-d0": Method(peers.prodigy_d0, 1e-6, None, package="prodigyopt"),
    "hdet-softmax": Method(replicated.hdet_softmax, 1e-2, borrows="onecycle"),
}
FIXED = "wsd"
"""Whose best rate other benchmarks count from."""
STARTS = (-8, -5, -3, -1, 0, 1, 2, 4, 6)
QUICK = 40
FARTHEST = 14
"""Powers of 2 beyond which no best rate is looked for."""


def run(problem: str, method: str, exponent: int, rate: float, seed: int, steps: int) -> Record:
    chosen = METHODS[method]
    outcome = train(replace(PROBLEMS[problem], steps=steps), chosen.build, rate, seed)
    return {
        **outcome,
        "untrained": untrained(PROBLEMS[problem], seed),
        "version": chosen.package and f"{chosen.package} {version(chosen.package)}",
    }


def score(record: Record) -> float:
    """Held-out loss in nats; an untrained model's if the run crashed or ended above it."""
    return float(reached(record["validation"], record["untrained"]))


# -- the best rate ---------------------------------------------------------------------------------


def find_seeds(problem: str) -> tuple[int, ...]:
    """Not those of the tables: the best rate is not chosen on the runs that are shown."""
    return (1000,) if problem == "gpt-python" else (1000, 1001)


def means(records: Sequence[Record], problem: str, method: str, steps: int) -> dict[int, float]:
    """Exponent of the search grid -> mean score, where all seeds are there."""
    wanted = ("hero-find", problem, method, steps)
    names = ("benchmark", "problem", "method", "steps")
    searched = [line for line in records if tuple(line[name] for name in names) == wanted]
    return {
        exponent: fmean(map(score, lines))
        for exponent, lines in grouped(searched, "exponent").items()
        if set(find_seeds(problem)) <= {line["seed"] for line in lines}
    }


def next_exponents(method: Method, known: dict[int, float]) -> list[int]:
    """What the search still has to try: every second power of 2, further out while the best is at
    an end, then its two neighbours."""
    if method.search is None:
        return []
    low, high = method.search
    wanted = set(range(low, high + 1, 2))
    if wanted <= set(known):
        best = min(known, key=lambda exponent: (known[exponent], exponent))
        wanted |= {best - 2, best + 2} if best % 2 == 0 else set()
        wanted |= {best - 1, best + 1} if {best - 2, best + 2} <= set(known) or best % 2 else set()
    return sorted(e for e in wanted - set(known) if abs(e) <= FARTHEST)


def best_rate(records: Sequence[Record], problem: str, method: str, steps: int) -> float:
    """Raises KeyError if it has not been looked for."""
    chosen = METHODS[method]
    if chosen.borrows:
        return best_rate(records, problem, chosen.borrows, steps)
    if chosen.search is None:
        return chosen.start
    known = means(records, problem, method, steps)
    if not known or next_exponents(chosen, known):
        raise KeyError(
            f"the best rate of {method} on {problem} is not known: python -m "
            f"benchmarks.evidence.hero --methods {method} --problems {problem}"
        )
    return chosen.start * 2.0 ** min(known, key=lambda exponent: (known[exponent], exponent))


def find(options: argparse.Namespace) -> list[Record]:
    """Search until every method knows its best rate; a method that starts from another's makes that
    one search. Returns the lines of the search."""
    names = dict.fromkeys(METHODS[name].borrows or name for name in options.methods)
    done: list[Record] = EXPERIMENT.read() if options.json == EXPERIMENT.results else []
    while True:
        tasks = [
            _task("hero-find", problem, name, e, METHODS[name].start * 2.0**e, seed, steps)
            for problem in options.problems
            for name in names
            for steps in [PROBLEMS[problem].steps]
            for seed in find_seeds(problem)
            for e in next_exponents(METHODS[name], means(done, problem, name, steps))
        ]
        if not tasks:
            return done
        done += EXPERIMENT.complete(tasks, options)


def _task(*of: Any) -> Task:
    names = ("benchmark", "problem", "method", "exponent", "rate", "seed", "steps")
    return dict(zip(names, of, strict=True))


def plan(options: argparse.Namespace) -> Iterator[Task]:
    """Seed by seed, so that a benchmark that is stopped has something of everything."""
    records = [] if options.quick else find(options)
    for task in EXPERIMENT.grid(options):
        problem, method, e, seed = (task[k] for k in ("problem", "method", "exponent", "seed"))
        if seed < 3 or problem != "gpt-python":
            steps, known = QUICK, METHODS[method].start
            if not options.quick:
                steps = PROBLEMS[problem].steps
                known = best_rate(records, problem, method, steps)
            yield _task("hero", problem, method, e, known * 2.0**e, seed, steps)


# -- tables ----------------------------------------------------------------------------------------


class Curve:
    """A method on a problem, from several starts."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        by_start = grouped(sorted(records, key=lambda r: (r["exponent"], r["seed"])), "exponent")
        self.scores = {e: list(map(score, lines)) for e, lines in by_start.items()}
        self.means = {e: fmean(values) for e, values in self.scores.items()}
        self.best, self.worst = (of(self.means, key=self.means.__getitem__) for of in (min, max))

    def sensitivity(self, lowest: float) -> float:
        """LR sensitivity E[min(l, l0)] - l* (Wortsman et al., arXiv 2309.14322), l0 an untrained
        model's loss, l* = ``lowest``; nats.

        The expectation is over starts that are even in ln(rate): the trapezoid rule, so a grid that
        is denser somewhere weighs right.
        """
        starts, losses = np.array([*self.means]), np.array([*self.means.values()])
        if len(starts) == 1:
            return float(losses[0]) - lowest
        area = (np.diff(starts) * (losses[1:] + losses[:-1])).sum() / 2
        return float(area / (starts[-1] - starts[0])) - lowest

    def row(self, lowest: float) -> list[str]:
        """Of the overview."""
        last = self.records[-1]
        at = (
            f"{mean(self.scores[e]).replace(' ± ', '±')} (2^{e})" for e in (self.best, self.worst)
        )
        return [
            f"{last['rate'] / 2.0 ** last['exponent']:.3g}",
            *at,
            f"{self.sensitivity(lowest):.3f}",
        ]


def overview(records: Sequence[Record]) -> str:
    """What every method loses on one problem. Losses are held-out, in nats, means over seeds ± one
    standard error. A run that crashed, or ended above it, counts as an untrained model."""
    by_method = grouped(records, "method")
    curves = {name: Curve(by_method[name]) for name in METHODS if name in by_method}
    lowest = min(curve.means[curve.best] for curve in curves.values())
    heads = ["method", "best rate", "at its best start", "worst", "LR sensitivity"]
    return table(heads, ([name, *curve.row(lowest)] for name, curve in curves.items()))


def overviews(records: Sequence[Record]) -> dict[str, str]:
    """By problem."""
    shown = [record for record in records if record["benchmark"] == "hero"]
    return {problem: overview(lines) for problem, lines in grouped(shown, "problem").items()}


def tables(records: Sequence[Record]) -> str:
    return "\n".join(f"{problem}:\n\n{one}" for problem, one in overviews(records).items())


EXPERIMENT = Experiment(
    "hero", __doc__, run,
    (
        Column("problem", list(PROBLEMS), ["cnn-digits"], PROBLEMS),
        Column("method", list(METHODS), ["onecycle", "hdet-softmax"], METHODS),
        Column("exponent", STARTS, [-4, 0, 4]),
    ),
    tables,
    seeds=5,
    same=("benchmark", "problem", "method", "seed", "steps", "rate"),
    plan=plan,
)  # fmt: skip


if __name__ == "__main__":
    EXPERIMENT.main()
