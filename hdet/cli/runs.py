"""Runs read back from their histories (`hdet.logging.History`). Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from hdet.logging import CycleRecord, read_records
from hdet.trial.budget import Budget
from hdet.trial.rule import RateInterval

HISTORY = "history.jsonl"
LARGEST = 1e30
"""A larger number counts as not finite: it cannot be drawn."""

Record = dict[str, Any]
Points = list[tuple[float, float]]
"""Steps and values. A value that is not finite is NaN."""


@dataclass
class RecordedRun:
    """What one history says.

    Attributes:
        losses, validation: training and validation losses.
        rates, schedule: the learning rate's base values, and what the untouched schedule has.
        cycle_losses, cycle_rates: the mean losses of cycles and their base values, which stand in
            where nobody has recorded ``train`` events.
        trials: the steps before which they were recorded, and what they measured.
        findings: of each trial, in lines.
        explored: by knob, of each cycle whose replicas differed: the step, and their values beside
            their losses.
        events: sentences, by step: moved values, notes.
        moves: steps at which a correction has changed.
        trial_cost: of all trials, as a part of the run. None: there was no trial.
        seconds: of training. None: the run has not ended.
        probe_ms, converge_ms: of all cycles.
    """

    name: str
    settings: Record = field(default_factory=dict)
    losses: Points = field(default_factory=list)
    validation: Points = field(default_factory=list)
    rates: Points = field(default_factory=list)
    schedule: Points = field(default_factory=list)
    cycle_losses: Points = field(default_factory=list)
    cycle_rates: Points = field(default_factory=list)
    trials: list[tuple[float, RateInterval]] = field(default_factory=list)
    findings: list[list[str]] = field(default_factory=list)
    explored: dict[str, list[tuple[float, Points]]] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    moves: list[float] = field(default_factory=list)
    trial_cost: float | None = None
    seconds: float | None = None
    probe_ms: float = 0.0
    converge_ms: float = 0.0
    cycles: int = 0
    last_cycle: CycleRecord | None = None

    def add(self, record: Record) -> None:
        """Raises what reading wrong data raises. Events of other names are left out."""
        event = record.get("event")
        if event == "start":
            self.settings.update(record.get("settings", {}))
        elif event == "train":
            self.losses.append((_number(record["step"]), _number(record["loss"])))
            if "lr" in record:
                self.rates.append((_number(record["step"]), _number(record["lr"])))
        elif event == "validation":
            self.validation.append((_number(record["step"]), _number(record["loss"])))
        elif event == "cycle":
            self._add_cycle(cast(CycleRecord, record))
        elif event == "end":
            self.seconds = _number(record["seconds"])

    def _add_cycle(self, record: CycleRecord) -> None:
        step, last = _number(record["step"]), self.last_cycle
        losses = [_number(loss) for loss in record["losses"]]
        finite = [loss for loss in losses if not math.isnan(loss)]
        self.cycle_losses.append((step, sum(finite) / len(finite) if finite else math.nan))
        if "lr" in record["values"]:
            self.cycle_rates.append((step, _number(record["values"]["lr"])))
            self.schedule.append((step, _number(record["scheduled"]["lr"])))
        for name, row in record["tried"].items():
            if len(set(row)) > 1 and finite:
                pairs = list(zip(map(_number, row), losses, strict=True))
                self.explored.setdefault(printable(name), []).append((step, pairs))
        # A note that every cycle has again is said once.
        known = [] if last is None else last["notes"]
        new = [str(note) for note in record["notes"] if note not in known]
        moves = list(self._list_moves(record, {} if last is None else last["corrections"]))
        if record["trial"] is not None:
            interval = RateInterval.from_dict(record["trial"])
            self.trials.append((step, interval))
            self.trial_cost = _number(record["trial_steps"]) / interval.total_steps
            lines = str(interval).splitlines()
            if steps := _number(record["trial_steps"]):
                spent = Budget(None, interval.total_steps).cost(steps)
                lines.append(f"cost: {spent}, {_number(record['trial_ms']) / 1e3:.1f} s")
            self.findings.append([printable(line) for line in lines])
            # which say the move, and the note about it
            moves, new = [], [note for note in new if not note.startswith("learning rate ")]
        self.events += [f"step {step:.0f}: {printable(text)}" for text in (*moves, *new)]
        self.probe_ms += _number(record["probe_ms"])
        self.converge_ms += _number(record["converge_ms"])
        self.cycles, self.last_cycle = self.cycles + 1, record

    def _list_moves(self, record: CycleRecord, last: Mapping[str, float]) -> Iterator[str]:
        for name, value in record["corrections"].items():
            before, now = _number(last.get(name, 1.0)), _number(value)
            if now != before:
                self.moves.append(_number(record["step"]))
                yield f"{name}: from {before:.4g} to {now:.4g} times its schedule"


def find_runs(folders: Sequence[Path]) -> list[RecordedRun]:
    """The runs in these folders, those without cycles first. A folder of runs stands for all.

    Raises:
        ValueError: no folder, no history in it, or a damaged one.
    """
    found = list[Path]()
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"run {str(folder)!r} is not a folder")
        inside = [folder] if (folder / HISTORY).exists() else []
        inside = inside or sorted(path.parent for path in folder.glob(f"*/{HISTORY}"))
        if not inside:
            raise ValueError(
                f"run {str(folder)!r} holds no {HISTORY}: pass a folder that hdet.logging.History "
                "has written to"
            )
        found += inside
    names = [folder.resolve().name for folder in found]
    runs = []
    for folder, name in zip(found, names, strict=True):
        parent = folder.resolve().parent.name
        runs.append(read_run(folder, name if names.count(name) == 1 else f"{parent}/{name}"))
    return sorted(runs, key=lambda run: bool(run.cycles))


def read_run(folder: Path, name: str) -> RecordedRun:
    """Raises ValueError, with the number of the line, for what a report cannot use."""
    run = RecordedRun(printable(name))
    for number, record in read_records(folder / HISTORY):
        try:
            run.add(record)
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
            raise ValueError(
                f"line {number} of {str(folder / HISTORY)!r} is damaged "
                f"({type(error).__name__}: {printable(str(error))[:200]}): remove that line"
            ) from error
    if not run.losses:
        run.losses, run.rates = run.cycle_losses, run.cycle_rates
    return run


def printable(text: str) -> str:
    """Without control codes and halves of characters, which names and notes can hold."""
    return "".join(c if c.isprintable() else " " for c in text)


def _number(value: Any) -> float:
    """NaN for None, which stands for what is not finite, and for what is too large."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{type(value).__name__} in the place of a number")
    return float(value) if abs(value) <= LARGEST else math.nan
