"""The hero figure: final validation loss against the starting rate, 2^-8 to 2^6 times the best, for
HDET and what people use today.

    python -m benchmarks.evidence.hero [--problems cnn-digits ...] [--methods onecycle ...]
                                       [--exponents -8 ... 6] [--seeds 5] [--jobs 2] [--find]
                                       [--quick] [--json FILE] [--known FILE ...]

Each method first looks for its own best rate on a grid of powers of 2 (``--find``: only that), then
runs from 2^exponent times it; HDET starts from that of the schedule which it steers. Same steps,
mini-batches and seeds for all. Runs that are in the file already are not repeated; to try a method
out, write elsewhere and let ``--known`` name the file with the best rates. ``python -m
benchmarks.evidence.report`` draws the figure.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from . import command
from .methods import METHODS
from .problems import PROBLEMS
from .report.curves import score
from .report.hero import STARTS, seeds_of
from .runs import Record, Task, identity, read, run_missing
from .training import FIXED, Method, train

RESULTS = "benchmarks/results/evidence/hero.jsonl"
FIND_SEEDS = {"gpt-python": (1000,)}
"""(1000, 1001) on the others; not those of the figure: the best rate is not chosen on the runs that
are shown"""
QUICK = 40
FARTHEST = 14
"""powers of 2 beyond which no best rate is looked for"""


def run(
    benchmark: str, problem: str, method: str, exponent: int, rate: float, seed: int, steps: int
) -> Record:
    """One line of the results."""
    outcome = train(replace(PROBLEMS[problem], steps=steps), METHODS[method], rate, seed)
    return {
        "benchmark": benchmark,
        "problem": problem,
        "method": method,
        "exponent": exponent,
        "rate": rate,
        "seed": seed,
        "steps": steps,
        **outcome.to_dict(),
        "untrained": untrained(problem, seed),
        "version": METHODS[method].version(),
    }


@cache
def untrained(problem: str, seed: int) -> float:
    """What a run that crashed is counted as."""
    return PROBLEMS[problem].validate(PROBLEMS[problem].build(seed))


key = identity("benchmark", "problem", "method", "seed", "steps", "rate")


# -- the best rate ---------------------------------------------------------------------------------


def means(records: Sequence[Record], problem: str, method: str, steps: int) -> dict[int, float]:
    """Exponent of the search grid -> mean score, where all seeds are there."""
    found: dict[int, dict[int, float]] = {}
    for record in records:
        if (record["benchmark"], record["problem"], record["method"], record["steps"]) == (
            "hero-find",
            problem,
            method,
            steps,
        ):
            found.setdefault(record["exponent"], {})[record["seed"]] = score(record)
    return {
        exponent: statistics.mean(by_seed.values())
        for exponent, by_seed in found.items()
        if set(find_seeds(problem)) <= set(by_seed)
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
        raise KeyError(f"the best rate of {method} on {problem} is not known yet")
    return chosen.start * 2.0 ** min(known, key=lambda exponent: (known[exponent], exponent))


def best_fixed(problem: str, options: argparse.Namespace) -> float:
    """The best rate of `FIXED`, from which other benchmarks count; ``options.hero``: where it has
    been looked for.

    Raises SystemExit, with the command that looks for it, if it has not been.
    """
    if options.quick:
        return METHODS[FIXED].start
    try:
        return best_rate(read(options.hero), problem, FIXED, PROBLEMS[problem].steps)
    except KeyError:
        raise SystemExit(
            f"{options.hero} does not say the best fixed rate on {problem}: "
            f"run python -m benchmarks.evidence.hero --find --methods {FIXED} --problems {problem}"
        ) from None


def find(options: argparse.Namespace, records: list[Record]) -> None:
    """Search until every method knows its best rate; a method that starts from another's makes that
    one search."""
    names = dict.fromkeys(METHODS[name].borrows or name for name in options.methods)
    while True:
        tasks = [
            {
                "benchmark": "hero-find",
                "problem": problem,
                "method": name,
                "exponent": e,
                "rate": METHODS[name].start * 2.0**e,
                "seed": seed,
                "steps": steps_of(problem, options),
            }
            for problem in options.problems
            for name in names
            for seed in find_seeds(problem)
            for e in next_exponents(
                METHODS[name], means(records, problem, name, steps_of(problem, options))
            )
        ]
        if not tasks:
            return
        run_missing(run, tasks, records, key, path=options.json, jobs=options.jobs)


def find_seeds(problem: str) -> tuple[int, ...]:
    return FIND_SEEDS.get(problem, (1000, 1001))


def turns(options: argparse.Namespace) -> Iterator[tuple[int, str]]:
    """(seed, problem), seed by seed, so that a benchmark that is stopped has something of
    everything."""
    seeds = {
        problem: range(options.seeds) if options.seeds else seeds_of(problem)
        for problem in options.problems
    }
    return (
        (seed, problem)
        for seed in range(max(map(len, seeds.values())))
        for problem, own in seeds.items()
        if seed in own
    )


def steps_of(problem: str, options: argparse.Namespace) -> int:
    return QUICK if options.quick else PROBLEMS[problem].steps


# -- the figure's runs -----------------------------------------------------------------------------


def grid(options: argparse.Namespace, records: Sequence[Record]) -> Iterator[Task]:
    for seed, problem in turns(options):
        steps = steps_of(problem, options)
        for method in options.methods:
            best = (
                METHODS[method].start
                if options.quick
                else best_rate(records, problem, method, steps)
            )
            for e in options.exponents:
                yield {
                    "benchmark": "hero",
                    "problem": problem,
                    "method": method,
                    "exponent": e,
                    "rate": best * 2.0**e,
                    "seed": seed,
                    "steps": steps,
                }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command.parser(
        __doc__,
        RESULTS,
        f"one seed, {QUICK} steps on cnn-digits from three starts",
        seeds=None,
        problems=list(PROBLEMS),
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--exponents", type=int, nargs="+", default=list(STARTS))
    parser.add_argument("--find", action="store_true", help="only look for the best rates")
    parser.add_argument(
        "--known",
        nargs="+",
        default=[],
        help="further results, only read: for the best rates, while a method is tried out",
    )
    options = command.parsed(
        parser, arguments, problems=["cnn-digits"], exponents=[-4, 0, 4], seeds=1
    )
    records = read(options.json)
    records += [
        record
        for path in options.known
        for record in read(path)
        if record["benchmark"] == "hero-find"
    ]
    if not options.quick:
        find(options, records)
    if not options.find:
        run_missing(run, grid(options, records), records, key, path=options.json, jobs=options.jobs)


if __name__ == "__main__":
    main()
