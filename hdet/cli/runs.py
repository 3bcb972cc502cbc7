"""Runs read back from their folders, for reports: settings, records, and the search for a rate.
No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hdet.cli.job.run_files import (
    CONFIG,
    HISTORY,
    Kinds,
    RunFolderError,
    check_kinds,
    read_config,
    read_history,
)
from hdet.core.schema import (
    COUNT,
    FLAG,
    POSITIVE,
    Fields,
    Instance,
    ListOf,
    Number,
    Optional,
    Table,
)
from hdet.trial.rule import RateInterval, Trial

NUMBER, TEXT, MAYBE = Number(), Instance(str), Optional(Number())
SETTINGS: Kinds = {"mode": TEXT, "steps": NUMBER, "max_lr": NUMBER}
RECORDS: dict[str, Kinds] = {
    "train": {"step": NUMBER, "loss": MAYBE, "lr": NUMBER, "correction": POSITIVE},
    "validation": {"step": NUMBER, "loss": MAYBE},
    "cycle": {"step": NUMBER, "slopes": Table(TEXT, MAYBE), "errors": Table(TEXT, MAYBE)},
    "end": {"step": NUMBER, "seconds": NUMBER, "probe_percent": NUMBER, "converge_percent": NUMBER},
}
"""what every report reads, by event"""
OTHER: Kinds = {"event": TEXT, "step": NUMBER}

_ARM = Fields({"rate": POSITIVE, "losses": ListOf(NUMBER), "displacement": Optional(Number(0))})
_TRIAL = Fields({
    "rate": POSITIVE, "arms": ListOf(_ARM), "first_losses": ListOf(NUMBER), "steps": POSITIVE,
    "pretrained": FLAG, "uncertainty": POSITIVE, "ceiling": POSITIVE, "given_up": TEXT,
})  # fmt: skip


class _Interval(Fields):
    """What `RateInterval.to_dict` gave, as the `RateInterval` that it was."""

    def __init__(self) -> None:
        super().__init__({
            "rate": POSITIVE, "low": Number(0), "high": Optional(POSITIVE), "suggestion": POSITIVE,
            "reason": TEXT, "total_steps": POSITIVE, "trial": _TRIAL,
        })  # fmt: skip

    def read(self, value: Any, where: str, sizes: dict[str, int]) -> Any:
        found = super().read(value, where, sizes)
        if not found["trial"]["arms"]:
            raise ValueError(f"{where} has no arms")
        return RateInterval.from_dict(found)


INTERVAL = Optional(_Interval())
CYCLE: Kinds = {
    "multipliers": Table(TEXT, ListOf(NUMBER)), "losses": ListOf(MAYBE),
    "probe": Optional(ListOf(MAYBE)), "left_out": ListOf(COUNT), "rolled_back": FLAG,
    "notes": ListOf(TEXT), "trial": INTERVAL,
}  # fmt: skip
"""what `RunFiles.cycles` has besides"""
ABSENT: dict[str, Any] = {
    "multipliers": {}, "losses": [], "probe": None, "left_out": [], "rolled_back": False,
    "notes": [], "trial": None,
}  # fmt: skip
"""in a history of an older version"""
STOPPED, FORWARD = 7, 1 / 3
"""Steps that an arm is taken to have done which broke or was stopped: most are at the first look.
And what a forward pass costs, in steps."""


@dataclass(frozen=True)
class RunFiles:
    """A run's settings and records, read back from its folder."""

    folder: Path
    name: str
    config: dict[str, Any]
    records: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> RunFiles:
        """Raises RunFolderError: no history there, or a damaged file, or one without what a report
        needs."""
        records, config = read_history(folder / HISTORY), read_config(folder)
        run = cls(folder, folder.name or str(folder), config, records)
        for number, record in enumerate(records, 1):
            event = record.get("event")
            kinds = RECORDS.get(event, OTHER) if isinstance(event, str) else OTHER
            run._check(number, record, kinds)
        remedy = "restore it, or leave that run out"
        check_kinds(config, SETTINGS, repr(str(folder / CONFIG)), remedy)
        return run

    def _check(self, number: int, record: dict[str, Any], kinds: Kinds) -> None:
        where = f"line {number} of history {str(self.folder / HISTORY)!r}"
        check_kinds(record, kinds, where, "remove that line")

    def of(self, event: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record.get("event") == event]

    @property
    def is_fixed(self) -> bool:
        return self.config.get("mode") == "fixed"

    @property
    def end(self) -> dict[str, Any] | None:
        """The last record of a finished run."""
        ends = self.of("end")
        return ends[-1] if ends else None

    @property
    def validation(self) -> float | None:
        """Loss in nats per byte at the end, or the latest of a run that has not ended."""
        points = self.of("validation")
        return points[-1]["loss"] if points else None

    @cached_property
    def cycles(self) -> list[dict[str, Any]]:
        """The cycles' records with all of `CYCLE`. Raises RunFolderError for a damaged one."""
        found = []
        for number, record in enumerate(self.records, 1):
            if record.get("event") == "cycle":
                found.append({**ABSENT, **record})
                self._check(number, found[-1], CYCLE)
        return found

    @property
    def trials(self) -> list[tuple[float, RateInterval]]:
        """What controller auto has found, and the step after which a record said so. Raises
        RunFolderError for a damaged record."""
        found = [(record["step"], INTERVAL.read(record["trial"], "", {})) for record in self.cycles]
        return [(step, interval) for step, interval in found if interval is not None]

    @property
    def trial_cost(self) -> float:
        """Of `trials`, in steps of the run."""
        return sum(_cost(interval.trial) for _, interval in self.trials)


def _cost(trial: Trial) -> float:
    """An arm's step is one of the run. The run's own first steps cost nothing."""
    if len(trial.arms) == 1 and not trial.first_losses:
        return 0.0
    steps = sum(trial.steps if arm.losses else STOPPED for arm in trial.arms)
    return steps + FORWARD * sum(map(len, [trial.first_losses, *(a.losses for a in trial.arms)]))


def find_runs(paths: Sequence[Path]) -> list[RunFiles]:
    """The runs in these folders; one that holds several runs stands for all of them. Raises
    RunFolderError if it is missing or holds none."""
    folders, remedy = list[Path](), "pass what `hdet train --out` wrote"
    for path in paths:
        if not path.is_dir():
            raise RunFolderError(f"run {str(path)!r} is not a folder: {remedy}")
        inside = [path] if (path / HISTORY).is_file() else []
        inside = inside or sorted(found.parent for found in path.glob(f"*/{HISTORY}"))
        if not inside:
            raise RunFolderError(f"run {str(path)!r} holds no {HISTORY}: {remedy}")
        folders += inside
    runs = [RunFiles.read(folder) for folder in folders]
    # The fixed schedule first: it is what the others are measured against.
    return sorted(runs, key=lambda run: not run.is_fixed)
