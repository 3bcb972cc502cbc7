"""Several scalars at once: two groups' rates, weight decay, dropout and label smoothing from a bad corner, against tuning one at a time.

    python -m benchmarks.evidence.scalars [--corners careful bold] [--seeds 2] [--jobs 2] [--quick] [--json FILE]

Eight replicas, each a process with its own gradients, its own values and batches of 16 of scikit-learn's digits; a `LineController` sweeps both
rates, then a `ProbeController` scores the replicas on images that are not trained on. Tuning trains one replica after the other, from the same corner, on the same budget or a little more:
a trial for each replica, and one for the probe. What it has found is then trained on eight replicas, too, at twice the budget. The budget is
counted in examples: one is a forward and a backward pass of it, a pass forward alone (the probe's, and tuning's choice between trials) is a
third. A process for each replica: expect ``--jobs 1`` to keep several cores busy while replicas run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import hdet

from ..harness import spawn
from . import command
from .problems.digits import Classifier, data, disturbed, held_out
from .report.scalars import CORNERS, EQUAL, GOOD, REPLICAS, SEEDS, scalars_tables
from .runs import Record, Task, finite, identity
from .training import BETAS, wsd_schedule

RESULTS = "benchmarks/results/evidence/scalars.jsonl"
STEPS, QUICK = 1600, 20
IMAGES, PROBED = 16, 12
"""examples of a replica's step, and of each of the eight mini-batches of a probe"""
CYCLE = 0.015
"""of the run: as long as a sweep lets it be"""
SPREAD, RATE_SPREAD = 0.4, 0.3
TRIALS = 16
FACTOR = 4.0
"""what tuning multiplies or divides a value by"""
TRAINED = 1000
"""images; the other 297 of the training set are for the probe, and for the choice between trials"""

Values = dict[str, float]


# -- the problem -----------------------------------------------------------------------------------------------------------


class Dropped(Classifier):
    """With dropout before the last layer."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.out = nn.Sequential(nn.Dropout(rate), self.out)


def groups(model: Dropped, values: Values) -> list[dict[str, Any]]:
    parts = {"conv": (model.conv1, model.conv2), "dense": (model.hidden, model.out)}
    return [
        {"name": name, "params": [p for part in modules for p in part.parameters()], "lr": values[f"lr/{name}"], "weight_decay": values["weight_decay"]}
        for name, modules in parts.items()
    ]  # fmt: skip


def batch(seed: int, number: int) -> tuple[Tensor, Tensor]:
    """One replica's step; of the trained images."""
    return _drawn(0, TRAINED, IMAGES, 10**9 * (seed + 1) + number)


def probe_batches(cycle: int) -> list[tuple[Tensor, Tensor]]:
    return [_drawn(TRAINED, len(data()[0]), PROBED, 8 * cycle + i) for i in range(8)]


def _drawn(first: int, end: int, count: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    chosen = torch.randint(first, end, (count,), generator=generator)
    return disturbed(data()[0][chosen], generator), data()[1][chosen]


@cache
def chosen_by() -> tuple[Tensor, Tensor]:
    """What tuning chooses by: the images of the probe, each disturbed four times."""
    images, labels = data()[0][TRAINED:], data()[1][TRAINED:]
    return disturbed(images.repeat(4, 1, 1, 1), torch.Generator().manual_seed(0)), labels.repeat(4)


@torch.no_grad()
def loss_on(model: nn.Module, examples: tuple[Tensor, Tensor]) -> float:
    """Mean loss in nats, eval mode, without smoothing; infinite after a crash."""
    model.eval()
    loss = F.cross_entropy(model(examples[0]), examples[1]).item()
    model.train()
    return loss if math.isfinite(loss) else math.inf


def prepared(values: Values, seed: int, steps: int) -> tuple[Dropped, torch.optim.Optimizer, LambdaLR]:
    torch.manual_seed(seed)
    model = Dropped(values["dropout"])
    optimizer = torch.optim.AdamW(groups(model, values), betas=BETAS)
    return model, optimizer, wsd_schedule(optimizer, steps)


# -- replicas --------------------------------------------------------------------------------------------------------------


def replica(rank: int, world_size: int, values: Values, seed: int, steps: int, control: bool) -> dict[str, Any]:
    """In each of the processes. Without ``control`` all replicas keep the values, and are averaged all the same."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # by which torch ends it with its parent
    model, optimizer, schedule = prepared(values, seed, steps)
    probed: list[int] = []

    def loss_fn(model: nn.Module, examples: tuple[Tensor, Tensor]) -> Tensor:
        probed.append(len(examples[1]))
        return F.cross_entropy(model(examples[0]), examples[1])

    smoothing = hdet.LabelSmoothing(values["label_smoothing"], SPREAD)
    knobs = [hdet.LearningRate(RATE_SPREAD, groups="each"), hdet.WeightDecay(SPREAD), hdet.Dropout(model, SPREAD), smoothing]
    probe = hdet.ProbeController(loss_fn, probe_batches, model=model, held_out=True)
    controller = hdet.SequentialController(hdet.LineController(model, late=False), probe)
    ensemble = hdet.Ensemble(
        optimizer,
        schedule,
        knobs=knobs if control else [hdet.LearningRate(0.0)],
        sync=hdet.Sync(max(1, int(CYCLE * steps)), gradients="local", moments="keep"),
        total_steps=steps,
        controller=controller if control else None,
        seed=seed,
    )

    def losses(images: Tensor, labels: Tensor) -> Tensor:
        smoothed = ensemble.value("label_smoothing") if control else values["label_smoothing"]
        return F.cross_entropy(model(images), labels, label_smoothing=smoothed, reduction="none")

    def scored(images: Tensor, labels: Tensor) -> Tensor:
        probed.append(len(labels))
        return losses(images, labels)

    torch.manual_seed(1000 * (seed + 1) + rank)  # replicas drop different units
    with contextlib.suppress(hdet.ReplicasDiverged):  # then no weight is finite
        for step in range(steps):
            images, labels = batch(seed, world_size * step + rank)
            with ensemble.explore():
                loss = losses(images, labels).mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ensemble.step(loss, closure=partial(scored, images, labels))
    found = {name: values[name] * ensemble.corrections[name] for name in values} if control else values
    seen = world_size * (steps * IMAGES + sum(probed) / 3)
    return {"validation": finite(loss_on(model, held_out())), "values": found, "samples": seen}


# -- one at a time ---------------------------------------------------------------------------------------------------------


def trial(values: Values, seed: int, steps: int) -> tuple[float, float]:
    """One replica by itself: the loss that is chosen by, and the held-out one."""
    model, optimizer, schedule = prepared(values, seed, steps)
    for step in range(steps):
        images, labels = batch(seed, step)
        F.cross_entropy(model(images), labels, label_smoothing=values["label_smoothing"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return loss_on(model, chosen_by()), loss_on(model, held_out())


def tune(values: Values, trials: int, score: Callable[[Values], tuple[float, float]]) -> list[tuple[float, Values]]:
    """(held-out loss, values) of the best trial so far, by the loss that is chosen by, after each trial.

    Each value in turn is multiplied by `FACTOR`, and if that is not better divided by it; round after round. Values stay below 0.9 where
    they are parts of 1. A direction that was just found is taken first in the next round.
    """
    best, chosen, held = dict(values), *score(values)
    history, up = [(held, best)], dict.fromkeys(values, True)
    for name in itertools.cycle(values):
        for rising in (up[name], not up[name]):
            if len(history) == trials:
                return history
            tried = {**best, name: best[name] * (FACTOR if rising else 1 / FACTOR)}
            if name in ("dropout", "label_smoothing"):
                tried[name] = min(tried[name], 0.9)
            loss, validation = score(tried)
            better = loss < chosen
            if better:
                best, chosen, held, up[name] = tried, loss, validation, rising
            history.append((held, best))
            if better:
                break
    raise AssertionError("values is empty")


def one_at_a_time(rank: int, world_size: int, values: Values, seed: int, steps: int, trials: int) -> dict[str, Any]:
    """In a process of its own. ``samples``: up to what counts; later trials are only on the curve."""
    history = tune(values, trials, lambda tried: trial(tried, seed, steps))
    counted = min(EQUAL, trials)
    held, found = history[counted - 1]
    return {
        "validation": finite(held), "values": found, "samples": counted * (steps * IMAGES + len(chosen_by()[1]) / 3),
        "curve": [finite(loss) for loss, _ in history], "last_values": history[-1][1],
    }  # fmt: skip


# -- the command -----------------------------------------------------------------------------------------------------------


def run(method: str, corner: str, seed: int, steps: int, values: Values, trials: int) -> Record:
    """One line of the results. ``values``: those the run begins with."""
    began = time.perf_counter()
    if method == "one-at-a-time":
        result = started(one_at_a_time, 1, values, seed, steps, trials)
    else:
        result = started(replica, REPLICAS, values, seed, steps, method == "hdet-probe")
    return {
        "benchmark": "scalars", "problem": "digits", "method": method, "corner": corner, "seed": seed, "steps": steps, "start": values,
        "curve": None, **result, "seconds": time.perf_counter() - began,
    }  # fmt: skip


def started(function: Callable[..., dict[str, Any]], count: int, *arguments: Any) -> dict[str, Any]:
    """`spawn`, from a server that has imported everything once, also what optimizers import late: imports would cost more than the runs."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["__main__", "sklearn.datasets", "hdet.ensemble", "torch._dynamo"])
    return dict(spawn(function, count, *arguments, start_method="forkserver"))


key = identity("method", "corner", "seed", "steps")


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    """Seed by seed, so that a benchmark that is stopped has something of everything."""
    more = {"steps": QUICK if options.quick else STEPS, "trials": 4 if options.quick else TRIALS}
    for seed in range(options.seeds):
        yield {"method": "good", "corner": "", "seed": seed, "values": GOOD, **more}
        for corner in options.corners:
            for method in ("hdet-probe", "corner", "one-at-a-time"):
                yield {"method": method, "corner": corner, "seed": seed, "values": CORNERS[corner], **more}


def trained_again(wanted: Sequence[Task], records: Sequence[Record]) -> list[Task]:
    """What tuning has found at equal compute, on all replicas."""
    found = {key(record): record["values"] for record in records}
    return [{**task, "method": "tuned", "values": found[key(task)]} for task in wanted if task["method"] == "one-at-a-time"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command.parser(__doc__, RESULTS, f"one seed, one corner, {QUICK} steps, four trials", seeds=SEEDS)
    parser.add_argument("--corners", nargs="+", choices=CORNERS, default=list(CORNERS))
    options = command.parsed(parser, arguments, corners=[next(iter(CORNERS))], seeds=1)
    wanted = list(tasks(options))
    lines = command.complete(run, wanted, key, options, forks=True)
    lines += command.complete(run, trained_again(wanted, lines), key, options, forks=True)
    print(scalars_tables(lines), end="")


if __name__ == "__main__":
    main()
