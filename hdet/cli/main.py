"""The command line: `hdet report`, `hdet doctor`.

A command is the function `run` of its module, which is imported when it is typed, and torch with
it. Exit codes: 0 done; 2 an error that the user can correct, in one line; 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
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
        code = int(importlib.import_module(f"hdet.cli.{options.command}").run(options))
        sys.stdout.flush()  # a full disk shows here, and not after main
        return code
    except BrokenPipeError:  # `hdet ... | head`
        _discard_output()
        return 1
    except ModuleNotFoundError as error:
        if options.command != "report":
            raise
        reason = f"{error}: pip install hdet[report]"
    except (ValueError, OSError) as error:
        if isinstance(error, OSError):
            _discard_output()
        reason = " ".join(str(error).split())
    except KeyboardInterrupt:
        print(f"hdet {options.command}: interrupted", file=sys.stderr)
        return 130
    print(f"hdet {options.command}: {reason}", file=sys.stderr)
    return 2


def _discard_output() -> None:
    """So that the interpreter does not fail once more when it flushes standard output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hdet", description="What runs with hdet did, and what works here.")
    parser.add_argument("--version", action="version", version=f"hdet {hdet.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    report = commands.add_parser("report", help="Print what runs did; draw it.")
    report.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN",
        help="folder with a history.jsonl (hdet.logging.History), or a folder of such folders",
    )  # fmt: skip
    report.add_argument("--out", type=Path, metavar="FILE", help="a picture: .png, .svg, .pdf")
    report.add_argument("--html", type=Path, metavar="FILE", help="a page for the browser")
    commands.add_parser("doctor", help="Print what can be used here.")
    return parser
