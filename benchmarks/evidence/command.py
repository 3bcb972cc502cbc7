"""What the benchmarks' command lines have in common: how often and where to run, where the lines
are kept, and what ``--quick`` does."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import product

from .problems import PROBLEMS
from .runs import Record, Task, read, run_missing


def parser(
    doc: str | None, results: str, quick: str, *, seeds: int | None, problems: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """``results``: where lines are kept; ``quick``: what --quick runs; ``seeds``: None, as many
    as the hero figure has; ``problems``: the default, without which there is no choice."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if problems:
        made.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(problems))
    made.add_argument(
        "--seeds",
        type=int,
        default=seeds,
        help="how many" if seeds else "how many; default 3 on gpt-python, 5 on the others",
    )
    made.add_argument(
        "--jobs", type=int, default=2, help="runs at a time; a process is of one thread"
    )
    made.add_argument("--quick", action="store_true", help=f"{quick}: checks the machinery")
    made.add_argument(
        "--json", help=f"results, read and appended to; default {results}, with --quick none"
    )
    made.set_defaults(results=results)
    return made


def parsed(
    made: argparse.ArgumentParser, arguments: Sequence[str] | None, **quick: object
) -> argparse.Namespace:
    """``quick``: options that --quick sets, whatever else was said."""
    options = made.parse_args(arguments)
    if options.quick:
        vars(options).update(quick)
    else:
        options.json = options.json or options.results
    return options


def grid(**columns: Iterable[object]) -> list[Task]:
    """A task for each combination, of which the last column changes the fastest."""
    return [dict(zip(columns, values, strict=True)) for values in product(*columns.values())]


def complete(
    run: Callable[..., Record],
    tasks: Iterable[Task],
    key: Callable[[Record], Hashable],
    options: argparse.Namespace,
) -> list[Record]:
    """The lines of ``tasks``: those that are in the file, and those that are run now."""
    records, wanted = read(options.json), list(tasks)
    run_missing(run, wanted, records, key, path=options.json, jobs=options.jobs)
    chosen = set(map(key, wanted))
    return [record for record in records if key(record) in chosen]
