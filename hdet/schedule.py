"""Base value = schedule x correction: one owner steps the scheduler, and writes."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch.optim import Optimizer

from .core import schema
from .core.value import LARGEST_CORRECTION
from .knobs import BoundKnob, GroupKnob
from .replicas.agreement import ReplicaDisagreement, digest
from .replicas.layout import brief
from .simulation import simulate

__all__ = ["Schedule", "Scheduler", "plain"]

LOWEST_RATE, HIGHEST_RATE = -1e-9, 1e30
"""Rounding may leave a little less than 0 at the end of a schedule."""
STATE = "the ensemble's state"
T = TypeVar("T")
TOLERANCE = 0.01
"""Two rates that differ by this part of them are the same: one may have been rounded."""


class Scheduler(Protocol):
    """What an Ensemble asks of a scheduler: any of torch's, or one that wraps one of torch's."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Schedule:
    """Steps the scheduler, which sees its own values only, and leaves the corrected ones.

    The scheduler moves knobs of parameter groups; what no scheduler moves has a constant schedule.
    Whoever else moves a value says so: inside `rescheduling`, or by `Ensemble.set_value`. Any other
    write is refused at the next step (`check_unwritten`).

    Args:
        scheduler: stepped once for each step of the run. None: constant values, or a schedule that
            somebody steps inside `rescheduling`.
        knobs: of the run; rates first, because a product's decay follows its rate's correction.
        total_steps: of the run; None: the scheduler's, if it has one.
    """

    def __init__(
        self, scheduler: Scheduler | None, knobs: Sequence[BoundKnob], total_steps: int | None
    ) -> None:
        self.scheduler, self.knobs = scheduler, list(knobs)
        own_length: int | None = getattr(scheduler, "total_steps", None)
        self.total_steps = own_length if total_steps is None else total_steps
        self.doubt = ""
        """Why the peaks may not be those of the run."""
        self._rows: dict[int, list[float]] = {}
        """What a simulation says of the first steps, of `_moved`."""
        self._moved = [knob for knob in self.knobs if isinstance(knob, GroupKnob)]
        self._rates: dict[int, tuple[float, int]] = {}
        """By parameter group, what a simulation says of its rate: the peak, and its step."""
        self._is_shown = False
        self.is_neutral = False
        """Are all base values the schedule's own? Then `advance` leaves them."""

    @property
    def step(self) -> int | None:
        """Steps of the schedule done; None where nobody counts them."""
        return getattr(self.scheduler, "last_epoch", None)

    def simulate(self, optimizer: Optimizer, schedulers: Sequence[tuple[Any, int]]) -> None:
        """Let peaks and floors be those of a simulation. Asked for before the first step, and where
        a framework has other schedulers by now; it takes as long as all their steps in the run.

        Args:
            schedulers: the run's, each with the number of optimizer steps from one of its steps to
                the next.

        Raises:
            ValueError: one that cannot be simulated.
        """
        places = [(i, knob.key, knob.entry) for knob in self._moved for i in knob.indices]
        with_rate = [i for i, g in enumerate(optimizer.param_groups) if g.get("lr") is not None]
        rates = [(i, "lr", None) for i in with_rate]
        course = simulate(schedulers, optimizer, self.total_steps, [*places, *rates])
        highest, lowest, self._rows = iter(course.highest), iter(course.lowest), course.rows
        for knob in self._moved:
            knob.simulated = [(next(highest), next(lowest)) for _ in knob.indices]
            knob.note_peaks()
        peaks = zip(highest, course.peak_steps[len(places) :], strict=True)
        self._rates = dict(zip(with_rate, peaks, strict=True))

    def coming_rate(self, optimizer: Optimizer, step: int) -> float | None:
        """The highest base rate of the optimizer after so many steps, explored or not. Of a group
        whose schedule is still to reach its peak, that of the peak. None where no schedule was
        simulated. Waits for the device of a tensor."""
        movers: dict[int, tuple[GroupKnob, int]] = {
            i: (knob, cell)
            for knob in self._moved if knob.key == "lr"
            for cell, i in enumerate(knob.indices)
        }  # fmt: skip
        found = []
        for i, (peak, peak_step) in self._rates.items():
            knob, cell = movers.get(i, (None, 0))
            now = optimizer.param_groups[i]["lr"] if knob is None else knob.scheduled[cell]
            rate = peak if step < peak_step else float(now)
            found.append(rate if knob is None else float(knob.corrected(rate, cell)))
        return max(found, default=None)

    def advance(self) -> bool:
        """One step. `write` must follow, unless the schedule `is_neutral`. Returns whether the
        schedule is over, where it has an end of its own."""
        for knob in self.knobs:
            now = knob.scheduled[0]
            if isinstance(now, torch.Tensor):
                knob.highest = now.clamp(min=knob.highest)
            elif now > knob.highest:
                knob.highest = now
        scheduler = self.scheduler
        if scheduler is None:
            return False
        if not self.is_neutral:
            for knob in self._moved:
                knob.show_schedule()
        try:
            scheduler.step()
        finally:
            for knob in self._moved:
                knob.take_schedule()
        # It may be stepped more often than the optimizer: then its end is the run's all the same.
        total = getattr(scheduler, "total_steps", self.total_steps)
        return total is not None and getattr(scheduler, "last_epoch", None) == total

    def write(self) -> None:
        """Leave the corrected base values in their places, but where a replica's value stands."""
        for knob in self.knobs:
            if not knob.is_lent:
                knob.write()
        self.is_neutral = all(knob.is_neutral for knob in self.knobs)

    # -- what others write -------------------------------------------------------------------------

    def check_unwritten(self) -> None:
        """A comparison for each value; a tensor is read only if something has written to it.

        Raises:
            ValueError: somebody else has written a value, or this is called inside `rescheduling`.
        """
        if self._is_shown:
            self.check_at_rest()
        for knob in self.knobs:
            if knob.is_plain and not knob.is_lent and knob.read() == knob.left:
                continue
            place = knob.find_foreign_write()
            if place is not None:
                raise ValueError(
                    f"{knob.name_of(place)} is {float(knob.read()[place]):g}, and was left at "
                    f"{float(knob.left[place]):g}: somebody else has written it. Remove "
                    "scheduler.step() from the loop, ensemble.step() calls it; build the scheduler "
                    "before the Ensemble; on resuming load ensemble.state_dict() too. Write a "
                    f"value of your own by ensemble.set_value({knob.name!r}, ...), and step, build "
                    "or load a schedule of your own inside `with ensemble.rescheduling():`"
                )

    def check_at_rest(self) -> None:
        """Raises ValueError inside `rescheduling`."""
        if self._is_shown:
            raise ValueError(
                "inside `with ensemble.rescheduling():` values are the schedule's own, without "
                "corrections: step, explore, save, load and read outside"
            )

    @contextmanager
    def rescheduling(self) -> Iterator[None]:
        """Inside, the cells hold the schedule's own values; what is left there is taken for the
        next ones. Inside `explore` that goes for the knobs that act in the optimizer's step.

        Raises:
            ValueError: inside itself, or a value was written before.
        """
        self.check_unwritten()
        moved = [knob for knob in self.knobs if not knob.is_lent]
        for knob in moved:
            knob.show_schedule()
        self._is_shown = True
        try:
            yield
        finally:
            self._is_shown = False
            rates = [knob for knob in self._moved if knob.key == "lr" and not self.doubt]
            if any(not k.knows_peaks and k.find_foreign_write() is not None for k in rates):
                self.doubt = (
                    "its highest value is not known, where rescheduling() writes it: give a torch "
                    "scheduler to the Ensemble, or set group['max_lr'] to that value in each "
                    "parameter group"
                )
            for knob in moved:
                knob.take_schedule()
            self.write()

    # -- by name -----------------------------------------------------------------------------------

    def by_knob(self, column: Sequence[T]) -> dict[str, T]:
        """[knob], by name."""
        return {knob.name: entry for knob, entry in zip(self.knobs, column, strict=True)}

    def named(self, name: str) -> BoundKnob:
        """Raises ValueError where there is no such knob."""
        for knob in self.knobs:
            if knob.name == name:
                return knob
        raise ValueError(f"there is no knob {name!r}, only {[knob.name for knob in self.knobs]}")

    # -- what is known: [knob] ---------------------------------------------------------------------

    def base_values(self) -> list[float]:
        """As `write` has left them."""
        return [knob.base_value() for knob in self.knobs]

    def corrections(self) -> list[float]:
        return [knob.correction for knob in self.knobs]

    def peak_rates(self) -> list[tuple[int, float]]:
        """(parameter group, its schedule's peak with the correction in use), of each rate."""
        return [
            (index, knob.scale.corrected(peak, knob.correction))
            for knob in self.knobs
            if knob.key == "lr"
            for index, peak in zip(knob.indices, knob.peaks(), strict=True)
        ]

    def find_doubt(self) -> str:
        """Why the peaks may not be those of the run; "" where nothing says so. Waits for the device
        of a tensor."""
        expected = iter(() if self.step is None else self._rows.get(self.step, ()))
        for knob in self._moved:
            for now, peak in zip(knob.scheduled, knob.peaks(), strict=True):
                own = next(expected, None)
                is_other = own is not None and abs(float(now) - own) > TOLERANCE * own + 1e-6 * peak
                if knob.key == "lr" and (is_other or float(now) > (1 + TOLERANCE) * peak):
                    said = f"{own:g} in this step" if is_other else f"at most {peak:g}"
                    return self.doubt or f"it is {float(now):g}, and a copy of its schedule {said}"
        return self.doubt

    # -- the same on all ranks ---------------------------------------------------------------------

    def mark(self) -> float:
        """Of all values, scheduled and left, as one number. Waits for a device where they are."""
        return float(
            digest([[float(x) for x in (*knob.scheduled, *knob.left)] for knob in self.knobs])
        )

    def check_marks(self, marks: Sequence[float]) -> None:
        """Raises `ReplicaDisagreement`, on every rank alike, if `mark` differs between replicas."""
        if len(set(marks)) > 1:
            parties = (brief([r for r, x in enumerate(marks) if x == mark]) for mark in set(marks))
            alike = sorted(parties, key=len, reverse=True)
            raise ReplicaDisagreement(
                f"the values of {', '.join(knob.name for knob in self.knobs)} differ between "
                f"replicas ({'; '.join(alike[:4])}): their schedules have drifted apart, or "
                "set_value() was called on some ranks only. Call it on all ranks alike, and go on "
                "from the last checkpoint"
            )

    # -- checkpoint --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        highest = {knob.name: float(knob.highest) for knob in self.knobs}
        return {
            "corrections": self.corrections(),
            "bases": [knob.off_schedule for knob in self.knobs],
            "scheduled": {knob.name: [float(x) for x in knob.scheduled] for knob in self.knobs},
            "highest": {name: x if x > -math.inf else None for name, x in highest.items()},
            "scheduler": None if self.scheduler is None else plain(self.scheduler.state_dict()),
        }

    def check_state(self, state: Any) -> dict[str, Any]:
        """The checked values of a `state_dict`; changes nothing.

        Raises:
            ValueError: a state of another run, or one with values that no schedule has.
        """
        correction = schema.number(LARGEST_CORRECTION**-2, LARGEST_CORRECTION)
        base, count = schema.optional(schema.number(1e-100)), len(self.knobs)
        checks = {
            "scheduler": schema.optional(schema.MAPPING),
            "corrections": schema.list_of(correction, count),
            "bases": schema.list_of(base, count),
        }
        values = schema.read(state, checks, STATE)
        given = values["scheduler"]
        if (given is None) != (self.scheduler is None):
            raise ValueError(
                "the ensemble's state and this run differ in having a scheduler: construct "
                "it as the saved run did"
            )
        own = {} if self.scheduler is None else self.scheduler.state_dict()
        # accelerate's wrapper has its length in its state only
        total = own.get("total_steps", getattr(self.scheduler, "total_steps", None))
        is_over = total is not None and (given or {}).get("last_epoch") == total
        # After its last step a linear OneCycleLR is below 0.
        least = -HIGHEST_RATE if is_over else LOWEST_RATE
        kinds = {knob.name: _kind_of_value(knob, least) for knob in self.knobs}
        lists = {k.name: schema.list_of(kinds[k.name], len(k.cells)) for k in self.knobs}
        highest = {name: schema.optional(kind) for name, kind in kinds.items()}
        tables = {"scheduled": schema.dict_of(lists), "highest": schema.dict_of(highest)}
        values |= schema.read(state, tables, STATE)
        values["scheduler"] = None if given is None else self._checked(given, own, total)
        return values

    def _checked(
        self, given: Mapping[str, Any], own: Mapping[str, Any], total: Any
    ) -> dict[str, Any]:
        """A scheduler's state, if it has the keys and the length of this run's ``own``. What else
        is in it is the scheduler's business."""
        named = given.get("total_steps")
        if isinstance(named, int if total is None else (int, float)) and named != total:
            raise ValueError(
                f"the saved run has total_steps {reprlib.repr(named)}, this one {total!r}: build "
                "the scheduler as the saved run did"
            )
        kinds = dict.fromkeys(own, schema.ANYTHING)
        if type(own.get("last_epoch")) is int:
            last = schema.LARGEST_COUNT if total is None else total
            kinds["last_epoch"] = schema.number(-1, last, whole=True)
        if type(own.get("total_steps")) is int:
            kinds["total_steps"] = schema.COUNT
        given = _with_whole_keys(given, own)
        given = {**given, **schema.read(given, kinds, "the scheduler's state")}
        found: dict[str, Any] = _as_before(given, own)
        return found

    @contextmanager
    def taken_over(self, state: Mapping[str, Any]) -> Iterator[None]:
        """Loads a state, unless what is done inside raises. Raises as `check_state`, also where the
        scheduler itself refuses; nothing is changed then."""
        values = self.check_state(state)
        with schema.loaded(self.scheduler, values["scheduler"]):
            yield
        rows = zip(self.knobs, values["corrections"], values["bases"], strict=True)
        for knob, correction, base in rows:
            high = values["highest"][knob.name]
            knob.highest = -math.inf if high is None else float(high)
            knob.correction, knob.off_schedule = correction, base
            scheduled = list(map(float, values["scheduled"][knob.name]))
            knob.follow(_as_before(scheduled, knob.read()))


def _kind_of_value(knob: BoundKnob, least: float) -> schema.Check:
    """A beta stays below 1, on a linear scale values pass 0."""
    if knob.scale.kind == "horizon":
        return schema.number(0, 1 - 2**-53)
    return schema.number(least if knob.scale.kind == "log" else -HIGHEST_RATE, HIGHEST_RATE)


def _with_whole_keys(given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no keys but strings; MultiStepLR's milestones are keys, and whole numbers."""
    found = dict(given)
    for key, value in own.items():
        saved = given.get(key)
        if not (isinstance(value, dict) and isinstance(saved, Mapping)):
            continue
        if all(isinstance(name, int) for name in value) and all(map(_is_whole, saved)):
            found[key] = type(value)({int(name): item for name, item in saved.items()})
    return found


def _as_before(value: Any, own: Any) -> Any:
    """What `plain` has made a number is a tensor again where ``own`` is: its arithmetic rounds
    otherwise than that of Python's numbers."""
    if isinstance(own, torch.Tensor) and own.is_floating_point():
        return torch.as_tensor(value).to(own).reshape(own.shape)
    if isinstance(own, (list, tuple)) and isinstance(value, list) and len(own) == len(value):
        return [_as_before(*pair) for pair in zip(value, own, strict=True)]
    if isinstance(own, dict) and isinstance(value, Mapping):
        return {key: _as_before(item, own.get(key)) for key, item in value.items()}
    return value


def _is_whole(key: Any) -> bool:
    return isinstance(key, int) or (isinstance(key, str) and key.isdecimal())


def plain(value: Any) -> Any:
    """Tensors as numbers, so that a state is plain data and holds no device."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
