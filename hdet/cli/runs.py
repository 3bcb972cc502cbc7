"""Runs read back from their histories (`hdet.logging.History`). Needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hdet.trial.rule import RateInterval

HISTORY = "history.jsonl"
LARGEST = 1e30
"""Beyond it a loss counts as not finite."""

Points = list[tuple[float, float]]
"""Steps and values. A value that is not finite is NaN."""


@dataclass
class RecordedRun:
    """What one history says."""

    folder: Path
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    losses: Points = field(default_factory=list)
    validation: Points = field(default_factory=list)
    rates: Points = field(default_factory=list)
    """Base values of the learning rate."""
    schedule: Points = field(default_factory=list)
    """The learning rate that the untouched schedule has."""
    events: list[tuple[float, str]] = field(default_factory=list)
    """Moved corrections and notes, by step."""
    trials: list[tuple[float, RateInterval]] = field(default_factory=list)
    seconds: float | None = None
    """Of training. None: the run has not ended."""
    probe_ms: float = 0.0
    converge_ms: float = 0.0
    cycles: int = 0

    @property
    def last_loss(self) -> float | None:
        return self.validation[-1][1] if self.validation else None

    def percent(self, milliseconds: float) -> float | None:
        """Of the training time. None without cycles, or before the end."""
        return 0.1 * milliseconds / self.seconds if self.seconds and self.cycles else None


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
    return sorted(runs, key=lambda run: run.cycles > 0)


def read_run(folder: Path, name: str) -> RecordedRun:
    """Raises ValueError, with the number of the line, for what a report cannot use."""
    run = RecordedRun(folder, printable(name))
    readers = {
        "start": _read_start, "train": _read_train, "validation": _read_validation,
        "cycle": _Cycles().read, "end": _read_end,
    }  # fmt: skip
    for number, record in read_records(folder / HISTORY):
        event = record.get("event")
        read = readers.get(event) if isinstance(event, str) else None
        try:
            if read is not None:
                read(run, record)
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
            raise ValueError(
                f"line {number} of {str(folder / HISTORY)!r} is damaged "
                f"({type(error).__name__}: {printable(str(error))[:200]}): remove that line"
            ) from error
    return run


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and records. A last line without its end was torn by a kill: it is left out.

    Raises:
        ValueError: no regular file, or a line that is no JSON object.
    """
    try:
        if not path.is_file():  # reading a pipe or a device may never end
            raise ValueError(f"history {str(path)!r} is not a regular file")
        *lines, _torn = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"history {str(path)!r} cannot be read ({error.strerror})") from error
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise ValueError(f"line {number} of {str(path)!r} is damaged: remove that line")
        yield number, record


def printable(text: str) -> str:
    """Without control codes and halves of characters, which names and notes can hold."""
    return "".join(c if c.isprintable() else " " for c in text)


COLUMNS = ("validation loss", "time", "probe cost", "converge cost")


def cells_of(run: RecordedRun) -> list[str]:
    """Of a row of the table, after the run's name."""
    loss = "-" if run.last_loss is None else f"{run.last_loss:.4f}"
    loss = "not finite" if run.last_loss is not None and math.isnan(run.last_loss) else loss
    if run.seconds is None:
        return [f"{loss} (not ended)", "-", "-", "-"]
    costs = [run.percent(run.probe_ms), run.percent(run.converge_ms)]
    shown = ["-" if cost is None else f"{cost:.2f} %" for cost in costs]
    return [loss, f"{run.seconds:.1f} s", *shown]


def on_one_line(interval: RateInterval) -> str:
    """What a trial found."""
    return printable("; ".join(str(interval).splitlines()))


# -- records by event ------------------------------------------------------------------------------


def _number(value: Any, low: float = -math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{type(value).__name__} in the place of a number")
    number = float(value)
    if not low <= number <= LARGEST:
        raise ValueError(f"{number:g} is out of range")
    return number


def _loss(value: Any) -> float:
    """NaN for None, which stands for every loss that is not finite, and for a huge one."""
    if value is None or (isinstance(value, float) and not abs(value) <= LARGEST):
        return math.nan
    return _number(value, -LARGEST)


def _step(record: Mapping[str, Any]) -> float:
    return _number(record["step"], 0)


def _read_start(run: RecordedRun, record: Mapping[str, Any]) -> None:
    run.settings.update(record.get("settings", {}))


def _read_train(run: RecordedRun, record: Mapping[str, Any]) -> None:
    run.losses.append((_step(record), _loss(record["loss"])))
    if "lr" in record:
        run.rates.append((_step(record), _number(record["lr"], 0)))


def _read_validation(run: RecordedRun, record: Mapping[str, Any]) -> None:
    run.validation.append((_step(record), _loss(record["loss"])))


def _read_end(run: RecordedRun, record: Mapping[str, Any]) -> None:
    run.seconds = _number(record["seconds"], 0)


class _Cycles:
    """Reads one run's cycles, each beside the one before."""

    def __init__(self) -> None:
        self._corrections: dict[str, float] = {}
        self._notes: list[str] = []
        self._has_losses = False

    def read(self, run: RecordedRun, record: Mapping[str, Any]) -> None:
        step = _step(record)
        self._has_losses = self._has_losses or (run.cycles == 0 and not run.losses)
        run.cycles += 1
        run.probe_ms += _number(record.get("probe_ms", 0), 0)
        run.converge_ms += _number(record.get("converge_ms", 0), 0)
        if self._has_losses:  # nobody has recorded train events
            losses = [_loss(value) for value in record.get("losses", ())]
            counted = [loss for loss in losses if math.isfinite(loss)]
            run.losses.append((step, sum(counted) / len(counted) if counted else math.nan))
        if "lr" in record.get("values", {}):
            if self._has_losses:
                run.rates.append((step, _number(record["values"]["lr"], 0)))
            run.schedule.append((step, _number(record["scheduled"]["lr"], 0)))
        self._read_events(run, step, record)
        if record.get("trial") is not None:
            run.trials.append((step, _read_interval(record["trial"])))

    def _read_events(self, run: RecordedRun, step: float, record: Mapping[str, Any]) -> None:
        for name, value in record.get("corrections", {}).items():
            before, now = self._corrections.get(name, 1.0), _number(value, 0)
            if now != before:
                run.events.append(
                    (step, printable(f"{name}: correction {before:.4g} -> {now:.4g}"))
                )
            self._corrections[name] = now
        notes = [printable(str(note)) for note in record.get("notes", ())]
        # A note that every cycle has again is said once.
        run.events += [(step, note) for note in notes if note not in self._notes]
        self._notes = notes


def _read_interval(data: Mapping[str, Any]) -> RateInterval:
    interval = RateInterval.from_dict(data)
    arms = interval.trial.arms
    if not arms:
        raise ValueError("the trial has no arms")
    for rate in (interval.rate, interval.suggestion, *(arm.rate for arm in arms)):
        _number(rate, 1 / LARGEST)
    for loss in (*interval.trial.first_losses, *(loss for arm in arms for loss in arm.losses)):
        _number(loss, -LARGEST)
    _number(interval.low, 0)
    return interval
