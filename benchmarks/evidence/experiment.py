"""Many runs in a few processes, and the command line that the benchmarks of this folder share.

What is in the file already is skipped and what is new is appended, so a benchmark can be stopped
and started.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from ..harness import emit, parser_of
from ..tables import read

FOLDER = "benchmarks/results/evidence"
Record = dict[str, Any]
"""A line of the results."""
Task = dict[str, Any]
"""The arguments of a run, which its line repeats."""


@dataclass(frozen=True)
class Column:
    """An argument of a run, and the values that are run."""

    name: str
    values: Sequence[Any]
    quick: Sequence[Any]
    """Those of --quick."""
    choices: Iterable[str] | None = None
    option: str = ""
    """Without: the name with an s."""

    @property
    def plural(self) -> str:
        return self.option or self.name + "s"


@dataclass(frozen=True)
class Experiment:
    """A benchmark: a grid of runs, a line for each, a table of the lines."""

    name: str
    doc: str | None
    run: Callable[..., Record]
    """A module's own function, of a task; returns what it has found."""
    columns: tuple[Column, ...]
    table: Callable[[Sequence[Record]], str]
    seeds: int = 1
    jobs: int = 2
    same: tuple[str, ...] = ()
    """Names of what makes two runs the same run; without, all columns and the seed."""
    plan: Callable[[argparse.Namespace], Iterable[Task]] | None = None
    """What is run; without, `grid`."""
    add_options: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    """Of its own."""

    @property
    def results(self) -> str:
        return f"{FOLDER}/{self.name}.jsonl"

    def key(self, record: Record | Task) -> tuple[Hashable, ...]:
        """Rates to six digits."""
        names = self.same or ("seed", *(column.name for column in self.columns))
        values = (record[name] for name in names)
        return tuple(f"{v:.6g}" if isinstance(v, float) else v for v in values)

    def read(self) -> list[Record]:
        return read(self.results)

    def parser(self) -> argparse.ArgumentParser:
        made = parser_of(self.doc, writes=False)
        for column in self.columns:
            values = list(column.values)
            usual = f"by default {len(values)}: {', '.join(map(str, values[:9]))}"
            how = {"nargs": "+", "type": type(values[0]), "metavar": column.name.upper()}
            made.add_argument(
                f"--{column.plural}", default=values, choices=column.choices, help=usual, **how
            )
        made.add_argument("--seeds", type=int, default=self.seeds, help="how many")
        one_thread = "processes of one thread; 0: in this one"
        made.add_argument("--jobs", type=int, default=self.jobs, help=one_thread)
        made.add_argument("--quick", action="store_true", help="checks the machinery")
        self.add_options(made)
        appended = f"read and appended to; default {self.results}, with --quick none"
        made.add_argument("--json", help=appended)
        return made

    def parsed(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Of --quick: what was not said."""
        parser = self.parser()
        if "--quick" in (sys.argv if arguments is None else arguments):
            parser.set_defaults(**{one.plural: one.quick for one in self.columns}, seeds=1)
        options = parser.parse_args(arguments)
        options.json = options.json or (None if options.quick else self.results)
        return options

    def grid(self, options: argparse.Namespace) -> list[Task]:
        """A task for each combination, of which the last column changes the fastest."""
        names = ["seed", *(column.name for column in self.columns)]
        values = [range(options.seeds), *(getattr(options, one.plural) for one in self.columns)]
        return [dict(zip(names, one, strict=True)) for one in product(*values)]

    def complete(self, tasks: Iterable[Task], options: argparse.Namespace) -> list[Record]:
        """The lines of ``tasks``: those that are in the file, and those that are run now.

        The first error, Ctrl-C and SIGTERM end the benchmark and its processes; what was under way
        is run again next time.
        """
        records, wanted = read(options.json), {self.key(task): task for task in tasks}
        done = set(map(self.key, records))
        missing = [task for key, task in wanted.items() if key not in done]
        for record in run_all(self, missing, options.jobs):
            records.append(record)
            emit(record, options.json)
        return [record for record in records if self.key(record) in wanted]

    def main(self, arguments: Sequence[str] | None = None) -> None:
        options = self.parsed(arguments)
        planned = (self.plan or self.grid)(options)
        print(self.table(self.complete(planned, options)), end="")


def one_run(run: Callable[..., Record], name: str, task: Task) -> Record:
    began = time.perf_counter()
    found = run(**{key: value for key, value in task.items() if key != "benchmark"})
    line = {"benchmark": name, **task, **found}
    return {**line, "seconds": time.perf_counter() - began}


def run_all(experiment: Experiment, tasks: Sequence[Task], jobs: int) -> Iterator[Record]:
    if not jobs:
        yield from (one_run(experiment.run, experiment.name, task) for task in tasks)
    elif tasks:
        # Kernels read this when they are loaded, in the children.
        os.environ["OMP_NUM_THREADS"] = "1"
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with _pool(jobs) as pool:
            of = partial(one_run, experiment.run, experiment.name)
            futures = [pool.submit(of, task) for task in tasks]
            yield from (future.result() for future in as_completed(futures))


@contextmanager
def _pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_one_thread) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _one_thread() -> None:
    import torch

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A terminal sends Ctrl-C to all; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def finite(loss: float) -> float | None:
    """JSON has no infinity."""
    return loss if math.isfinite(loss) else None
