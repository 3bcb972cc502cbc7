"""Histories to report on, and commands that must be refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hdet
from hdet.cli.main import main
from hdet.trial.rule import Arm, Trial

INTERVAL = Trial(
    rate=0.1,
    arms=(Arm(0.0125, (5.0, 5.1), 0.01), Arm(0.1, (4.0, 4.1), 0.1), Arm(0.8)),
    first_losses=(5.5, 5.6),
).interval(2000)


def cycle(step: int, correction: float = 1.0, **changes: Any) -> dict[str, Any]:
    """What an Ensemble logs, as far as a report reads it."""
    return {
        "event": "cycle", "step": step, "values": {"lr": 0.1 * correction},
        "scheduled": {"lr": 0.1}, "corrections": {"lr": correction}, "losses": [5.0, None],
        "probe_ms": 2.0, "converge_ms": 1.0, "notes": [], "trial": None, "trial_steps": 140.0,
        "trial_ms": 1500.0, "tried": {"lr": [0.09, 0.11]},
        **changes,
    }  # fmt: skip


RECORDS: list[dict[str, Any]] = [
    {"event": "start", "step": 0, "settings": {"controller": "probe", "seed": 3}},
    {"event": "train", "step": 10, "loss": 5.5, "lr": 0.1},
    cycle(50, notes=["a note", "learning rate 0.1 stays"], trial=INTERVAL.to_dict()),
    {"event": "train", "step": 60, "loss": None, "lr": 0.1},
    {"event": "validation", "step": 100, "loss": 4.25},
    cycle(100, 2.5),
    {"event": "end", "step": 100, "seconds": 0.2},
]


def write_run(folder: Path, *records: dict[str, Any]) -> Path:
    history = hdet.logging.History(folder / "history.jsonl")
    for record in records or RECORDS:
        history.write(record)
    return folder


def one_line(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Runs a command that must be refused."""
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and err.startswith("hdet") and "Traceback" not in err
    return err
