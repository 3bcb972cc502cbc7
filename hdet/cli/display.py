"""What `hdet train` shows: a progress bar on a terminal, plain lines anywhere else. Driven by the events of rank 0."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hdet.cli.job.config import TrainConfig

Event = Mapping[str, Any]

CYCLE_HEADER = f"{'cycle':>7}  {'step':>5}  {'base rate':>9}  {'correction':>10}  {'slope ± error':>20}  {'t':>6}  {'multipliers':<19}  {'converge':>8}"


def cycle_line(record: Event, cycles: int) -> str:
    """One cycle of the first knob, under `CYCLE_HEADER`."""
    knob = next(iter(record["values"]))
    slope, error, t = (record[key][knob] for key in ("slopes", "errors", "t"))
    measured = f"{slope:+.5f} ± {error:.5f}" if slope is not None and error is not None else "-"
    multipliers = record["multipliers"][knob]
    shown = " ".join(f"{m:.2f}" for m in multipliers) if len(multipliers) <= 4 else f"{min(multipliers):.2f} ... {max(multipliers):.2f}"
    line = (
        f"{record['cycle'] + 1:3d}/{cycles:<3d}  {record['step']:5d}  {record['values'][knob]:9.2e}  x {record['corrections'][knob]:8.3f}"
        f"  {measured:>20s}  {'-' if t is None else f'{t:+.1f}':>6s}  {shown:<19s}  {record['converge_ms']:5.1f} ms"
    )
    return "  ".join([line.rstrip(), *(f"[{note}]" for note in record.get("notes", ()))])


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


class Display:
    """Shows events as they come: with a ``bar`` at the bottom, or else as lines without control codes, for files, pipes and CI."""

    def __init__(self, bar: Progress | None) -> None:
        self._bar = bar
        self._task: TaskID | None = None
        self.config = TrainConfig()
        self._header_due = True
        self._corrections: object = None

    def show(self, event: Event) -> None:
        kind = event["event"]
        if kind == "start":
            self.config, self._header_due = TrainConfig.from_dict(event["config"]), True
            for line in banner(self.config, event):
                self._line(line)
            self._start(event["step"])
        elif kind == "cycle" and self._worth_a_line(event):
            if self._header_due:
                self._line(CYCLE_HEADER)
                self._header_due = False
            self._line(cycle_line(event, self.config.cycles))
        elif kind == "train":
            self._progress(event)

    def _worth_a_line(self, event: Event) -> bool:
        """Most cycles of controller auto change nothing."""
        before, self._corrections = self._corrections, event["corrections"]
        changed = event.get("notes") or event["corrections"] != before or any(slope is not None for slope in event["slopes"].values())
        return bool(changed) or not self.config.trains_alike

    def _line(self, text: str) -> None:
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False, overflow="ellipsis", no_wrap=True)

    def _start(self, step: int) -> None:
        """A run begins, or goes on, after ``step``."""
        self._begun, self._first, self._tenth = time.monotonic(), step, step * 10 // self.config.steps
        if self._bar is not None:
            if self._task is not None:
                self._bar.stop_task(self._task)
            self._task = self._bar.add_task(self.config.mode, total=self.config.steps, completed=step, status="")

    def _progress(self, event: Event) -> None:
        """The bar moves with each record of the training loss; as lines, ten in a run."""
        step, steps = event["step"], self.config.steps
        loss = "not finite" if event["loss"] is None else f"{event['loss']:.3f}"
        status = f"loss {loss}  rate {event['lr']:.2e}  correction x{event['correction']:.2f}"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, status=status)
        elif step * 10 // steps > self._tenth:
            self._tenth = step * 10 // steps
            left = (time.monotonic() - self._begun) / max(1, step - self._first) * (steps - step)
            self._line(f"  step {step}/{steps} ({100 * step // steps} %)  {status}  {duration(left)} left")


def banner(config: TrainConfig, event: Event) -> Iterator[str]:
    """The run in a line or two. It says that rates differ between replicas, which elsewhere would be a fault."""
    what = f"HDET, controller {config.controller}" if config.mode == "hdet" else "fixed schedule"
    place = "GPU" if str(event["device"]).startswith("cuda") else "CPU"
    if config.processes == 1:
        where = f"{'all in ' * config.coresident}one process on the {place}"
    else:
        where = f"one process each on the {place}{'s' * (place == 'GPU')}"
    since = f", from step {event['step']}" if event["step"] else ""
    yield f"{event['folder']}: {what}, max_lr {config.max_lr:g}, {config.steps} steps{since}"
    yield f"  {config.replicas} replica{'s' * (config.replicas > 1)} x {config.batch_size} windows of {config.context} bytes, {where}"
    if config.trains_alike:
        search = event.get("search") or "the rate is looked for in the first steps"
        alike = ["all replicas train alike"] * (config.replicas > 1)
        yield "  " + "; ".join([*alike, *search.splitlines()])
    elif config.mode == "hdet":
        yield f"  replicas' rates differ by design: {1 - config.spread:.2f} to {1 + config.spread:.2f} times the base rate"


@contextmanager
def open_display() -> Iterator[Display]:
    """On a terminal a bar, else plain lines. The terminal is itself again afterwards, also after Ctrl-C."""
    console = Console()
    if not (console.is_terminal and sys.stdout.isatty()):
        yield Display(None)
        return
    name, status = TextColumn("{task.description}"), TextColumn("{task.fields[status]}")
    columns = (name, BarColumn(bar_width=None), MofNCompleteColumn(), status, TimeRemainingColumn())
    with Progress(*columns, console=console, expand=True) as bar:
        yield Display(bar)
