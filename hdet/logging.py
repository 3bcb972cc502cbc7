"""Records of cycles, and where they go: ``Ensemble(..., log=hdet.logging.TensorBoard(writer))``,
`WandB`, or `History`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

__all__ = ["CycleRecord", "History", "TensorBoard", "WandB", "scalars"]


class CycleRecord(TypedDict):
    """What is said of a cycle that has ended: a dict of plain data, the same on every rank but for
    its own times.

    Example::

        for record in ensemble.history:  # of the last 1000 cycles
            print(record["step"], record["values"]["lr"], record["losses"])
    """

    event: str
    """``"cycle"``."""
    cycle: int
    """Its number, from 0."""
    step: int
    """Optimizer steps done."""
    values: dict[str, float]
    """By knob: the base value now."""
    scheduled: dict[str, float]
    """By knob: the schedule's own value."""
    corrections: dict[str, float]
    """By knob: base value over the schedule's own."""
    slopes: dict[str, float | None]
    """By knob: d loss / d ln(multiplier), where it was measured."""
    errors: dict[str, float | None]
    """By knob: one standard error of the slope."""
    t: dict[str, float | None]
    """By knob: slope over error."""
    multipliers: dict[str, list[float]]
    """By knob, then replica: those of the cycle."""
    tried: dict[str, list[float]]
    """By knob, then replica: what the multipliers made of the base value at the cycle's end."""
    losses: list[float | None]
    """By replica: mean training loss. None: there was none, or it was not finite."""
    probe: list[float | None] | None
    """By replica: mean probe loss. None: nothing was probed."""
    left_out: list[int]
    """Replicas whose numbers the controller was not given."""
    rolled_back: bool
    """Did the cycle diverge, and was rolled back?"""
    rollbacks: int
    """Cycles that were, since the first step."""
    diverged_total: int
    """How often a replica was left out of an average."""
    probe_ms: float
    """Milliseconds of measuring."""
    converge_ms: float
    """Milliseconds of averaging."""
    trial: Mapping[str, Any] | None
    """What an `AutoLR` has measured in it: `RateInterval.to_dict`."""
    trial_steps: float
    """What the trial has cost, in steps of the run."""
    trial_ms: float
    """Milliseconds of it."""
    searching: bool
    """Did an `AutoLR` search in it?"""
    notes: list[str]
    """Why, in words."""
    record: dict[str, Any]
    """What the controller was given (``evidence``), and its ``plan`` and ``decisions``. Empty in
    `Ensemble.history`."""


def scalars(record: Mapping[str, Any], prefix: str = "hdet/") -> dict[str, float]:
    """The numbers of a `CycleRecord`, by its own keys: ``hdet/values/lr``,
    ``hdet/losses/0`` (replica 0), ``hdet/converge_ms``. ``left_out`` is how many replicas were.
    Of a trial: its rate, suggestion and ends. What is None or text is missing, and ``record`` and
    ``tried``."""
    shown = {key: value for key, value in record.items() if key not in ("record", "step", "tried")}
    if "left_out" in shown:
        shown["left_out"] = len(shown["left_out"])
    if shown.get("trial"):
        shown["trial"] = {key: shown["trial"][key] for key in ("rate", "low", "high", "suggestion")}
    return dict(_numbers(shown, prefix.rstrip("/")))


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(item, f"{name}/{key}")
    elif isinstance(value, (bool, int, float)):
        yield name, float(value)


class TensorBoard:
    """A cycle's numbers as scalars at its step, its notes as text.

    Args:
        writer: a ``SummaryWriter`` of torch.utils.tensorboard or tensorboardX: its ``add_scalar``
            and ``add_text`` are called.

    Example::

        log = hdet.logging.TensorBoard(writer)
        ensemble = hdet.Ensemble(optimizer, scheduler, log=log)
    """

    def __init__(self, writer: Any) -> None:
        self._add_scalar, self._add_text = writer.add_scalar, writer.add_text

    def __call__(self, record: Mapping[str, Any], step: int) -> None:
        for name, value in scalars(record).items():
            self._add_scalar(name, value, step)
        for note in record["notes"]:
            self._add_text("hdet/notes", note, step)


class WandB:
    """A cycle's numbers in a run of Weights & Biases.

    They have an axis of their own, ``hdet/step``, so that they need not agree with the steps in
    which the loop logs.

    Args:
        run: what ``wandb.init()`` returns: its ``log`` and ``define_metric`` are called.

    Example::

        log = hdet.logging.WandB(run)
        ensemble = hdet.Ensemble(optimizer, scheduler, log=log)
    """

    def __init__(self, run: Any) -> None:
        self.run = run
        run.define_metric("hdet/step")
        run.define_metric("hdet/*", step_metric="hdet/step")

    def __call__(self, record: Mapping[str, Any], step: int) -> None:
        logged: dict[str, Any] = {"hdet/step": step, **scalars(record)}
        if record["notes"]:
            logged["hdet/notes"] = "; ".join(record["notes"])
        self.run.log(logged)


class History:
    """Appends records to a JSON Lines file: what ``hdet report`` reads.

    A record is an ``event`` at a ``step``. ``cycle`` is what the Ensemble logs. You may write
    ``train`` (``loss``, and ``lr``, the base rate) and ``validation`` (``loss``) beside it, and,
    without a step, ``start`` (``settings``, a dict) and ``end`` (``seconds``, of training).

    Args:
        path: a new file, with a suffix. Its folder is made. ``hdet report`` looks for
            ``history.jsonl``.
        resume_step: of the checkpoint from which the run goes on. The file is continued then, and
            what was recorded after that step is dropped, and every ``end``.

    Raises:
        FileExistsError: there is a file, and no ``resume_step``.
        ValueError: the path is that of a folder; or a line of the file that is to be continued is
            damaged. The file is as it was then.

    Example::

        history = hdet.logging.History("runs/first/history.jsonl")
        ensemble = hdet.Ensemble(optimizer, scheduler, log=history)
        history.write({"event": "validation", "step": 100, "loss": 1.5})
    """

    def __init__(self, path: str | Path, resume_step: int | None = None) -> None:
        self.path = Path(path).absolute()
        if self.path.is_dir() or not (self.path.suffix or self.path.is_file()):
            raise ValueError(f"path must be a file: pass {str(Path(path, 'history.jsonl'))!r}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is None:
            self.path.touch(exist_ok=False)
        elif self.path.exists():
            _drop_later_records(self.path, resume_step)

    def __call__(self, record: CycleRecord, step: int) -> None:
        self.write(record)

    def write(self, record: Mapping[str, Any]) -> None:
        """Can be read once this returns. Numbers that are not finite become null."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(record), allow_nan=False) + "\n")

    def sync(self) -> None:
        """To the disk: before a checkpoint that relies on these records."""
        with self.path.open("rb+") as file:
            os.fsync(file.fileno())


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: both become None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and records. A last line without its end was torn by a kill: it is left out.

    Raises:
        ValueError: no regular file, or a line that is no JSON object.
    """
    try:
        if not path.is_file():  # reading a pipe or a device may never end
            raise ValueError(f"history {str(path)!r} is not a regular file")
        *lines, _torn = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"history {str(path)!r} cannot be read ({error.strerror})") from error
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise ValueError(f"line {number} of {str(path)!r} is damaged: remove that line")
        yield number, record


def _drop_later_records(path: Path, step: int) -> None:
    """Also a last line that a killed process has not written to its end, and that it had ended.
    Raises as `read_records`, and for a step that is no number."""
    records, kept = list(read_records(path)), []
    for (number, record), line in zip(records, path.read_bytes().split(b"\n"), strict=False):
        event = record.get("event")
        at = record.get("step", None if event in ("cycle", "train", "validation") else step)
        if isinstance(at, bool) or not isinstance(at, (int, float)):
            raise ValueError(f"line {number} of {str(path)!r} has no step: remove that line")
        if at <= step and event != "end":
            kept.append(line + b"\n")
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(b"".join(kept))
    os.replace(partial, path)
