"""`hdet report`: what runs did, as a table in the terminal, a picture, or a page."""

from __future__ import annotations

import argparse
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

from hdet.cli.runs import COLUMNS, RecordedRun, cells_of, find_runs, on_one_line

PICTURES, PAGES = (".png", ".svg", ".pdf"), (".html", ".htm")
SHOWN_EVENTS = 10
"""Of a run, in the terminal. A page has all."""


def run(options: argparse.Namespace) -> int:
    """Returns the exit code. Raises ValueError for what cannot be read or written."""
    for path, suffixes in ((options.out, PICTURES), (options.html, PAGES)):
        if path is not None:
            check_target(path, suffixes)
    runs = find_runs(options.runs)
    if options.out is not None:
        from hdet.cli.drawing import draw_runs

        write_whole(options.out, draw_runs(runs, options.out.suffix[1:].lower()))
    if options.html is not None:
        from hdet.cli.page import make_page

        write_whole(options.html, make_page(runs).encode())
    print_table(runs)
    for one in runs:
        print_events(one)
    return 0


def print_table(runs: Sequence[RecordedRun]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", overflow="fold")
    for heading in COLUMNS:
        table.add_column(heading, justify="right")
    for one in runs:
        table.add_row(Text(one.name), *cells_of(one))  # Text: a name may have rich's markup
    Console().print(table)


def print_events(run: RecordedRun) -> None:
    for step, interval in run.trials:
        print(f"{run.name}: trial before step {step:.0f}: {on_one_line(interval)}")
    for step, what in run.events[:SHOWN_EVENTS]:
        print(f"{run.name}: step {step:.0f}: {what}")
    hidden = len(run.events) - SHOWN_EVENTS
    if hidden > 0:
        print(f"{run.name}: {hidden} more events: pass --html FILE for all")


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
        try:
            with open(partial, "xb") as file:
                file.write(data)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be written ({error.strerror})") from error
