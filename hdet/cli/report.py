"""`hdet report`: what runs did, as text in the terminal, a picture, or a page."""

from __future__ import annotations

import argparse
import base64
import math
import os
import secrets
import stat
from collections.abc import Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import IO

from rich import box
from rich.console import Console
from rich.table import Table

import hdet
from hdet.cli.drawing import draw_runs
from hdet.cli.runs import RecordedRun, find_runs, printable

PICTURES, PAGES = (".png", ".svg", ".pdf"), (".html", ".htm")
SHOWN_EVENTS = 10
"""Of a run, in the terminal. A page has all."""
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>hdet report: {names}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 60rem; }}
img {{ width: 100%; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
</style>
</head>
<body>
<h1>hdet report: {names}</h1>
<p>{summary}</p>
<img alt="The losses of trials; losses and learning rates over steps" src="{picture}">
<pre>{report}</pre>
<details><summary>Settings</summary><pre>{settings}</pre></details>
<footer>Written by hdet report, version {version}.</footer>
</body>
</html>
"""


def run(options: argparse.Namespace) -> int:
    """Returns the exit code. Raises ValueError for what cannot be read or written."""
    for path, suffixes in ((options.out, PICTURES), (options.html, PAGES)):
        if path is not None:
            check_target(path, suffixes)
    runs = find_runs(options.runs)
    if options.out is not None:
        write_whole(options.out, draw_runs(runs, options.out.suffix[1:].lower()))
    if options.html is not None:
        write_whole(options.html, make_page(runs).encode())
    print_report(runs, most_events=SHOWN_EVENTS)
    return 0


def print_report(
    runs: Sequence[RecordedRun], file: IO[str] | None = None, most_events: int | None = None
) -> None:
    """A table, and the events of each run. ``file``: in the place of the terminal."""
    width = None if file is None else 100
    console = Console(file=file, width=width, markup=False, emoji=False, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", overflow="fold")
    for heading in ("validation loss", "time", "trial cost", "probe cost", "converge cost"):
        table.add_column(heading, justify="right")
    for one in runs:
        table.add_row(one.name, *_cells(one))
    console.print(table)
    for one in runs:
        for event in one.events[:most_events]:
            console.out(f"{one.name}: {event}")
        hidden = 0 if most_events is None else len(one.events) - most_events
        if hidden > 0:
            console.out(f"{one.name}: {hidden} more events: pass --html FILE for all")


def _cells(run: RecordedRun) -> list[str]:
    """Of a row of the table, after the run's name."""
    last = run.validation[-1][1] if run.validation else None
    loss = "-" if last is None else "not finite" if math.isnan(last) else f"{last:.4f}"
    trial = "-" if run.trial_cost is None else f"{100 * run.trial_cost:.1f} %"
    if run.seconds is None:
        return [f"{loss} (not ended)", "-", trial, "-", "-"]
    costs = [
        f"{0.1 * ms / run.seconds:.2f} %" if run.cycles and run.seconds else "-"
        for ms in (run.probe_ms, run.converge_ms)
    ]
    return [loss, f"{run.seconds:.1f} s", trial, *costs]


def _summary(run: RecordedRun) -> str:
    """What became of its learning rate, in a sentence."""
    if run.trials:
        said = printable(str(run.trials[-1][1]).splitlines()[0])
    elif run.moves:
        said = f"{len(run.moves)} moves, the last one before step {run.moves[-1]:.0f}"
    else:
        said = "nothing has moved"
    return f"{run.name}: {said}"


def make_page(runs: Sequence[RecordedRun]) -> str:
    """For a browser: no script, no network, nothing beside the file."""
    report = StringIO()
    print_report(runs, report)
    picture = base64.b64encode(draw_runs(runs, "svg")).decode()
    settings = [
        printable(f"{run.name}: {name}: {value}")
        for run in runs
        for name, value in run.settings.items()
    ]
    return PAGE.format(
        names=escape(", ".join(run.name for run in runs)),
        summary="<br>".join(escape(_summary(run)) for run in runs),
        picture=f"data:image/svg+xml;base64,{picture}",
        report=escape(report.getvalue()),
        settings=escape("\n".join(settings)),
        version=escape(hdet.__version__),
    )


# -- files -----------------------------------------------------------------------------------------


def check_target(path: Path, suffixes: Sequence[str]) -> None:
    """Raises ValueError unless ``path`` is new, or a regular file with one of these suffixes.

    No file that a run writes has such a suffix, so a report cannot replace one.
    """
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"{str(path)!r} must end in {' or '.join(suffixes)}")
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise ValueError(f"{str(path)!r} is not a regular file: pass another name")
    if not path.parent.is_dir():
        raise ValueError(f"{str(path)!r}: its folder does not exist")


def write_whole(path: Path, data: bytes) -> None:
    """Whole, or not at all: into a new neighbour first.

    Raises:
        ValueError: the disk is full, or the folder cannot be written to.
    """
    partial = path.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        with open(partial, "xb") as file:
            file.write(data)
        os.replace(partial, path)
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be written ({error.strerror})") from error
    finally:
        partial.unlink(missing_ok=True)
