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
from itertools import chain
from pathlib import Path
from typing import IO

from rich import box
from rich.console import Console
from rich.table import Table

import hdet
from hdet.cli.drawing import Chart, charts_of, draw
from hdet.cli.runs import Points, RecordedRun, find_runs, printable

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
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 72rem; }}
h1 {{ font-size: 1.4rem; }}
.found {{ font-size: 1.15rem; }}
.charts {{ display: grid; gap: 1rem; }}
.charts {{ grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)); }}
img {{ width: 100%; }}
table {{ border-collapse: collapse; margin: 1rem 0; }}
th, td {{ border-bottom: 1px solid #ddd; padding: 0.2rem 0.7rem 0.2rem 0; text-align: left; }}
td:first-child {{ min-width: 4rem; }}
h1, p, li, .runs td:first-child {{ overflow-wrap: anywhere; }}
</style>
</head>
<body>
<h1>hdet report: {names}</h1>
{found}
{table}
<div class="charts">
{charts}
</div>
<details>
<summary>Details</summary>
{details}
</details>
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
        picture = draw(charts_of(runs), options.out.suffix[1:].lower())
        write_whole(options.out, picture)
    if options.html is not None:
        write_whole(options.html, make_page(runs).encode())
    print_report(runs)
    return 0


def print_report(runs: Sequence[RecordedRun], file: IO[str] | None = None) -> None:
    """A table, what trials measured, and the first events of each run. ``file``: in the place of
    the terminal."""
    console = Console(file=file, markup=False, emoji=False, highlight=False)
    headings, *rows = table_of(runs)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "run" else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for one in runs:
        events = _events(one)
        shown = events[:SHOWN_EVENTS]
        for line in (*chain.from_iterable(one.findings), *shown):
            console.out(f"{one.name}: {line}")
        if hidden := len(events) - len(shown):
            console.out(f"{one.name}: {hidden} more events: pass --html FILE for all")


def table_of(runs: Sequence[RecordedRun]) -> list[list[str]]:
    """Headings, then a row for each run. What is known of no run is left out."""
    of = "validation" if any(run.validation for run in runs) else "training"
    columns = {
        "run": [run.name for run in runs],
        f"{of} loss": [_loss(run.validation if of == "validation" else run.losses) for run in runs],
        "time": ["" if run.seconds is None else f"{run.seconds:.1f} s" for run in runs],
        "cost of trials": [
            "" if run.trial_cost is None else f"{100 * run.trial_cost:.1f} % of steps"
            for run in runs
        ],
    }
    known = {heading: cells for heading, cells in columns.items() if any(cells)}
    return [[*known], *([cell or "-" for cell in row] for row in zip(*known.values(), strict=True))]


def _loss(points: Points) -> str:
    if not points:
        return ""
    return "not finite" if math.isnan(points[-1][1]) else f"{points[-1][1]:.4f}"


def _events(run: RecordedRun) -> list[str]:
    """And what the method has cost beside a trial."""
    costs = [
        f"{what} took {0.1 * ms / run.seconds:.2f} % of the time"
        for what, ms in (("measuring", run.probe_ms), ("averages", run.converge_ms))
        if ms and run.seconds
    ]
    return [*costs, *run.events]


# -- the page --------------------------------------------------------------------------------------


def make_page(runs: Sequence[RecordedRun]) -> str:
    """For a browser: no script, no network, nothing beside the file."""
    names = ", ".join(run.name for run in runs)
    searched = [run for run in runs if run.cycles] or runs
    found = [_found(run, f"{run.name}: " * (len(runs) > 1)) for run in searched]
    return PAGE.format(
        names=escape(names),
        found="\n".join(found),
        table=_table(table_of(runs), "runs"),
        charts="\n".join(_image(chart) for chart in charts_of(runs)),
        details="\n".join(_details(run) for run in runs),
        version=escape(hdet.__version__),
    )


def _found(run: RecordedRun, name: str) -> str:
    """What became of its learning rate: a sentence, and what the terminal says of the trial."""
    first, *more = run.findings[-1] if run.findings else [_moves(run)]
    lines = f"\n<p>{'<br>'.join(map(escape, more))}</p>" if more else ""
    return f'<p class="found">{escape(name + first[:1].upper() + first[1:])}</p>{lines}'


def _moves(run: RecordedRun) -> str:
    """Of a run without a search."""
    if not run.moves or run.last_cycle is None:
        return "nothing has moved"
    ends = [f"{key} {c:.3g} times" for key, c in run.last_cycle["corrections"].items()]
    moves = f"{len(run.moves)} moves, the last one before step {run.moves[-1]:.0f}"
    return printable(f"{moves}; at the end {', '.join(ends)} the schedule's own")


def _details(run: RecordedRun) -> str:
    """What was measured, said and set."""
    parts = []
    for step, interval in run.trials:
        rows = [
            [
                f"{arm.rate:.3g}",
                f"{arm.loss:.4g}",
                f"{arm.error:.2g}",
                f"{arm.displacement or 0:.2g}",
            ]
            for arm in interval.trial.arms
        ]
        title = (
            f"{run.name}: trial before step {step:.0f}, {interval.trial.steps} steps at each rate"
        )
        headings = ["rate", "loss after it", "standard error", "change of the weights"]
        parts += [f"<p>{escape(title)}</p>", _table([headings, *rows], "arms")]
    settings = [printable(f"{name}: {value}") for name, value in run.settings.items()]
    for title, lines in (("events", _events(run)), ("settings", settings)):
        if lines:
            items = "".join(f"<li>{escape(line)}</li>\n" for line in lines)
            parts.append(f"<p>{escape(run.name)}: {title}</p>\n<ul>\n{items}</ul>")
    return "\n".join(parts)


def _table(rows: Sequence[Sequence[str]], kind: str) -> str:
    """With a row of headings."""
    lines = [
        "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for row, tag in zip(rows, ["th", *["td"] * (len(rows) - 1)], strict=True)
    ]
    return "\n".join([f'<table class="{kind}">', *lines, "</table>"])


def _image(chart: Chart) -> str:
    picture = base64.b64encode(draw([chart], "svg")).decode()
    return f'<img alt="{escape(chart.text)}" src="data:image/svg+xml;base64,{picture}">'


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
