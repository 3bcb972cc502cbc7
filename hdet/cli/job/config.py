"""Every setting of the main job, checked before a process is started. Imports no torch, so that the command line answers at once."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

MODES = ("hdet", "fixed")
CONTROLLERS = ("probe", "auto", "softmax", "none")
DEVICES = ("auto", "cpu", "cuda")
_COUNTS = (
    *("steps", "replicas", "batch_size", "sync_interval", "probe_batches", "average_every"),
    *("layers", "width", "heads", "context", "log_interval", "validation_batches"),
)
_MARKS = {"mode", "max_lr", "steps", "pct_start", "replicas", "sync_interval", "spread", "controller"}


def _setting(default: Any, text: str) -> Any:
    """A field with its line in the help of the command."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class TrainConfig:
    """One run: a byte-level GPT under OneCycle, with the fixed schedule or with HDET. Same numbers, same data, same seed: same run.

    Raises:
        ValueError: on construction, for any setting that cannot work; the message names the setting, its value and the remedy.
    """

    mode: str = _setting("hdet", "hdet (replicas, converge, controller) or fixed (plain data-parallel training on the untouched schedule)")
    max_lr: float = _setting(3e-4, "peak of the OneCycle schedule; the default is 30 times too low for this model")
    steps: int = _setting(2000, "optimizer steps of the whole run")
    pct_start: float = _setting(0.1, "part of the run in which the schedule rises")
    replicas: int = _setting(4, "replicas, one process each unless they are co-resident")
    coresident: bool = _setting(
        False, "all replicas in one process on one device, which share gradient and moments, instead of one process each"
    )
    batch_size: int = _setting(8, "windows of text per replica and step")
    sync_interval: int = _setting(50, "optimizer steps in a cycle: replicas are averaged after each")
    spread: float = _setting(
        0.3, "alpha: replicas train with 1 - alpha to 1 + alpha times the base rate; with controller auto they train alike"
    )
    controller: str = _setting(
        "probe",
        "what moves the base rate: probe, auto (finds it in the first steps), softmax (as published), "
        "or none; one replica is enough for auto",
    )
    budget: float | None = _setting(
        None,
        "part of the run's compute that the trial of controller auto may take, 0 for none; "
        "default: 0.03, and in runs of 1 000 steps and more one trial in any case",
    )
    probe_batches: int = _setting(8, "mini-batches that all replicas score at the end of a cycle, for the probe controller")
    average_every: int = _setting(5, "steps between two samples of the cycle average that the probe scores")
    seed: int = _setting(0, "fixes the initial weights, the batches and the assignment of multipliers")
    weight_decay: float = _setting(0.1, "decoupled weight decay of the matrices; vectors have none")
    layers: int = _setting(2, "transformer blocks")
    width: int = _setting(64, "features per byte of text; a multiple of heads")
    heads: int = _setting(4, "attention heads")
    context: int = _setting(64, "bytes of text in a window")
    data: str | None = _setting(None, "folder of *.py, *.txt or *.md files to train on; default: the running Python's own library")
    device: str = _setting("auto", "auto (GPUs when there is one per process, else CPU), cpu, or cuda")
    log_interval: int = _setting(10, "steps between two records of the training loss")
    validation_interval: int | None = _setting(None, "steps between validations, in whole cycles; default: about ten in a run")
    validation_batches: int = _setting(64, "mini-batches of 32 windows in the final validation")
    checkpoint_interval: int | None = _setting(None, "steps between checkpoints, in whole cycles; default: about ten in a run")

    def __post_init__(self) -> None:
        for setting in fields(self):
            _check_type(setting.name, getattr(self, setting.name), str(setting.type))
        for name, holds, rule in self._rules():
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)!r}: it {rule}")

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        """(setting, whether it can work, what it must be); later ones rely on earlier ones."""
        for name in _COUNTS:
            yield name, getattr(self, name) >= 1, "must be at least 1"
        yield "max_lr", self.max_lr > 0, "must be positive, e.g. 3e-4"
        yield "pct_start", 0 < self.pct_start < 1, "must lie between 0 and 1, e.g. 0.1"
        # torch's OneCycleLR divides by the steps of the rise minus one.
        one_step = f"must not be exactly one of {self.steps} steps, e.g. {1.5 / self.steps:.2g}"
        yield "pct_start", self.pct_start * self.steps != 1, one_step
        yield "spread", 0 <= self.spread < 1, "must lie in [0, 1), e.g. 0.3: multipliers are 1 - spread to 1 + spread"
        no_part = "must lie in [0, 1), e.g. 0.03, or 0 for no trial"
        yield "budget", self.budget is None or 0 <= self.budget < 1, no_part
        yield "weight_decay", self.weight_decay >= 0, "must not be negative, e.g. 0.1"
        yield "seed", 0 <= self.seed < 2**63, "must not be negative, and must be below 2^63"
        yield "data", self.data != "", "must name a folder"
        yield "context", self.context <= 4096, "must be at most 4096 bytes"
        for name, choices in (("mode", MODES), ("controller", CONTROLLERS), ("device", DEVICES)):
            yield name, getattr(self, name) in choices, f"must be one of {', '.join(choices)}"
        yield "steps", self.steps >= 2, "must be at least 2: the schedule rises and falls"
        yield "width", self.width % self.heads == 0, f"must be a multiple of heads ({self.heads})"
        yield "sync_interval", self.sync_interval <= self.steps, f"must not exceed steps ({self.steps}), or no cycle ever ends"
        for name in ("validation_interval", "checkpoint_interval"):
            value = getattr(self, name)
            whole_cycles = f"must be a multiple of sync_interval ({self.sync_interval}): replicas are equal only at the end of a cycle"
            yield name, value is None or (value >= 1 and value % self.sync_interval == 0), whole_cycles
        if self.trains_alike:
            # Replicas that train alike are, in one process, gradient accumulation with copies of the parameters that are never used.
            instead = f"for one process pass replicas 1 and batch_size {self.replicas * self.batch_size}"
            yield "coresident", not self.coresident, f"must be left out with controller auto, whose replicas train alike: {instead}"
        if self.coresident:
            yield "replicas", self.replicas >= 2, "must be at least 2 to be co-resident"
        if self.mode == "hdet" and self.controller == "probe":
            yield "probe_batches", self.probe_batches >= 2, "must be at least 2: the slope's error comes from their differences"
        if self.mode == "hdet" and self.controller not in ("auto", "none"):
            yield "replicas", self.replicas >= 2, "must be at least 2 for a controller to compare; or pass controller none or auto"
            yield "spread", self.spread > 0, "must be positive for a controller to compare replicas; or pass controller none or auto"

    # -- what follows from the settings ----------------------------------------------------------------------------------

    @property
    def trains_alike(self) -> bool:
        """Is the rate found in the first steps? Then replicas train alike, and one is enough."""
        return self.mode == "hdet" and self.controller == "auto"

    @property
    def processes(self) -> int:
        return 1 if self.coresident else self.replicas

    @property
    def cycles(self) -> int:
        """Cycles in the run; the last may be short."""
        return -(-self.steps // self.sync_interval)

    @property
    def warmup_steps(self) -> int:
        """Steps in which the schedule rises."""
        return int(self.pct_start * self.steps)

    def _about_ten(self, value: int | None) -> int:
        return value if value is not None else max(1, round(self.steps / 10 / self.sync_interval)) * self.sync_interval

    def validates_at(self, step: int) -> bool:
        """Is the short validation due after ``step``? The full one follows the last step instead."""
        return step % self._about_ten(self.validation_interval) == 0 and step < self.steps

    def saves_at(self, step: int) -> bool:
        """Is a checkpoint due after ``step``? Only where a cycle ends, so that one replica's weights are everyone's."""
        return step % self._about_ten(self.checkpoint_interval) == 0 or step == self.steps

    def ends_cycle(self, step: int) -> bool:
        return step % self.sync_interval == 0 or step == self.steps

    # -- files -----------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def has_written(values: object) -> bool:
        """Are these the settings of a run, of this version of hdet or another? They mark its folder as one."""
        return isinstance(values, dict) and values.keys() >= _MARKS and values["mode"] in MODES

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Raises ValueError for a setting this version does not have."""
        unknown = sorted(set(values) - set(cls.__dataclass_fields__))
        if unknown:
            raise ValueError(f"unknown setting {unknown[0]!r}: it was written by another version of hdet")
        return cls(**values)


def _check_type(name: str, value: Any, kind: str) -> None:
    """``kind``: the setting's annotation, such as "int | None". A config.json can hold anything; a wrong type would otherwise surface deep inside a worker."""
    expected, _, optional = kind.partition(" | ")
    if value is None and optional:
        return
    plain = value is not None and not isinstance(value, bool)
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError(f"{name} is {reprlib.repr(value)}: it must be below 2^63")
    fits, wish = {
        "int": (plain and isinstance(value, int), "a whole number"),
        "float": (plain and isinstance(value, (int, float)) and math.isfinite(value), "a finite number"),
        "bool": (isinstance(value, bool), "true or false"),
        "str": (isinstance(value, str), "text"),
    }[expected]
    if not fits:
        raise ValueError(f"{name} is {value!r}: it must be {wish}")
