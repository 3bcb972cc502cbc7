"""The user's scheduler and what it schedules: untouched values on one side, corrected base values at rest on the other."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from .core.engine import Engine
from .core.schema import COUNT, Anything, Fields, Instance, Kind, ListOf, Number, Optional, like, read, unchanged_on_error
from .forecast import RATE, highest_factors, means, rehearse
from .knobs import Bound, GroupKnob

__all__ = ["Schedule", "Scheduler", "plain"]


class Scheduler(Protocol):
    """What an Ensemble asks of a scheduler: any of torch's. One that wraps torch's may have ``torch_alone()``: a scheduler of torch's, of the
    same run and optimizer, that can be copied and run ahead (`forecast.means`)."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Schedule:
    """A scheduler, or constant values, and the knobs of a run; only those of parameter groups does it move."""

    def __init__(self, scheduler: Scheduler | None, knobs: Sequence[Bound], total_steps: int | None) -> None:
        self.scheduler, self.knobs = scheduler, list(knobs)
        self.total_steps: int | None = getattr(scheduler, "total_steps", None) if total_steps is None else total_steps
        self._highest = highest_factors(scheduler, self.total_steps)

    @property
    def step(self) -> int | None:
        """Steps of the schedule done; None where nobody counts them."""
        return getattr(self.scheduler, "last_epoch", None)

    @property
    def is_over(self) -> bool:
        """Where a scheduler is stepped more often than the optimizer (several times a step, or in a step of rate 0), its end is the run's."""
        total = getattr(self.scheduler, "total_steps", self.total_steps)
        return total is not None and self.step == total

    def advance(self) -> None:
        """One step. The scheduler sees its own values, as it left them, and never a correction."""
        for knob in self.knobs:
            knob.show_schedule()
        if self.scheduler is not None:
            self.scheduler.step()
        for knob in self.knobs:
            knob.take_schedule()

    def write(self, engine: Engine) -> None:
        """Leave the corrected base values in their places. Rates come first: a product's decay follows its rate's correction."""
        for k, knob in enumerate(self.knobs):
            knob.write(engine.in_force(k), engine.bases[k])

    def values(self) -> list[float]:
        """[knob]: the untouched schedule's value now."""
        return [knob.scheduled_value() for knob in self.knobs]

    def base_values(self) -> list[float]:
        """[knob]: the base value in force, as `write` has left it."""
        return [knob.base_value() for knob in self.knobs]

    def peaks_and_floors(self) -> tuple[list[float], list[float]]:
        """Highest and lowest values of the untouched schedule, by knob."""
        pairs = [knob.peak_and_floor() for knob in self.knobs]
        return [peak * self._highest_of(knob) for (peak, _), knob in zip(pairs, self.knobs, strict=True)], [floor for _, floor in pairs]

    def means(self) -> list[float]:
        """[knob]: the mean of the untouched schedule from now to the end of the run; its peak where that cannot be told."""
        ahead = means(self.scheduler, self.total_steps)
        return [
            ahead[knob.indices[0]] if ahead and isinstance(knob, GroupKnob) and knob.key == "lr" else peak
            for knob, peak in zip(self.knobs, self.peaks_and_floors()[0], strict=True)
        ]

    def _highest_of(self, knob: Bound) -> float:
        return self._highest[knob.indices[0]] if self._highest and isinstance(knob, GroupKnob) and knob.key == "lr" else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "scheduled": {knob.name: [float(x) for x in knob.scheduled] for knob in self.knobs},
            "scheduler": None if self.scheduler is None else plain(self.scheduler.state_dict()),
        }

    def check_state(self, state: Any) -> dict[str, Any]:
        """The schedule's own values by knob, "scheduled", and the "scheduler"'s state; changes nothing.

        Raises:
            ValueError: a state of another run, or a damaged one.
        """
        given = read(state, {"scheduler": Optional(Instance(Mapping))}, "ensemble's")["scheduler"]
        total = getattr(self.scheduler, "total_steps", None)
        last = None if given is None else given.get("last_epoch")
        least = -RATE.high if type(last) is int and last == total else RATE.low  # after its last step a linear OneCycleLR is below 0
        scheduled: dict[str, Kind] = {knob.name: ListOf(_value_of(knob, least), len(knob.cells)) for knob in self.knobs}
        values = read(state, {"scheduled": Fields(scheduled)}, "ensemble's")
        if (given is None) != (self.scheduler is None):
            raise ValueError("the ensemble's state and this run differ in having a scheduler: construct it as the saved run did")
        if self.scheduler is None:
            return values
        if isinstance(given.get("total_steps"), int) and given["total_steps"] != total:
            raise ValueError(
                f"the saved run has total_steps {reprlib.repr(given['total_steps'])}, this one {total!r}: build the scheduler as the saved run did"
            )
        own = plain(self.scheduler.state_dict())
        torchs = type(self.scheduler).__module__.startswith(("torch.", "hdet."))
        # Of somebody's own class what its lists hold is its own business, and keys may come in the course of a run.
        kinds = {
            key: like(value, least) if torchs else Anything() if isinstance(value, (Mapping, list, tuple)) else like(value)
            for key, value in own.items()
        }
        if type(own.get("last_epoch")) is int:
            kinds["last_epoch"] = Number(-1, COUNT.high if total is None else total, whole=True)
        values["scheduler"] = {**({} if torchs else given), **read(given, kinds, "scheduler's")}
        rehearse(self.scheduler, values["scheduler"], self.total_steps)
        return values

    @contextmanager
    def taken_over(self, state: Mapping[str, Any]) -> Iterator[None]:
        """Loads a state, unless what is done inside raises. Raises as `check_state`, also where the scheduler itself refuses; nothing is changed
        then."""
        values = self.check_state(state)
        with unchanged_on_error(self.scheduler):
            if self.scheduler is not None:
                self.scheduler.load_state_dict(values["scheduler"])
            yield
        for knob in self.knobs:
            knob.scheduled = [float(x) for x in values["scheduled"][knob.name]]


def _value_of(knob: Bound, least: float) -> Kind:
    """A beta stays below 1, on a linear scale values pass 0, and on a log scale they are ``least`` or more."""
    if knob.scale.kind == "horizon":
        return Number(0, 1 - 2**-53)
    return Number(least if knob.scale.kind == "log" else -RATE.high, RATE.high)


def plain(value: Any) -> Any:
    """Tensors as numbers, so that a state loads with weights_only and holds no device."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
