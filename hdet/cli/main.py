"""The command line: `hdet train`, `hdet report`, `hdet replay`, `hdet doctor`, `hdet simulate`. A command is the function `run` of its
module, which is imported when it is typed, and torch with it.

Exit codes: 0 done; 1 a process failed, or a replayed run differs; 2 an error that the user can correct, in one line; 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import hdet


class _Parser(argparse.ArgumentParser):
    """One line for a wrong argument, instead of the usage in front of it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without ± shows a question mark, not a traceback
    parser = _build_parser()
    try:
        options = parser.parse_args(arguments)
    except SystemExit as done:  # argparse has already said why
        return int(done.code or 0)
    with _terminated_like_interrupted():
        try:
            missing = [name for name in options.needs if importlib.util.find_spec(name) is None]
            if missing:
                raise ValueError(f"{' and '.join(missing)} cannot be imported: pip install hdet[job]")
            return int(importlib.import_module(f"hdet.cli.{options.module}").run(options))
        except ValueError as error:
            return _say(2, f"hdet {options.command}: {' '.join(str(error).split())}")
        except KeyboardInterrupt:
            return _say(130, f"hdet {options.command}: interrupted")
        except BrokenPipeError:  # `hdet ... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1


def _say(code: int, line: str) -> int:
    # Under torchrun every rank meets the same error; one of them says it.
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)
    return code


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM unwinds the stack as Ctrl-C does, so that processes are ended and files removed."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread, which alone may set handlers
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# -- arguments -------------------------------------------------------------------------------------------------------------


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hdet", description="Replicas of data-parallel training as a live search for hyperparameters.")
    parser.add_argument("--version", action="version", version=f"hdet {hdet.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, module: str, text: str, needs: Sequence[str] = ()) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(module=module, needs=needs)
        return sub

    drawing = ("rich", "matplotlib")
    _add_train_arguments(command("train", "train", "Train a small GPT on real text, with HDET or the fixed schedule.", drawing))
    report = command("report", "report", "Draw runs beside each other and print their table.", drawing)
    report.add_argument("runs", nargs="+", type=_path, metavar="RUN", help="folder of a run, or a folder of such folders")
    report.add_argument(
        "--out", type=_path, metavar="FILE", help="the picture; default: report.png in the run's folder, or in the runs' common one"
    )
    report.add_argument(
        "--html", type=_path, metavar="FILE", help="a page for the browser that needs nothing else; then there is a picture with --out only"
    )
    again = command("replay", "replay_run", "Make a run's recorded decisions once more, without training, and compare them bit by bit.")
    again.add_argument("folder", type=Path, metavar="RUN", help="folder of a run of hdet train")
    command("doctor", "doctor", "Print versions, which backends can be used, and why the others cannot.")
    simulation = command("simulate", "simulate", "Watch the controller on a noisy quadratic: pure Python, no training.")
    simulation.add_argument(
        "--start", type=float, default=1 / 30, metavar="FACTOR", help="how wrong the first rate is, 1 being right (default: 1/30)"
    )
    for name, default in (("replicas", 4), ("cycles", 40), ("spread", 0.3), ("seed", 0)):
        kind = type(default)
        simulation.add_argument(f"--{name}", type=kind, default=default, metavar=kind.__name__.upper(), help="(default: %(default)s)")
    return parser


def _add_train_arguments(parser: argparse.ArgumentParser) -> None:
    from hdet.cli.job.config import CONTROLLERS, DEVICES, TrainConfig

    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--compare", action="store_true", help="train with the fixed schedule first, then with HDET; print both and draw them together"
    )
    what.add_argument("--schedule-only", action="store_true", help="train with the fixed schedule only")
    what.add_argument(
        "--resume", type=_path, metavar="RUN", help="continue the run in this folder from its checkpoint, bit for bit; "
        "controller auto begins a search anew that was under way",
    )  # fmt: skip
    parser.add_argument("--out", type=_path, metavar="FOLDER", help="where the run's files go; default: a new folder below runs/")
    parser.add_argument("--overwrite", action="store_true", help="replace a run that is already in --out")
    choices = {"controller": CONTROLLERS, "device": DEVICES}
    settings = parser.add_argument_group("settings of the run")
    for name, field in TrainConfig.__dataclass_fields__.items():
        if name == "mode":
            continue
        kind = {"b": bool, "i": int, "f": float, "s": str}[str(field.type)[0]]
        default = "" if field.default is None or kind is bool else f" (default: {field.default})"
        extra: dict[str, Any] = {"choices": choices.get(name)}
        if kind is bool:
            extra = {"action": "store_true"}
        elif name not in choices:
            extra = {"type": _name, "metavar": "FOLDER"} if kind is str else {"type": kind, "metavar": kind.__name__.upper()}
        # No default here: settings that were not typed are absent, so that --resume can tell them from those that were.
        settings.add_argument(f"--{name.replace('_', '-')}", default=argparse.SUPPRESS, help=field.metadata["help"] + default, **extra)


def _name(text: str) -> str:
    """An empty name would be the folder in which the command is typed."""
    if not text:
        raise argparse.ArgumentTypeError("'' is empty: pass the name of a file or folder")
    return text


def _path(text: str) -> Path:
    return Path(_name(text))
