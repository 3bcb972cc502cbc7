"""The command line: `hdet report`, `hdet replay`, `hdet doctor`.

A command is the function `run` of its module, which is imported when it is typed, and torch with
it. Exit codes: 0 done; 1 a replayed run differs; 2 an error that the user can correct, in one line;
130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import hdet


class _Parser(argparse.ArgumentParser):
    """One line for a wrong argument, instead of the usage in front of it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without ± shows a question mark
    try:
        options = _build_parser().parse_args(arguments)
    except SystemExit as done:  # argparse has already said why
        return int(done.code or 0)
    try:
        code = _run_command(options)
        sys.stdout.flush()  # a full disk shows here, and not after main
        return code
    except BrokenPipeError:  # `hdet ... | head`
        _discard_output()
        return 1
    except (ValueError, OSError) as error:
        if isinstance(error, OSError):
            _discard_output()
        print(f"hdet {options.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"hdet {options.command}: interrupted", file=sys.stderr)
        return 130


def _run_command(options: argparse.Namespace) -> int:
    missing = [name for name in options.needs if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        raise ValueError(f"{names} cannot be imported: pip install hdet[report]")
    return int(importlib.import_module(f"hdet.cli.{options.module}").run(options))


def _discard_output() -> None:
    """So that the interpreter does not fail once more when it flushes standard output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hdet", description="What runs with hdet did, and what works here.")
    parser.add_argument("--version", action="version", version=f"hdet {hdet.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, module: str, text: str, needs: Sequence[str] = ()) -> _Parser:
        command: _Parser = commands.add_parser(name, help=text, description=text)
        command.set_defaults(module=module, needs=needs)
        return command

    report = add("report", "report", "Print what runs did; draw it.", ("rich", "matplotlib"))
    report.add_argument(
        "runs", nargs="+", type=_path, metavar="RUN",
        help="folder with a history.jsonl (hdet.logging.History), or a folder of such folders",
    )  # fmt: skip
    report.add_argument("--out", type=_path, metavar="FILE", help="a picture: .png, .svg, .pdf")
    report.add_argument("--html", type=_path, metavar="FILE", help="a page for the browser")
    replay = add("replay", "replay_run", "Make recorded decisions once more, and compare them.")
    replay.add_argument("folder", type=_path, metavar="RUN", help="folder with a history.jsonl")
    replay.add_argument(
        "--controller", required=True, metavar="MODULE:FUNCTION",
        help="takes the run's settings (of the start record) and returns its controller, started",
    )  # fmt: skip
    add("doctor", "doctor", "Print versions, which backends can be used, and why others cannot.")
    return parser


def _path(text: str) -> Path:
    """An empty name would be the folder in which the command is typed."""
    if not text:
        raise argparse.ArgumentTypeError("'' is empty: pass the name of a file or folder")
    return Path(text)
