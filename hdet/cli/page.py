"""Runs as one page for a browser: no script, no network, nothing beside the file."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from string import Template

import hdet
from hdet.cli.drawing import draw_runs
from hdet.cli.runs import COLUMNS, RecordedRun, cells_of, on_one_line, printable

MOST_ROWS = 1000
"""Of a table."""
PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1f24; margin: 0 auto; padding: 1rem;
       max-width: 60rem; overflow-wrap: anywhere; }
img { width: 100%; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 0.2rem 0.8rem 0.2rem 0; border-bottom: 1px solid #d8dee4;
         vertical-align: top; }
footer { color: #57606a; font-size: 0.85rem; margin-top: 2rem; }
</style>
</head>
<body>
<h1>$title</h1>
$runs
<img alt="Losses and learning rates over steps, and the losses of trials" src="$picture">
$details
<footer>Written by hdet report, version $version.</footer>
</body>
</html>
""")


def make_page(runs: Sequence[RecordedRun]) -> str:
    picture = base64.b64encode(draw_runs(runs, "svg")).decode()
    rows = [[run.name, *cells_of(run)] for run in runs]
    return PAGE.substitute(
        title=_text("hdet report: " + ", ".join(run.name for run in runs)),
        runs=_table(["run", *COLUMNS], rows),
        picture=f"data:image/svg+xml;base64,{picture}",
        details="\n".join(map(_details, runs)),
        version=_text(hdet.__version__),
    )


def _details(run: RecordedRun) -> str:
    """Trials, moves and notes, and settings of one run."""
    parts = [f"<h2>{_text(run.name)}</h2>"]
    parts += [
        f"<p>Trial before step {step:.0f}: {_text(on_one_line(found))}</p>"
        for step, found in run.trials
    ]
    hidden = len(run.events) - MOST_ROWS
    if run.events:
        parts.append(_table(["step", "moves and notes"], run.events[:MOST_ROWS]))
    else:
        parts.append("<p>Nothing was moved, and there is no note.</p>")
    if hidden > 0:
        parts.append(f"<p>{hidden} more are in history.jsonl.</p>")
    if run.settings:
        settings = _table(["setting", "value"], run.settings.items())
        parts.append(f"<details><summary>Settings</summary>{settings}</details>")
    return "\n".join(parts)


def _table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = "".join(f"<th>{_text(value)}</th>" for value in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{_text(value)}</td>' for value in row)}</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _text(value: object) -> str:
    shown = f"{value:.6g}" if isinstance(value, float) else str(value)
    return escape(printable(shown))
