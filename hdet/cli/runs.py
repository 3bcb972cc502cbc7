"""Runs read back from their folders, for reports: settings, records, and what a controller's trials said. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from hdet.cli.job.run_files import CONFIG, HISTORY, Kinds, RunFolderError, check_kinds, read_config, read_history
from hdet.core.rules.trial.protocol import BROKEN, TRIALS, Told
from hdet.core.schema import ANYTHING, COUNT, FLAG, POSITIVE, Fields, Instance, ListOf, Number, Optional, Or, Table

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

_TRIAL = Fields({"trial": NUMBER, "multiples": ListOf(POSITIVE), "steps": NUMBER, "scores": NUMBER})
_TOLD = Fields({"measured": Fields({TRIALS: Or(ListOf(Optional(ListOf(MAYBE))), None)})})
CYCLE: Kinds = {
    "multipliers": Table(TEXT, ListOf(NUMBER)),
    "losses": ListOf(MAYBE),
    "probe": Optional(ListOf(MAYBE)),
    "left_out": ListOf(COUNT),
    "rolled_back": FLAG,
    "notes": ListOf(TEXT),
    "record": Optional(Fields({"moment": Fields({"step": NUMBER}), "plan": Fields({"measure": Table(TEXT, ANYTHING)}), "evidence": Or(_TOLD, None)})),
}  # fmt: skip
"""what `RunFiles.cycles` has besides"""
ABSENT: dict[str, Any] = {
    "multipliers": {}, "losses": [], "probe": None, "left_out": [], "rolled_back": False, "notes": [], "record": None,
}  # fmt: skip
"""in a history of an older version"""
_NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
_FOUND = re.compile(f"best peak {_NUMBER} to {_NUMBER}")


@dataclass(frozen=True)
class RunFiles:
    """A run's settings and records, read back from its folder."""

    folder: Path
    name: str
    config: dict[str, Any]
    records: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> RunFiles:
        """Raises RunFolderError: no history there, or a damaged file, or one without what a report needs."""
        records = read_history(folder / HISTORY)
        for number, record in enumerate(records, 1):
            event = record.get("event")
            kinds = RECORDS.get(event, OTHER) if isinstance(event, str) else OTHER
            check_kinds(record, kinds, f"line {number} of history {str(folder / HISTORY)!r}", "remove that line")
        config = read_config(folder)
        check_kinds(config, SETTINGS, repr(str(folder / CONFIG)), "restore it, or leave that run out")
        return cls(folder, folder.name or str(folder), config, records)

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
                where, remedy = f"line {number} of history {str(self.folder / HISTORY)!r}", "remove that line"
                check_kinds(found[-1], CYCLE, where, remedy)
                check_kinds({TRIALS: _planned(found[-1])}, {TRIALS: Optional(_TRIAL)}, where, remedy)
        return found

    @property
    def trials(self) -> list[Trial]:
        """Of controller auto, in order of time."""
        of_one = groupby((record for record in self.cycles if _planned(record)), lambda record: _planned(record)["trial"])
        return [Trial.read(list(records)) for _, records in of_one]


def find_runs(paths: Sequence[Path]) -> list[RunFiles]:
    """The runs in these folders; one that holds several runs stands for all of them. Raises RunFolderError if it is missing or holds
    none."""
    folders: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise RunFolderError(f"run {str(path)!r} is not a folder: pass what `hdet train --out` wrote")
        inside = [path] if (path / HISTORY).is_file() else sorted(found.parent for found in path.glob(f"*/{HISTORY}"))
        if not inside:
            raise RunFolderError(f"run {str(path)!r} holds no {HISTORY}: pass what `hdet train --out` wrote")
        folders += inside
    runs = [RunFiles.read(folder) for folder in folders]
    return sorted(runs, key=lambda run: not run.is_fixed)  # the fixed schedule first: it is what the others are measured against


def _planned(record: Mapping[str, Any]) -> Any:
    """The settings of the trial that goes on in a cycle, if one does."""
    return record["record"]["plan"]["measure"].get(TRIALS) if record["record"] else None


@dataclass(frozen=True)
class Trial:
    """Copies of the run (arms) that trained beside it, at multiples of its rate, and what was made of them."""

    first: float
    """The step after which it began,"""
    last: float
    """and the one after which it was decided."""
    multiples: Sequence[float]
    above: Sequence[tuple[float, float] | None] | None
    """By arm: how much higher its loss is than that of the rate in force, and the standard error; None if it broke. None: nothing was told."""
    cost: float
    """In steps of the run: an arm's step is one, its score a third."""
    said: str
    found: tuple[float, float] | None
    """Within which the best peak was said to lie, as far as rates were tried."""

    @classmethod
    def read(cls, records: Sequence[Mapping[str, Any]]) -> Trial:
        """From the cycles in which it went on."""
        plan, last = _planned(records[0]), records[-1]
        evidence, said = last["record"].get("evidence"), "; ".join(last["notes"])
        rows = [row for row in (evidence["measured"].get(TRIALS) or () if evidence else ()) if row]
        try:
            told = [Told.read(row, len(plan["multiples"]), int(plan["steps"])).scores for row in rows]
        except ValueError:  # of an older version
            told = []
        found = _FOUND.search(said)
        return cls(
            first=records[0]["record"]["moment"]["step"],
            last=last["step"],
            multiples=plan["multiples"],
            above=_above(told, plan["multiples"]) if told else None,
            cost=len(plan["multiples"]) * (plan["steps"] + (len(told[0][0]) if told else plan["scores"]) / 3),
            said=said,
            found=(float(found[1]), float(found[2])) if found else None,
        )


def _above(told: Sequence[Sequence[Sequence[float | None]]], multiples: Sequence[float]) -> list[tuple[float, float] | None]:
    """``told``: [replica][arm][score], losses of the same batches for every arm, so their differences are taken batch by batch."""
    arms = [[loss for row in told for loss in row[a]] for a in range(len(multiples))]
    same = arms[multiples.index(1.0)] if 1.0 in multiples else arms[0]
    found: list[tuple[float, float] | None] = []
    for arm in arms:
        pairs = list(zip(arm, same, strict=False))
        differences = [one - other for one, other in pairs if one is not None and other is not None and max(one, other) < BROKEN]
        whole = len(differences) == len(pairs) > 1
        found.append((mean(differences), stdev(differences) / math.sqrt(len(differences))) if whole else None)
    return found
