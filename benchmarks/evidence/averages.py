"""Replicas with gradients of their own, and averages over time, beside data parallel at its best
rate, decay and label smoothing, on the same examples.

    python -m benchmarks.evidence.averages [--workloads noisy-mlp ...] [--methods "local 64" ...]

A method is tuned on `TUNING` seeds by validation losses: from data parallel's best values to the
next ones of the grid, until the best of all that was tried has all its neighbours around it. Then
five other seeds are trained, and tested on examples that no choice has seen. Every seed has its own
first weights, training examples, wrong labels and order, the same for all methods. A method of
`AROUND` is not tuned but for the knob that replicas differ in.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from statistics import fmean

from hdet.core.spread import Grid

from ..tables import crossed, standard_error
from ..tables import table as markdown
from .experiment import Column, Experiment, Record, finite
from .small import DEVELOPMENT, TEST, WORKLOADS, tested, validated
from .stack import Method, Point, Workload, train

TUNING, FINAL = (100, 101), (0, 1, 2, 3, 4)
DECAYS = {
    "sgd": (0.0, 2.5e-4, 1e-3, 4e-3, 0.016, 0.064, 0.256),
    "adamw": (0.0, 0.0125, 0.05, 0.2, 0.8, 3.2, 12.8),
    "plus": (0.0, 1.25, 5.0, 20.0, 80.0, 320.0, 1280.0),
}
SMOOTHINGS = (0.0, 0.05, 0.1, 0.2)
ROUNDS = 8
BASE, PAPER, LOCAL = "data parallel", "shared gradients, lr", "local 16"

METHODS: dict[str, Method] = {
    BASE: Method(replicas=False),
    "local 4": Method(every=4),
    LOCAL: Method(every=16),
    "local 64": Method(every=64),
    "quadratic": Method(every=4, quadratic=2.0),
    "one average": Method(),
    "second half": Method(shared=0.5),
    "outer 16": Method(every=16, outer=True),
    "outer 16, one worker": Method(replicas=False, every=16, outer=True),
    "EMA": Method(replicas=False, ema=0.99),
    "EMA, constant rate": Method(replicas=False, ema=0.99, constant=True),
    "local 64, EMA, constant rate": Method(every=64, ema=0.99, constant=True),
    "schedule-free": Method(replicas=False, free="free"),
    "ScheduleFree+": Method(replicas=False, free="plus"),
}
GRIDS = {"30 %": Grid(0.3), "2 x": Grid(ratio=2.0)}
KNOBS: dict[str, tuple[float, ...]] = {
    "lr": (),
    "weight_decay": (),
    "label_smoothing": (0.05, 0.1, 0.2),
    "dropout": (0.05, 0.1, 0.2, 0.4),
    "strength": (0.5, 1.0, 2.0),
}
"""Values of which the best one is taken; without, the tuned one."""


@dataclass(frozen=True)
class Around:
    """Replicas that differ in a knob, at the values of another method and without tuning again."""

    of: str
    knob: str
    grid: Grid
    method: Method


AROUND = {
    f"{PAPER}, 30 %": Around(BASE, "lr", Grid(0.3), Method(every=16, shared=1.0)),
    **{
        f"{LOCAL}, {knob}, {name}": Around(LOCAL, knob, grid, METHODS[LOCAL])
        for knob in KNOBS
        for name, grid in GRIDS.items()
    },
}
Place = tuple[int, int, int]
"""In the grid: rate, a power of 2; decay; smoothing."""


# -- tuning ----------------------------------------------------------------------------------------


def is_smoothed(workload: Workload) -> bool:
    return 0 < workload.classes <= 10


def point_of(workload: Workload, method: Method, place: Place) -> Point:
    """ScheduleFree+ multiplies the rate that it finds."""
    plus = method.free == "plus"
    return {
        "lr": (1.0 if plus else workload.rate) * 2.0 ** place[0],
        "weight_decay": DECAYS["plus" if plus else workload.optimizer][place[1]],
        "label_smoothing": SMOOTHINGS[place[2]],
    }


def neighbours(workload: Workload, place: Place) -> Iterator[Place]:
    rate, decay, smoothing = place
    for i, j in product((-1, 0, 1), repeat=2):
        if 0 <= decay + j < len(DECAYS["sgd"]):
            yield rate + i, decay + j, smoothing
    for k in (-1, 1) if is_smoothed(workload) else ():
        if 0 <= smoothing + k < len(SMOOTHINGS):
            yield rate, decay, smoothing + k


@dataclass(frozen=True)
class Tuned:
    place: Place
    loss: float
    tried: int
    inside: bool
    """Has the best place all its neighbours around it?"""


@cache
def tuned(name: str, key: str, workers: int) -> Tuned:
    workload, method = WORKLOADS[name], METHODS[key]
    losses: dict[Place, float] = {}
    if key == BASE:
        at = (0, 2, 0)
        wanted: Sequence[Place] = [(i, j, 0) for i in range(-2, 3) for j in range(5)]
    else:
        rate, decay, smoothing = tuned(name, BASE, 1).place
        shift = {"free": 2 if workload.optimizer == "adamw" else 3, "plus": -rate}
        at = (rate + shift.get(method.free, 0), decay, smoothing)
        wanted = list(neighbours(workload, at))
    for _ in range(ROUNDS):
        points = [point_of(workload, method, place) for place in wanted]
        found = validated(name, train(workload, method, workers, points, TUNING), [*TUNING])
        losses |= dict(zip(wanted, found.mean(1).tolist(), strict=True))
        at = min(losses, key=losses.__getitem__)
        wanted = [place for place in neighbours(workload, at) if place not in losses]
        if not wanted:
            break
    return Tuned(at, losses[at], len(losses), not wanted)


# -- a run -----------------------------------------------------------------------------------------


def finals(name: str, method: Method, workers: int, point: Point) -> Record:
    """Losses and accuracies of the final seeds, on the test."""
    losses, right = tested(name, train(WORKLOADS[name], method, workers, [point], FINAL))
    accuracies = [round(100 * hit, 3) for hit in right[0].tolist()]
    made = [finite(round(loss, 5)) for loss in losses[0].tolist()]
    return {"losses": made, "accuracies": accuracies if WORKLOADS[name].classes else None}


@cache
def knob_point(name: str, of: str, knob: str, workers: int) -> Point:
    """The tuned values, and the best one of the knob."""
    workload, source = WORKLOADS[name], METHODS[of]
    found = tuned(name, of, workers if source.replicas else 1)
    point = point_of(workload, source, found.place)
    if values := KNOBS[knob]:
        points = [{**point, knob: value} for value in values]
        ends = train(workload, source, workers, points, TUNING)
        return points[int(validated(name, ends, [*TUNING]).mean(1).argmin())]
    # around 0 nothing differs
    return {**point, knob: point[knob] or DECAYS[workload.optimizer][2]}


def around(name: str, how: Around, workers: int) -> Record:
    """The final losses of replicas that differ in the knob, at its best value, and of those that
    do not, at the mean of the values."""
    point = knob_point(name, how.of, how.knob, workers)
    spread = replace(how.method, spread={how.knob: how.grid})
    mean = point[how.knob] * fmean(how.grid.points(workers))
    plain = finals(name, how.method, workers, {**point, how.knob: mean})
    beside = {f"{key}_alike": value for key, value in plain.items()}
    return {**beside, **finals(name, spread, workers, point), "point": point}


def run(workload: str, method: str, workers: int) -> Record:
    if method in AROUND:
        return around(workload, AROUND[method], workers)
    found = tuned(workload, method, workers)
    point = point_of(WORKLOADS[workload], METHODS[method], found.place)
    of = {"point": point, "tried": found.tried, "inside": found.inside}
    return {
        **of,
        "validation": finite(found.loss),
        **finals(workload, METHODS[method], workers, point),
    }


def plan(options: argparse.Namespace) -> list[Record]:
    """Without what does not apply; one worker, where the method has no replicas."""
    tasks = []
    for workload, method, workers in product(options.workloads, options.methods, options.workers):
        one = method in METHODS and not METHODS[method].replicas
        knob = AROUND[method].knob if method in AROUND else ""
        if (
            (one and workers != options.workers[0])
            or (knob == "strength" and not WORKLOADS[workload].draw)
            or (knob == "label_smoothing" and not is_smoothed(WORKLOADS[workload]))
            or (workers == 8 and method not in EIGHT)
        ):
            continue
        tasks.append({"workload": workload, "method": method, "workers": 1 if one else workers})
    return tasks


EIGHT = ("local 64", "one average")
"""Methods that are run with eight workers, too."""


# -- tables ----------------------------------------------------------------------------------------


Difference = tuple[float, float]
"""Mean of paired seeds, and its standard error."""
CLEAR = 2.78
"""Errors of a mean of five at which it differs from 0 with 95 %."""


def paired(own: Sequence[float], base: Sequence[float], unit: float = 1.0) -> Difference:
    parts = [(a - b) / unit for a, b in zip(own, base, strict=True)]
    return fmean(parts), standard_error(parts)


def shown(one: Difference | None) -> str:
    return "" if one is None else f"{one[0]:+.1f}±{one[1]:.1f}"


@dataclass(frozen=True)
class Beside:
    """A method beside data parallel, or replicas that differ beside those that do not."""

    workload: str
    loss: Difference
    """Percent."""
    points: Difference | None
    """Of accuracy."""


def compared(records: Sequence[Record]) -> dict[tuple[str, int], list[Beside]]:
    """By method and workers."""
    base = {r["workload"]: r for r in records if r["method"] == BASE}
    made: dict[tuple[str, int], list[Beside]] = {}
    for r in records:
        end = "_alike" if r["method"] in AROUND else ""
        beside = r if end else base.get(r["workload"])
        if beside is None or r["method"] == BASE:
            continue
        losses, accuracies = beside["losses" + end], beside["accuracies" + end]
        own = [math.inf if loss is None else loss for loss in r["losses"]]
        points = paired(r["accuracies"], accuracies) if accuracies else None
        loss = paired(own, losses, fmean(losses) / 100)
        one = Beside(r["workload"], loss, points)
        made.setdefault((r["method"], r["workers"]), []).append(one)
    return made


def mean(differences: Sequence[Difference]) -> Difference | None:
    if not differences:
        return None
    return (
        fmean(value for value, _ in differences),
        math.hypot(*(error for _, error in differences)) / len(differences),
    )


def cell(differences: Sequence[Difference]) -> str:
    """The mean, and on how many workloads it is clearly better and worse."""
    better = sum(value < -CLEAR * error for value, error in differences)
    worse = sum(value > CLEAR * error for value, error in differences)
    return f"{shown(mean(differences))} ({better}:{worse})" if differences else ""


def summary(records: Sequence[Record]) -> str:
    """Loss beside data parallel's, in percent."""
    rows = []
    for (method, workers), lot in compared(records).items():
        if method in METHODS:
            often = [one for one in lot if WORKLOADS[one.workload].epochs > 1]
            halves = [[x.loss for x in often if x.workload in half] for half in (DEVELOPMENT, TEST)]
            points = mean([one.points for one in often if one.points])
            once = [one.loss for one in lot if one not in often]
            rows.append([method, workers, *map(cell, halves), shown(points), cell(once)])
    rows.sort(key=lambda row: (row[1] == 8, [*METHODS].index(row[0])))
    rows = [[f"{name}, 8 workers" if n == 8 else name, *more] for name, n, *more in rows]
    heads = ["method", "epochs, development", "epochs, test", "accuracy", "one epoch"]
    return markdown(heads, rows)


def of_knobs(records: Sequence[Record]) -> str:
    """Loss of replicas that differ beside those that do not, in percent."""
    found = compared(records)
    of = {f"{LOCAL}, {knob}": [f"{LOCAL}, {knob}, {name}" for name in GRIDS] for knob in KNOBS}
    of = {PAPER: [f"{PAPER}, {name}" for name in GRIDS]} | of
    loss = lambda key: [one.loss for one in found.get((key, 4), [])]
    rows = ([name, *(cell(loss(key)) for key in keys)] for name, keys in of.items())
    return markdown(["replicas differ in", *GRIDS], rows)


def by_workload(records: Sequence[Record]) -> str:
    found = compared(records)
    epochs = {r["workload"]: round(WORKLOADS[r["workload"]].epochs) for r in records}
    names = {f"{name} ({epochs[name]})": (name,) for name in ALL if name in epochs}
    names["mean"] = tuple(epochs)
    names["mean of the test half"] = TEST

    def one(key: tuple[str, int], workloads: Sequence[str]) -> str:
        return shown(mean([of.loss for of in found.get(key, []) if of.workload in workloads]))

    return crossed(
        "workload (epochs)", names, {key[0]: key for key in SHOWN}, lambda w, key: one(key, w)
    )


SHOWN = (("local 64", 4), ("EMA, constant rate", 1), ("schedule-free", 1))


def table(records: Sequence[Record]) -> str:
    return "\n".join(of(records) for of in (summary, of_knobs, by_workload))


ALL = (*DEVELOPMENT, *TEST)
EXPERIMENT = Experiment(
    "averages", __doc__, run,
    (
        Column("workload", ALL, ["cancer"], ALL),
        Column("method", (*METHODS, *AROUND), [BASE, LOCAL], (*METHODS, *AROUND)),
        Column("workers", (4, 8), [4], option="workers"),
    ),
    table,
    jobs=1,
    same=("workload", "method", "workers"),
    plan=plan,
)  # fmt: skip

if __name__ == "__main__":
    EXPERIMENT.main()
