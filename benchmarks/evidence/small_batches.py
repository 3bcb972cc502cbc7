"""Small batches: is a run lost, or made worse, that the line was given with a batch of 2 to 32 and a rate that is far off?

    python -m benchmarks.evidence.small_batches [--problems regression ...] [--batches 2 ... 32] [--powers -6 ... 4] [--seeds 3]
                                                [--steps 400] [--jobs 2] [--quick] [--json FILE]

An MLP of two hidden layers on generated data, a fresh batch each step; WSD with AdamW, and the same under a `LineController` at its default settings, one
process. Starts are powers of 10 times the best fixed rate of the same problem and batch, which is looked for first, on seeds of its own. What counts as
lost and as worse is in benchmarks/evidence/report/small_batches.py.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hdet

from . import command
from .line import hdet_line
from .peers import wsd
from .problems import Batch, Problem
from .report.curves import score
from .report.small_batches import FIXED, LINE, small_batches_tables
from .runs import Record, Task, identity, read, run_missing
from .training import Method, Parts, train

RESULTS = "benchmarks/results/evidence/small-batches.jsonl"
STEPS, QUICK = 400, 60
BATCHES, POWERS, SEEDS = (2, 4, 8, 16, 32), (-6, -4, -2, 0, 2, 4), 3
FIND, FIND_SEEDS = tuple(2.0**e for e in range(-14, 0)), (1000, 1001, 1002)
QUICK_BEST = 2.0**-6
INPUTS, WIDTH, CLASSES, HELD_OUT = 16, 32, 5, 2000
NOISE = 0.3
"""of targets whose standard deviation is about 1; the part of labels that are drawn anew"""


# -- the problems ----------------------------------------------------------------------------------------------------------


def build(outputs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs)
    )  # fmt: skip


@cache
def teacher(outputs: int) -> tuple[nn.Module, Tensor]:
    """One hidden layer, and the standard deviation of what it says."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, outputs, bias=False)).requires_grad_(False)
    for p in net.parameters():
        p.copy_(torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5)
    return net, net(torch.randn(10_000, INPUTS, generator=generator)).std(0)


def regression_examples(count: int, generator: torch.Generator) -> Batch:
    net, scale = teacher(1)
    x = torch.randn(count, INPUTS, generator=generator)
    return x, net(x) / scale + NOISE * torch.randn(count, 1, generator=generator)


def classification_examples(count: int, generator: torch.Generator) -> Batch:
    net, scale = teacher(CLASSES)
    x = torch.randn(count, INPUTS, generator=generator)
    drawn = torch.randint(CLASSES, (count,), generator=generator)
    return x, torch.where(torch.rand(count, generator=generator) < NOISE, drawn, (net(x) / scale).argmax(1))


def regression_losses(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean(1)


def classification_losses(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


KINDS: dict[str, tuple[int, Any, Any]] = {
    "regression": (1, regression_examples, regression_losses),
    "classification": (CLASSES, classification_examples, classification_losses),
}


def problem_of(name: str, batch_size: int, steps: int) -> Problem:
    outputs, examples, losses = KINDS[name]

    def generated(count: int, *key: object) -> Batch:
        digest = hashlib.sha256(repr(key).encode()).digest()
        drawn: Batch = examples(count, torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1))
        return drawn

    @torch.no_grad()
    def validate(model: nn.Module) -> float:
        return float(losses(model, generated(HELD_OUT, "validation")).mean())

    return Problem(
        name=name,
        steps=steps,
        batch_size=batch_size,
        build=partial(build, outputs),
        groups=lambda model: [{"name": "all", "params": list(model.parameters()), "weight_decay": 0.01}],
        batch=lambda seed, step: generated(batch_size, seed, step),
        spare=lambda seed, step, number: generated(batch_size, "spare", seed, step, number),
        losses=losses,
        validate=validate,
    )


# -- the runs --------------------------------------------------------------------------------------------------------------


class Noted(hdet.LineRule):
    """The rule as it is; keeps what it said, and where."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def learn(self, evidence: Any) -> Any:
        learned = super().learn(evidence)
        learned = learned if isinstance(learned, hdet.Learned) else (yield from learned)
        note = learned.decisions[0].note
        self.said += [f"{evidence.step}: {note}"] if note else []
        return learned


def run(benchmark: str, problem: str, method: str, batch: int, power: int | None, rate: float, seed: int, steps: int) -> Record:
    """One line of the results."""
    made, rules = problem_of(problem, batch, steps), []

    def line(problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
        rules.append(Noted())
        return hdet_line(problem, model, rate, seed, rule=rules[0])

    outcome = train(made, Method(method, line if method == LINE else wsd, rate, None), rate, seed)
    return {
        "benchmark": benchmark, "problem": problem, "method": method, "batch": batch, "power": power, "rate": rate, "seed": seed, "steps": steps,
        **outcome.to_dict(), "untrained": made.validate(made.build(seed)), "notes": rules[0].said if rules else [],
    }  # fmt: skip


key = identity("benchmark", "problem", "method", "batch", "seed", "steps", "rate")


def find(options: argparse.Namespace) -> dict[tuple[str, int], float]:
    """(problem, batch) -> the best fixed rate."""
    cells = [(problem, batch) for problem in options.problems for batch in options.batches]
    if options.quick:
        return dict.fromkeys(cells, QUICK_BEST)
    tasks = [
        {"benchmark": "small-batches-find", "problem": problem, "method": FIXED, "batch": batch, "power": None, "rate": rate, "seed": seed, "steps": options.steps}
        for problem, batch in cells for rate in FIND for seed in FIND_SEEDS
    ]  # fmt: skip
    records = read(options.json)
    run_missing(run, tasks, records, key, path=options.json, jobs=options.jobs)
    by_key = {key(record): score(record) for record in records}
    means: dict[tuple[str, int], dict[float, list[float]]] = {}
    for task in tasks:
        means.setdefault((task["problem"], task["batch"]), {}).setdefault(task["rate"], []).append(by_key[key(task)])
    return {cell: min(rates, key=lambda rate: statistics.mean(rates[rate])) for cell, rates in means.items()}


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    """Seed by seed, so that a benchmark that is stopped has something of everything."""
    best = find(options)
    for seed in range(options.seeds):
        for (problem, batch), rate in best.items():
            for power in sorted({0, *options.powers}):  # what is worse is told by the best start
                for method in (FIXED, LINE):
                    yield {
                        "benchmark": "small-batches", "problem": problem, "method": method, "batch": batch, "power": power, "rate": rate * 10.0**power, "seed": seed,
                        "steps": options.steps,
                    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command.parser(__doc__, RESULTS, f"one seed, {QUICK} steps, batches of 2 and 8, three starts", seeds=SEEDS)
    parser.add_argument("--problems", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--powers", type=int, nargs="+", default=list(POWERS), help="starts, as powers of 10 times the best fixed rate")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = command.parsed(parser, arguments, batches=[2, 8], powers=[-4, 0, 4], seeds=1, steps=QUICK)
    print(small_batches_tables(command.complete(run, tasks(options), key, options)), end="")


if __name__ == "__main__":
    main()
