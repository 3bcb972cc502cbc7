"""`hdet replay`: the decisions of a recorded run, made once more without training."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from hdet.cli.runs import HISTORY, printable, read_records
from hdet.core.controller import Controller
from hdet.core.replay import replay


def run(options: argparse.Namespace) -> int:
    """Prints a sentence for each difference; the exit code says whether there are any.

    Raises:
        ValueError: no history, no recorded decisions in it, or no such function.
    """
    path = options.folder / HISTORY
    records = [record for _, record in read_records(path)]
    cycles = [record for record in records if record.get("event") == "cycle"]
    if not cycles:
        raise ValueError(f"{str(path)!r} has no recorded decisions")
    starts = [record for record in records if record.get("event") == "start"]
    settings = starts[0].get("settings") if starts else {}
    controller = make_controller(options.controller, settings)
    try:
        differences = list(replay(controller, cycles))
        decided = sum(record["record"]["evidence"] is not None for record in cycles)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        reason = f"{type(error).__name__}: {printable(str(error))[:200]}"
        raise ValueError(
            f"{str(path)!r} cannot be replayed by {options.controller} ({reason}): it is another "
            "controller's, or damaged"
        ) from error
    for difference in differences:
        print(printable(difference))
    if not differences:
        trials = sum(record.get("trial") is not None for record in cycles)
        also = f" and {trials} trial{'s' * (trials > 1)}" if trials else ""
        print(f"{decided} decisions{also} replayed, all bitwise the same")
    return int(bool(differences))


def make_controller(name: str, settings: Any) -> Controller:
    """What the function MODULE:FUNCTION makes of the run's settings."""
    module, _, function = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--controller is {name!r}: it must be MODULE:FUNCTION, of a function that takes the "
            f"run's settings and returns its controller, started ({error})"
        ) from error
    controller = make(settings)
    if not isinstance(controller, Controller):
        raise ValueError(f"{name} returned {type(controller).__name__}, which is no controller")
    return controller
