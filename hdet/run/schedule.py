"""The user's scheduler and what it schedules: untouched values on one side, corrected base values at rest on the other."""

from __future__ import annotations

import math
import reprlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol

import torch

from ..core.engine import Engine
from ..core.schema import ANYTHING, COUNT, Fields, Instance, Kind, ListOf, Number, Optional, Or, like, read, unchanged_on_error
from ..knobs import Bound, GroupKnob
from ..knobs.cells import content
from ..replicas.agreement import ReplicaDisagreement, digest
from ..replicas.layout import brief
from .forecast import RATE, highest_factors, rehearse
from .torch_schedulers import REMEDY, TorchSchedulers, position

__all__ = ["Schedule", "Scheduler", "plain"]


class Scheduler(Protocol):
    """What an Ensemble asks of a scheduler: any of torch's. One that wraps torch's may have ``torch_alone()``: a scheduler of torch's, of the
    same run and optimizer, that can be copied and run ahead (`forecast.rehearse`)."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Schedule:
    """A scheduler, which moves knobs of parameter groups, or constant values. Others may write, too: `take_writes`."""

    def __init__(self, scheduler: Scheduler | None, knobs: Sequence[Bound], total_steps: int | None) -> None:
        self.scheduler, self.knobs = scheduler, list(knobs)
        self._moved = [knob for knob in self.knobs if isinstance(knob, GroupKnob)]
        self._told_knobs: list[tuple[float, float | None]] = []
        """[knob]: what `write` has told it."""
        self.total_steps: int | None = getattr(scheduler, "total_steps", None) if total_steps is None else total_steps
        # torch's schedulers write into parameter groups alone
        optimizer = next((knob.optimizer for knob in self.knobs if isinstance(knob, GroupKnob)), None)
        self._optimizer, self._others = optimizer, TorchSchedulers(optimizer, scheduler)
        self._shown = self._told = False
        self._left: tuple[int, ...] | None = None
        """Where our last step has left the scheduler; None where that is not known."""
        self._elsewhere: int | None = 0
        """In how many steps in a row somebody else has moved it; None once that was told."""

    @cached_property
    def _highest(self) -> list[float] | None:
        """By group, of a scheduler that multiplies its rate; also of one that the user steps, or that is inside of a framework's."""
        found = (highest_factors(one, self.total_steps) for one in self._others.present())
        return next((factors for factors in found if factors is not None), None)

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
            knob.see_schedule()
        if self.scheduler is not None:
            self._check_alone()
            for knob in self._moved:
                knob.show_schedule()
            self.scheduler.step()
            self._left = self._position()
            for knob in self._moved:
                knob.take_schedule()
            self.note()

    def _check_alone(self) -> None:
        """Warns once where somebody else steps the scheduler as well. Once is no step: a state was loaded."""
        before, self._left = self._left, None
        if before is None or self._elsewhere is None:
            return
        self._elsewhere = self._elsewhere + 1 if self._position() > before else 0
        if self._elsewhere > 1:
            self._elsewhere = None
            warnings.warn(
                "somebody else steps the scheduler that was given to the Ensemble, whose step() does so already: the schedule passes too fast. "
                "Step it in one place only",
                stacklevel=4,
            )

    def _position(self) -> tuple[int, ...]:
        """Of the scheduler; of a framework's, such as accelerate's, that of torch's inside of it."""
        return sum(map(position, self._others.own_parts()), ())

    def write(self, engine: Engine) -> None:
        """Leave the corrected base values in their places. Rates come first: a product's decay follows its rate's correction."""
        self._told_knobs = self._in_force(engine)
        for knob, (correction, base) in zip(self.knobs, self._told_knobs, strict=True):
            knob.write(correction, base)
        if not self._others.looked and any(told != (1.0, None) for told in self._told_knobs):
            self._others.look()  # from now on there is something to tell

    def write_changes(self, engine: Engine) -> None:
        """`write`, unless that is what is there: at the end of each step."""
        if self._in_force(engine) != self._told_knobs or not all(knob.settled for knob in self.knobs):
            self.write(engine)

    def _in_force(self, engine: Engine) -> list[tuple[float, float | None]]:
        return [(engine.in_force(k), engine.held[k]) for k in range(len(self.knobs))]

    # -- what others write -----------------------------------------------------------------------------------------------

    def take_writes(self, engine: Engine) -> None:
        """What somebody else has written since `write`. A torch scheduler's value is the schedule's, and is corrected; any other is the base
        value in force, from which the schedule's follows. If nobody has written, it costs a comparison for each value. Raises ValueError inside
        `rescheduling`, and where it cannot be told which of these it is; nothing is changed then."""
        self.check_at_rest()
        # Who has stepped may have written what stood there: half of a rate, where the correction is 2.
        stepped = self._others.moved()
        writes = [
            (knob, i, knob.cells[i].get())
            for knob in self.knobs
            for i in (range(len(knob.cells)) if stepped and isinstance(knob, GroupKnob) and not knob.in_use else knob.written())
        ]
        if writes:
            self._take(writes, engine)

    def check_at_rest(self) -> None:
        """Raises ValueError inside of `rescheduling`."""
        if self._shown:
            raise ValueError(
                "inside `with ensemble.rescheduling():` values are the schedule's own, without corrections: step, explore, save, load and read outside"
            )

    def _take(self, writes: Sequence[tuple[Bound, int, Any]], engine: Engine) -> None:
        own = self._own_values(writes)
        by_hand = [write for write, value in zip(writes, own, strict=True) if value is None]
        factors = {knob: _common_factor(knob, by_hand) for knob, _, _ in by_hand if knob.base is not None}
        for k, knob in enumerate(self.knobs):
            if knob in factors and knob.base is not None:
                knob.base = engine.held[k] = knob.base * factors[knob]
        # Rates first: what a product's decay is corrected by follows from theirs.
        for (knob, i, written), value in zip(writes, own, strict=True):
            if value is not None:
                knob.scheduled[i] = value
            elif knob.base is None:
                knob.take_base(i, written)
        for knob in self.knobs:
            if not knob.in_use:
                knob.rewrite()
        self._tell(by_hand)
        self.note()

    def _own_values(self, writes: Sequence[tuple[Bound, int, Any]]) -> list[Any]:
        """[write]: the value of the untouched schedule, where it is no base value."""
        own = [None if knob.differs(i, value) else content(value) for knob, i, value in writes]
        asked = {n: (knob, i, value) for n, (knob, i, value) in enumerate(writes) if own[n] is None and isinstance(knob, GroupKnob)}
        if asked:
            if not self._others.looked:  # no correction yet, but a bound
                self._others.look()
                self._others.forget()
            for n, value in zip(asked, self._others.own_values(list(asked.values()), self.knobs), strict=True):
                own[n] = value
        return own

    def _tell(self, by_hand: Sequence[tuple[Bound, int, Any]]) -> None:
        """Warns once, because no correction has an effect under a schedule that is written by hand in each step."""
        if self._told or not by_hand or self._others.claims(by_hand):
            return
        self._told = True
        knob, _, value = by_hand[0]
        warnings.warn(
            f"{knob.name} was set to {float(value):g} while a correction of it is in force: this is taken as the base value in force, and further "
            f"corrections will be relative to it. If it is a schedule's value, to be corrected, {REMEDY}",
            stacklevel=5,
        )

    @contextmanager
    def rescheduling(self, engine: Engine) -> Iterator[None]:
        """Inside, the cells hold the schedule's own values, and what is there at the end are the next of them."""
        try:
            self.take_writes(engine)
        except ValueError:  # what cannot be told apart stays where it is, and is the schedule's by the user's word
            if self._shown:
                raise
        for knob in self.knobs:
            knob.show_schedule()
        self._shown = True
        try:
            yield
        finally:
            self._shown = False
            for knob in self.knobs:
                knob.take_schedule()
            for knob in self.knobs:
                knob.rewrite()
            if self._others.looked:
                self._others.look()  # one may have been built inside

    def note(self) -> None:
        """Schedulers that stand elsewhere than before have written what is taken already; or their states were loaded."""
        self._others.note()

    # -- what is known ---------------------------------------------------------------------------------------------------

    def values(self) -> list[float]:
        """[knob]: the untouched schedule's value now."""
        return [knob.scheduled_value() for knob in self.knobs]

    def base_values(self) -> list[float]:
        """[knob]: the base value in force, as `write` has left it."""
        return [knob.base_value() for knob in self.knobs]

    def floors(self) -> list[float]:
        """[knob]: the lowest value of the untouched schedule; 0 is unknown."""
        return [knob.floor() for knob in self.knobs]

    def peaks(self) -> list[list[float]]:
        """[knob][cell]: the highest value of the untouched schedule."""
        factors = self._highest
        return [
            [
                knob.peak(i)
                * (factors[knob.indices[i]] if factors is not None and isinstance(knob, GroupKnob) and knob.key == "lr" else 1.0)
                for i in range(len(knob.cells))
            ]
            for knob in self.knobs
        ]

    def highest(self) -> list[float]:
        """[knob]: of the untouched schedule, now and in the steps since `forget_highest`."""
        return [max(float(knob.highest), knob.scheduled_value()) for knob in self.knobs]

    def forget_highest(self) -> None:
        """The controller was told."""
        for knob in self.knobs:
            knob.highest = -math.inf

    def mark(self) -> float:
        """Of the untouched values, as a number for the stats; waits for a device where they are."""
        return float(digest([[float(x) for x in knob.scheduled] for knob in self.knobs]))

    def check_marks(self, marks: Sequence[float]) -> None:
        """Raises `ReplicaDisagreement`, on every rank alike, if `mark` differs between replicas."""
        if len(set(marks)) > 1:
            alike = sorted((brief([r for r, x in enumerate(marks) if x == mark]) for mark in set(marks)), key=len, reverse=True)
            raise ReplicaDisagreement(
                f"the schedule's values of {', '.join(knob.name for knob in self.knobs)} differ between replicas ({'; '.join(alike[:4])}): their "
                "schedules have drifted apart, or somebody has written a value on some ranks only. Write it on all ranks alike, and go on from "
                "the last checkpoint"
            )

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "scheduled": {knob.name: [float(x) for x in knob.scheduled] for knob in self.knobs},
            "highest": {knob.name: high if (high := float(knob.highest)) > -math.inf else None for knob in self.knobs},
            "scheduler": None if self.scheduler is None else plain(self.scheduler.state_dict()),
        }

    def check_state(self, state: Any) -> dict[str, Any]:
        """The schedule's own values by knob, "scheduled", and the "scheduler"'s state; changes nothing. Raises ValueError for a state of another
        run, or a damaged one."""
        given = read(state, {"scheduler": Optional(Instance(Mapping))}, "ensemble's")["scheduler"]
        own = {} if self.scheduler is None else plain(self.scheduler.state_dict())
        total = own.get("total_steps", getattr(self.scheduler, "total_steps", None))  # accelerate's wrapper has it in its state only
        last = None if given is None else given.get("last_epoch")
        least = -RATE.high if type(last) is int and last == total else RATE.low  # after its last step a linear OneCycleLR is below 0
        scheduled = {knob.name: ListOf(_value_of(knob, least), len(knob.cells)) for knob in self.knobs}
        highest = Or(Fields({name: Optional(kind.kind) for name, kind in scheduled.items()}), dict.fromkeys(scheduled))  # or older
        values = read(state, {"scheduled": Fields(scheduled), "highest": highest}, "ensemble's")
        if (given is None) != (self.scheduler is None):
            raise ValueError("the ensemble's state and this run differ in having a scheduler: construct it as the saved run did")
        if self.scheduler is None:
            return values
        if isinstance(given.get("total_steps"), int if total is None else (int, float)) and given["total_steps"] != total:
            raise ValueError(
                f"the saved run has total_steps {reprlib.repr(given['total_steps'])}, this one {total!r}: build the scheduler as the saved run did"
            )
        torchs = type(self.scheduler).__module__.startswith(("torch.", "hdet."))
        # Of somebody's own class what its lists hold is its own business, and keys may come in the course of a run.
        kinds = {
            key: like(value, least) if torchs else ANYTHING if isinstance(value, (Mapping, list, tuple)) else like(value)
            for key, value in own.items()
        }
        if type(own.get("last_epoch")) is int:
            kinds["last_epoch"] = Number(-1, COUNT.high if total is None else total, whole=True)
        if type(own.get("total_steps")) is int:
            kinds["total_steps"] = COUNT  # torch compares it with steps, and says it by a format of whole numbers
        values["scheduler"] = {**({} if torchs else given), **read(given, kinds, "scheduler's")}
        rates = {
            index: rate
            for knob in self._moved
            if knob.key == "lr"
            for index, rate in zip(knob.indices, values["scheduled"][knob.name], strict=True)
        }
        rehearse(self.scheduler, values["scheduler"], rates, self.total_steps)
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
        self._left = None
        for knob in self.knobs:
            knob.scheduled = [float(x) for x in values["scheduled"][knob.name]]
            high = values["highest"][knob.name]
            knob.highest = -math.inf if high is None else float(high)


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


def _common_factor(knob: Bound, by_hand: Sequence[tuple[Bound, int, Any]]) -> float:
    """Of the values that were written, to those before. Raises ValueError where they have none: off the schedule there is one base value."""
    written = {i: float(value) for one, i, value in by_hand if one is knob}
    factors = [written.get(i, float(left)) / float(left) for i, left in enumerate(knob.left)]
    if not min(factors) > (1 - 1e-6) * max(factors) > 0:
        raise ValueError(
            f"{knob.name} was set to {', '.join(f'{written.get(i, float(left)):g}' for i, left in enumerate(knob.left))} in its groups, but it has left "
            "the schedule (the controller's decay stands for it) and keeps the ratio of the groups: multiply all of them alike, by a number above 0, or "
            "pass decay=None"
        )
    return factors[0]
