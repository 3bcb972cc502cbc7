"""What runs did, as one page for a browser that needs nothing else: no script, no network, no fonts. Needs a run's files only, no torch.

The outcome in a sentence comes first, then a card for each run, then charts (`hdet.cli.charts`), each with a sentence on what it shows and its
numbers in a table. The charts are drawn here and not by matplotlib: its SVG has fixed colours and scales its text with the drawing, so that a
page would need one for each theme and each width, and it has no values under the pointer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from string import Template
from typing import Any

import hdet
from hdet.cli.charts import (
    Point,
    Series,
    figure,
    linear,
    log,
    number,
    safe,
    smooth,
    symlog,
    table,
    until,
)
from hdet.cli.runs import RunFiles
from hdet.cli.trial_figure import trial_figure

COLOURS = 6
"""of the page, for runs that are not the fixed schedule"""
OPEN = 12
"""events that are shown without being asked for"""
REPLICAS = 16
"""of a row of a table at most"""


@dataclass(frozen=True)
class _Shown:
    """A run with its name and colour on the page."""

    run: RunFiles
    name: str
    colour: str

    @property
    def yours(self) -> float:
        """The peak of the untouched schedule."""
        return float(self.run.config["max_lr"])

    @property
    def correction(self) -> float:
        """Of the schedule, in the end."""
        return float(next((r["correction"] for r in reversed(self.run.of("train"))), 1.0))

    @property
    def controller(self) -> str:
        return "none (fixed schedule)" if self.run.is_fixed else str(self.run.config.get("controller", "unknown"))

    @property
    def steps(self) -> float:
        """That have been done."""
        return max((r["step"] for r in self.run.records), default=0)

    @property
    def length(self) -> float:
        """Steps of its charts."""
        return max(1.0, float(self.run.config["steps"]), float(self.steps))

    @property
    def cost(self) -> tuple[str, str]:
        """Of what the controller computes besides: for the card, and as a sentence."""
        spent, end = self.run.trial_cost, self.run.end
        if spent:
            part = 100 * spent / max(self.steps, 1)
            took = f"as much as {number(round(spent))} steps, {part:.1f} % of the run"
            return f"trial: {took}", f"The trial cost {took}."
        if any(record["probe"] for record in self.run.cycles):
            took = "" if end is None else f"{end['probe_percent']:.1f} % of the training time"
            return f"probes: {took or 'not known yet'}", f"Probes took {took}." if took else "What probes took is told at the end."
        return "nothing", "No compute went into trials."


def page(runs: Sequence[RunFiles]) -> str:
    """The page. Raises RunFolderError if a record of a cycle is damaged."""
    shown = list(_named(runs))
    end = max([1.0, *(one.length for one in shown)])
    names = ", ".join(one.name for one in shown)
    body = [f'<header><p class="over">hdet report: {safe(names)}</p>{_headline(shown)}</header>', _cards(shown)]
    body += [_losses(shown, end), _rates(shown, end)]
    for one in shown:
        if not one.run.is_fixed:
            body += [f"<section><h2>{safe(one.name)}</h2>", *_belief(one), *_replicas(one), _events(one), "</section>"]
    body.append(_footer(shown))
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.substitute(title=safe(f"hdet report: {names}"), body="\n".join(filter(None, body)))


def _named(runs: Sequence[RunFiles]) -> Iterator[_Shown]:
    names = [run.name for run in runs]
    others = 0
    for run in runs:
        # Two comparisons have two runs called "hdet".
        name = run.name if names.count(run.name) == 1 else f"{run.folder.resolve().parent.name}/{run.name}"
        others += not run.is_fixed
        yield _Shown(run, name, "s0" if run.is_fixed else f"s{1 + (others - 1) % COLOURS}")


# -- the outcome -----------------------------------------------------------------------------------------------------------


def _headline(shown: Sequence[_Shown]) -> str:
    """What came out, of the best run that is not the fixed schedule; what its rate was and became;
    what a trial took."""
    candidates = [one for one in shown if not one.run.is_fixed] or list(shown)
    best = min(candidates, key=lambda one: float("inf") if one.run.validation is None else one.run.validation)
    validation, ended = best.run.validation, best.run.end is not None
    where = "ends at" if ended else f"has not ended: at step {number(best.steps)} of {number(best.run.config['steps'])} it is at"
    if validation is None:
        first = f"{best.name} has no finite validation loss{' any more' if best.run.of('validation') else ' yet'}"
    else:
        first = f"{best.name} {where} a validation loss of {validation:.4f} nats per byte"
        kind = " with a controller" * (len(candidates) < len(shown))
        first += f", the lowest of {len(candidates)} runs{kind}" if len(candidates) > 1 else ""
        fixed = next((one.run for one in shown if one.run.is_fixed and one.run.validation is not None), None)
        if fixed is not None and fixed.validation is not None and not best.run.is_fixed:
            side = "below" if validation < fixed.validation else "above"
            first += f", {abs(fixed.validation - validation):.4f} {side} the fixed schedule"
            other = [f"{fixed.config[key]} {key}" for key in ("steps", "replicas") if fixed.config.get(key) != best.run.config.get(key)]
            first += f", which had {' and '.join(other)}" if other else ""
    yours, factor = best.yours, best.correction
    if best.run.is_fixed or factor == 1:
        rate = f"The learning rate stayed on its schedule, whose peak is {number(yours)}."
    else:
        rate = f"The learning rate's schedule had a peak of {number(yours)}. In the end it was multiplied by {number(factor)}, "
        rate += f"to a peak of {number(yours * factor)}."
    return f'<h1>{safe(first)}.</h1><p class="lead">{safe(rate)} {safe(best.cost[1])}</p>'


def _cards(shown: Sequence[_Shown]) -> str:
    return f'<h2 class="unseen">The runs beside each other</h2><div class="cards">{"".join(map(_card, shown))}</div>'


def _card(one: _Shown) -> str:
    run, end = one.run, one.run.end
    facts = {"controller": one.controller, "peak rate": number(one.yours)}
    if not run.is_fixed:
        facts["peak rate"] += f" → {number(one.yours * one.correction)}" if one.correction != 1 else ", kept"
        averaging = "" if end is None else f"{end['converge_percent']:.1f} % of the time"
        facts |= {"besides": one.cost[0], "averaging": averaging}
    facts |= {"replicas": str(run.config.get("replicas", "")), "time": "" if end is None else f"{end['seconds']:.1f} s"}
    facts["steps"] = f"{number(one.steps)} of {number(run.config['steps'])}" + (", not ended" if end is None else "")
    loss = "no finite loss" if run.validation is None else f"{run.validation:.4f}"
    lines = "".join(f"<dt>{key}</dt><dd>{safe(value)}</dd>" for key, value in facts.items() if value)
    return f'<article class="card {one.colour}"><h3>{safe(one.name)}</h3><b>{loss}</b><span class="soft">validation, nats per byte</span><dl>{lines}</dl></article>'


# -- charts ----------------------------------------------------------------------------------------------------------------


def _same(records: Sequence[dict[str, Any]], key: str) -> list[Point]:
    return [(r["step"], r[key], r[key]) for r in records]


def _smoothed(points: Sequence[Point], width: int) -> list[Point]:
    return [(step, mean, mean) for (step, _, _), mean in zip(points, smooth([low for _, low, _ in points], width), strict=True)]


def _width(points: Sequence[object], least: int = 1) -> int:
    """Of a running mean: a sixtieth of them, at ``least`` so many."""
    return max(least, len(points) // 60) | 1


def _losses(shown: Sequence[_Shown], end: float) -> str:
    series, framed, tables, gaps, above = [], list[float](), "", 0, 0
    for one in shown:
        points, marks = _same(one.run.of("train"), "loss"), _same(one.run.of("validation"), "loss")
        gaps += sum(value is None for _, value, _ in [*points, *marks])
        late = [value for step, value, _ in points if value is not None and step > 0.1 * one.run.config["steps"]]
        framed += late + [value for _, value, _ in marks if value is not None]
        series += [
            Series(f"{one.name}, training", one.colour, points, "pale", told=False),
            Series(f"{one.name}, training", one.colour, _smoothed(points, _width(points, 7))),
            Series(f"{one.name}, validation", one.colour, marks, "dots"),
        ]
        if moved := _moves(one):
            series.append(Series(f"{one.name}, rate moved", one.colour, moved, "marks"))
        tables += table(f"{one.name}: training loss", ["step", "loss"], [p[:2] for p in points])
        tables += table(f"{one.name}: validation loss", ["step", "loss"], [p[:2] for p in marks])
    scale = linear(framed)
    above = sum(value > scale.high for one in series for _, value, _ in one.points if value is not None and not one.told)
    says = "Lower is better: training loss as a running mean over what was recorded (pale), and validation loss (dots)."
    says += f" {above} training losses lie above the frame." if above else ""
    says += f" {gaps} losses are not finite: gaps." if gaps else ""
    return figure("Loss", says, series, scale, until(end), "nats per byte", tables)


def _moves(one: _Shown) -> list[Point]:
    """Where a search has moved the rate: the first steps recorded with another correction."""
    train = one.run.of("train") if one.run.trials else []
    pairs = pairwise(train)
    return [(r["step"], None, None) for last, r in pairs if r["correction"] != last["correction"]]


def _rates(shown: Sequence[_Shown], end: float) -> str:
    series, schedules, tables, peaks = [], dict[str, Series](), "", list[float]()
    for one in shown:
        train = one.run.of("train")
        # The correction multiplies the schedule, so the quotient is the schedule.
        schedule: list[Point] = [(r["step"], r["lr"] / r["correction"], r["lr"] / r["correction"]) for r in train]
        series.append(Series(one.name, one.colour, _same(train, "lr")))
        known = str([one.run.config.get(key) for key in ("max_lr", "steps", "pct_start")])
        schedules.setdefault(
            known, Series(f"schedule of {number(one.run.config['steps'])} steps, peak {number(one.yours)}", "ink", schedule, "dashed")
        )
        peaks += [max((p[1] or 0 for p in points), default=0.0) for points in (series[-1].points, schedule)]
        rows = [(r["step"], r["lr"], p[1], r["correction"]) for r, p in zip(train, schedule, strict=True)]
        tables += table(f"{one.name}: rate", ["step", "base rate", "schedule", "correction"], rows)
    known_peaks = [peak for peak in peaks if peak > 0]
    scale = log([min(known_peaks) / 200, max(known_peaks)] if known_peaks else [])
    says = "The base rate, which all replicas share (solid), is the schedule (dashed) times a correction: where they part, a controller has moved it."
    says += " The end of a schedule leaves the frame." if any(0 < p[1] < scale.low for one in series for p in one.points if p[1]) else ""
    series += schedules.values()
    unit = "base rate, log scale"
    return figure("Learning rate", says, series, scale, until(end), unit, tables)


# -- one run ---------------------------------------------------------------------------------------------------------------


def _belief(one: _Shown) -> Iterator[str]:
    """What the controller went by: its slopes, its trials."""
    trials, end = one.run.trials, one.length
    slopes: list[tuple[float, float, float]] = []
    for record in one.run.cycles:
        slope, error = (next(iter(record[key].values()), None) for key in ("slopes", "errors"))
        if slope is not None and error is not None:
            slopes.append((record["step"], slope, error))
    if slopes:
        near = 4 * max(sorted(error for _, _, error in slopes)[len(slopes) // 2], 1e-12)
        bands: list[Point] = [(step, slope - error, slope + error) for step, slope, error in slopes]
        means = _smoothed([(step, slope, slope) for step, slope, _ in slopes], _width(slopes))
        series = [
            Series("± one standard error", one.colour, bands, "band", told=False),
            Series("slope", one.colour, means),
            Series("zero", "ink", [(0, 0.0, 0.0), (end, 0.0, 0.0)], "zero", told=False),
        ]
        sure = sum(abs(slope) > 2 * abs(error) for _, slope, error in slopes)
        last, width = slopes[-1][0], _width(slopes)
        says = (
            "How the loss changes with the rate, ± one standard error: below zero, a higher rate "
            f"was better. In {sure} of {len(slopes)} cycles the slope was more than two errors from "
            "zero."
        )
        says += f" None was measured after step {number(last)}." if last < 0.9 * one.steps else ""
        says += f" The line is a running mean over {width} cycles." if width > 1 else ""
        ends = [v for _, low, high in bands for v in (low, high) if v is not None]
        numbers = table("Slopes", ["step", "slope", "standard error"], slopes)
        unit = "d loss / d ln rate, linear near zero and logarithmic beyond"
        scale = symlog(ends, near)
        yield figure("Slope of the loss", says, series, scale, until(end), unit, numbers)
    for step, interval in trials:
        when = f", step {number(step)}" if len(trials) > 1 else ""
        yield trial_figure(interval, one.colour, when)
    if not slopes and not trials:
        why = "The controller tells no slope and no interval"
        why = "Nothing moves the rate" if one.controller == "none" else why
        yield f"<p>{why} in this run.</p>"


_SIDES = (("lower", "s1", "multiplier below 1"), ("same", "s0", "multiplier 1"), ("higher", "s2", "multiplier above 1"))


def _replicas(one: _Shown) -> Iterator[str]:
    """Their losses, by which side of the base rate they trained on."""
    probed = any(record["probe"] for record in one.run.cycles)
    sides: dict[str, list[tuple[float, list[float]]]] = {side: [] for side, _, _ in _SIDES}
    rows, votes = [], list[bool]()
    for record in one.run.cycles:
        multipliers: Sequence[float] = next(iter(record["multipliers"].values()), [])
        pairs = list(zip(multipliers, (record["probe"] if probed else record["losses"]) or [], strict=False))
        known = [(m, loss) for m, loss in pairs if loss is not None]
        if len(pairs) < 2:
            continue
        more = f", and {len(pairs) - REPLICAS} more" if len(pairs) > REPLICAS else ""
        listed = ", ".join(f"{number(m)}: {'not counted' if loss is None else number(loss)}" for m, loss in pairs[:REPLICAS])
        rows.append((record["step"], listed + more))
        mean = fmean(loss for _, loss in known) if known else 0.0
        parted = {
            "lower": [x - mean for m, x in known if m < 1],
            "same": [x - mean for m, x in known if m == 1],
            "higher": [x - mean for m, x in known if m > 1],
        }
        for side, values in parted.items():
            sides[side].append((record["step"], values))
        if parted["lower"] and parted["higher"]:
            votes.append(fmean(parted["higher"]) < fmean(parted["lower"]))
    if not rows:
        yield "<p>One replica, or no losses of several: there is nothing to compare.</p>"
        return
    series = []
    for side, colour, name in _SIDES:
        if any(values for _, values in sides[side]):
            bands: list[Point] = [(step, min(v), max(v)) if v else (step, None, None) for step, v in sides[side]]
            means: list[Point] = [(step, fmean(v), fmean(v)) if v else (step, None, None) for step, v in sides[side]]
            series += [Series(name, colour, bands, "band", told=False), Series(name, colour, _smoothed(means, _width(means)))]
    what = "Probe losses, of the same mini-batches for all" if probed else "Training losses of a cycle, of other batches for each"
    says = f"{what}: each replica's less the mean of all. Lines are running means, bands from the lowest to the highest. "
    better = f"Replicas with higher rates were the better ones in {sum(votes)} of {len(votes)} cycles."
    says += better if votes else "All trained at the same rate."
    values = sorted(abs(v) for of_side in sides.values() for _, part in of_side for v in part)
    # A few outliers, of the first steps or before a replica breaks, must not flatten the rest.
    near = max(values[len(values) // 2] if values else 0.0, 1e-9)
    scale = symlog([-values[-1], values[-1]] if values else [], 4 * near)
    numbers = table("Multiplier and loss of each replica", ["step", "multiplier: loss"], rows, words=True)
    unit = "loss less the mean, linear near zero and logarithmic beyond"
    yield figure("Replicas", says, series, scale, until(one.length), unit, numbers)


_LOST = {"train": "training loss not finite", "validation": "validation loss not finite"}


def _events(one: _Shown) -> str:
    """Who was left out, what was taken back, and the notes, in order of time; once what stands in one record after the other."""
    cycles, events = iter(one.run.cycles), list[tuple[str, list[float]]]()
    going: dict[str, dict[str, list[float]]] = {}  # by kind of record: what the last one said, and since when
    for record in one.run.records:
        kind = record["event"]
        said = [_LOST[kind]] if kind in _LOST and record["loss"] is None else []
        if kind == "cycle":
            cycle = next(cycles)
            said = [f"replica {r} left out" for r in cycle["left_out"]] + ["cycle taken back"] * cycle["rolled_back"] + cycle["notes"]
        before, going[kind] = going.get(kind, {}), {}
        for what in said:
            steps = before.get(what, [])
            if not steps:
                events.append((what, steps))
            steps.append(record["step"])
            going[kind][what] = steps
    if not events:
        return "<h3>Events</h3><p>None: no replica was left out, and there is no note.</p>"
    rows = [
        (number(steps[0]), what) if len(steps) == 1 else (f"{number(steps[0])} to {number(steps[-1])}", f"{what} ({len(steps)} times)")
        for what, steps in sorted(events, key=lambda event: event[1][0])
    ]
    left, back = sum(len(r["left_out"]) for r in one.run.cycles), sum(r["rolled_back"] for r in one.run.cycles)
    says = f"Replicas left out of an average: {left}. Cycles taken back: {back}."
    hidden = len(rows) - OPEN
    first, others = (table("", ["step", "event"], part, words=True) for part in (rows[:OPEN], rows[OPEN:]))
    more = f"<details><summary>{hidden} more</summary>{others}</details>" if hidden > 0 else ""
    return f"<h3>Events</h3><p{' class=warn' * bool(left + back)}>{says}</p>{first}{more}"


def _footer(shown: Sequence[_Shown]) -> str:
    settings = "".join(table(one.name, ["setting", "value"], [(k, str(v)) for k, v in sorted(one.run.config.items())]) for one in shown)
    return (
        f"<footer><details><summary>Settings of the runs</summary>{settings}</details>"
        f"<p>Written by hdet report, version {hdet.__version__}, from {safe(', '.join(str(one.run.folder) for one in shown))}. "
        "Point at a chart to read its values. What is not finite is left out of the lines as a gap.</p></footer>"
    )
