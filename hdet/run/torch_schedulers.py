"""Whose value stands in a parameter group: torch's schedulers are asked, on copies, what they make of what stood there before."""

from __future__ import annotations

import copy
import gc
import itertools
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR

from ..knobs import Bound, GroupKnob
from ..knobs.cells import close, content, group_cell, put
from ..tensors.eval_mode import eval_mode

__all__ = ["REMEDY", "StandIn", "TorchSchedulers", "position", "twin_on"]

REMEDY = "step it inside `with ensemble.rescheduling():`, where the groups hold the schedule's own values, and what is written is taken for the next of them"
Write = tuple[GroupKnob, int, Any]
"""(knob, number of its cell, what stands there)"""
_Place = tuple[GroupKnob, int]


class TorchSchedulers:
    """The torch schedulers of one optimizer that the user steps, built at any time: all but ``own``, the Ensemble's.

    Each is copied onto copies of the groups, with the values that the Ensemble had left there. If the copy's step ends at the value in the
    group now, the scheduler wrote it, and the same step from the schedule's own value gives the schedule's next one. This holds for
    schedulers that compute from the group's value and for those that compute from scratch.
    """

    def __init__(self, optimizer: Any, own: Any = None) -> None:
        self._optimizer, self._own = optimizer, own  # None: there are none
        self._not_asked = {id(one) for one in (own, *_parts(getattr(own, "__dict__", {}).values()))}  # lives as long as this
        self._noted: WeakKeyDictionary[LRScheduler, tuple[int, ...]] = WeakKeyDictionary()
        self._known: WeakKeyDictionary[LRScheduler, None] = WeakKeyDictionary()
        self._misses, self._patience = 0, 1
        self.looked = False
        """Have they been looked for? Not before there is a correction."""

    def look(self) -> None:
        """Look for them. All values in the groups are accounted for, and the schedule's own, so a scheduler that was constructed by now has begun
        with the right ones."""
        if self._optimizer is not None:
            self.looked = True
            self._search()
            self.note()
            self._begun = ["initial_lr" in group for group in self._optimizer.param_groups]

    def note(self) -> None:
        """All values in the groups are accounted for: only schedulers that step from now on may have written later ones."""
        for scheduler in self._known:
            self._noted[scheduler] = position(scheduler)

    def forget(self) -> None:
        """Any of them may have written."""
        self._noted.clear()

    def moved(self) -> list[LRScheduler]:
        """Those that have stepped since `note`, of the ones that are known."""
        return [one for one in self._known if self._noted.get(one) != position(one)]

    def own_values(self, writes: Sequence[Write], knobs: Sequence[Bound]) -> list[Any]:
        """[write]: the schedule's own value, where a scheduler or nobody has written; None for anybody else's writes. Raises ValueError where it
        cannot be told which of these it is."""
        places = [(knob, i) for knob in knobs if isinstance(knob, GroupKnob) for i in range(len(knob.cells))]
        self._cells: dict[_Place, Any] = {(knob, i): knob.cells[i] for knob, i in places}
        self._left, self._scheduled = {(knob, i): knob.left[i] for knob, i in places}, {(knob, i): knob.scheduled[i] for knob, i in places}
        found: list[Any] = [None] * len(writes)
        foreign = [not knob.is_ours(i, value) for knob, i, value in writes]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about who calls what when
            self._explain(found, writes, [[one] for one in self.moved()])
            if any(other and own is None for other, own in zip(foreign, found, strict=True)) and self._look_again():
                self._explain(found, writes, [[one] for one in self.moved()])
            for one in self.moved():  # several times, as accelerate steps those that it has prepared
                self._explain(found, writes, [[one]], replays=(_several(self._steps_of(one)),))
            self._explain(found, writes, list(itertools.permutations(self.moved(), 2)))  # one after the other, by hand
            for n, (knob, i, value) in enumerate(writes):
                if found[n] is None and foreign[n]:
                    self._check_not_several(knob, i, value)
                    self._check_not_from_scratch(knob, i, value)
                elif found[n] is None:
                    found[n] = knob.scheduled[i]
        return found

    def claims(self, writes: Sequence[tuple[Bound, int, Any]]) -> bool:
        """Are these the last rates of a scheduler that has stepped, though its step could not be replayed?"""
        stepped = [getattr(one, "_last_lr", []) for one in self.moved()]
        return all(
            isinstance(knob, GroupKnob)
            and knob.key == "lr"
            and any(len(last) > knob.indices[i] and close(last[knob.indices[i]], value) for last in stepped)
            for knob, i, value in writes
        )

    def present(self) -> list[Any]:
        """The Ensemble's own scheduler, or what it holds, if its class is a framework's; without one, those that the user steps."""
        if self._own is None:
            built = self._optimizer is not None and any("initial_lr" in group for group in self._optimizer.param_groups)
            return self._alive() if built else []
        return self.own_parts()

    def own_parts(self) -> list[Any]:
        """The Ensemble's own scheduler, and what it holds, if its class is a framework's."""
        return [self._own] if isinstance(self._own, LRScheduler) else [self._own, *_parts(getattr(self._own, "__dict__", {}).values())]

    # -- who there is ----------------------------------------------------------------------------------------------------

    def _alive(self) -> list[LRScheduler]:
        """Of this optimizer. Goes through all objects of the process: 50 ms for a million."""
        # type(), because isinstance() asks proxies for the class of what they stand for.
        return [one for one in gc.get_objects() if issubclass(type(one), LRScheduler) and self._is_of_this_optimizer(one)]

    def _search(self) -> bool:
        """Returns whether there is a scheduler that was not known."""
        found = self._alive()
        inside = {id(part) for one in found for part in _parts(vars(one).values())}
        new = [one for one in found if id(one) not in inside | self._not_asked and one not in self._known]
        for one in new:
            self._known[one] = None
        return bool(new)

    def _look_again(self) -> bool:
        """One may have been built since. Ever more rarely, for a loop that writes its rates in each step."""
        self._misses += 1
        if self._misses < self._patience:
            return False
        new = self._search()
        self._misses, self._patience = 0, 1 if new else 2 * self._patience
        return new

    def _is_of_this_optimizer(self, scheduler: LRScheduler) -> bool:
        optimizer = vars(scheduler).get("optimizer")
        return optimizer is self._optimizer or getattr(optimizer, "param_groups", None) is self._optimizer.param_groups

    # -- what they say ---------------------------------------------------------------------------------------------------

    def _explain(
        self, found: list[Any], writes: Sequence[Write], chains: Sequence[Sequence[LRScheduler]], replays: Sequence[_Replay] | None = None
    ) -> None:
        """Fill in what is None and can be told. ``chains``: who may have stepped, one after the other; ``replays``: how."""
        for replay in replays or (_next, _told):
            missing = [n for n, own in enumerate(found) if own is None]
            for chain in chains if missing else ():
                now = self._after(chain, replay, self._left) or {}
                matching = [n for n in missing if now and close(now[writes[n][:2]], writes[n][2])]
                own = (self._after(chain, replay, self._scheduled) or {}) if matching else {}
                for n in matching if own else ():
                    knob, i, value = writes[n]
                    answer = own[knob, i]
                    if found[n] is not None and not close(answer, found[n]):
                        raise ValueError(
                            f"{_name(knob, i)} is {float(value):g}, and {_names(self.moved())} could all have written it, which would mean "
                            f"different things while a correction is in force: {REMEDY}"
                        )
                    self._check_begun_on_own_rates(chain[-1], knob, i, from_scratch=close(answer, value))
                    found[n] = answer

    def _after(self, chain: Sequence[LRScheduler], replay: _Replay, start: Mapping[_Place, Any]) -> dict[_Place, Any] | None:
        """What copies of these schedulers make of ``start``; None where one cannot be asked."""
        stand_in: Any = StandIn(self._optimizer)
        copies: dict[_Place, Any] = {(knob, i): group_cell(stand_in, *cell.place[1]) for (knob, i), cell in self._cells.items()}
        for place, cell in copies.items():
            cell.set(start[place])
        for scheduler in chain:
            try:
                with eval_mode(torch.nn.Module()):  # no model, but random states: a schedule may be noisy
                    replay(twin_on(scheduler, stand_in), stand_in.param_groups)
            except Exception:  # noqa: BLE001 - a user's class, which was never meant to be asked: it is refused where that matters
                return None
        return {place: cell.get() for place, cell in copies.items()}

    def _steps_of(self, scheduler: LRScheduler) -> int:
        """Since `note`; 1 where that is not known."""
        then, now = self._noted.get(scheduler, ()), position(scheduler)
        return max(1, *(b - a for a, b in zip(then, now, strict=True))) if len(then) == len(now) else 1

    def _check_not_several(self, knob: GroupKnob, i: int, value: Any) -> None:
        """Raises ValueError where a scheduler has stepped several times, and replaying its steps does not explain the value."""
        several = [one for one in self.moved() if self._steps_of(one) > 1 and not isinstance(one, ReduceLROnPlateau)]
        if several and knob.key == "lr":
            raise ValueError(
                f"{_name(knob, i)} is {float(value):g}, and {_names(several)} has stepped several times since the last step of the optimizer, which "
                f"does not lead there from what was there, so nobody knows whether the correction in force is in this value: {REMEDY}"
            )

    def _check_not_from_scratch(self, knob: GroupKnob, i: int, value: Any) -> None:
        """Raises ValueError where somebody has written over the value of a scheduler that computes from scratch: relative to which value?"""
        other = {place: 2.0 * abs(float(left)) + 1.0 for place, left in self._left.items()}
        for scheduler in self.moved():
            if isinstance(scheduler, ReduceLROnPlateau):  # it reduces what stands there
                continue
            results = [self._after([scheduler], _next, start) for start in (self._left, self._scheduled, other)]
            if any(result is None for result in results):
                if knob.key == "lr":
                    raise ValueError(
                        f"{_name(knob, i)} is {float(value):g}, {_names([scheduler])} has stepped, and what its get_lr() gives cannot be asked on "
                        f"a copy, so nobody knows whether the correction in force is in this value: {REMEDY}"
                    )
                continue
            left, scheduled, third = (result[knob, i] for result in results if result is not None)
            if close(left, third) and close(scheduled, third):
                raise ValueError(
                    f"{_name(knob, i)} is {float(value):g}, but {_names([scheduler])}, which computes from scratch and has stepped, gives "
                    f"{float(third):g}: somebody has written over it, and nobody knows whether the correction in force is in this value: {REMEDY}"
                )

    def _check_begun_on_own_rates(self, scheduler: LRScheduler, knob: GroupKnob, i: int, *, from_scratch: bool) -> None:
        """torch's constructors take what stands in the group for the rate that the schedule begins with."""
        index = knob.indices[i]
        if from_scratch and knob.key == "lr" and not self._begun[index] and "initial_lr" in self._optimizer.param_groups[index]:
            raise ValueError(
                f"{_names([scheduler])} was built while a correction of {_name(knob, i)} was in force, and may have begun with the corrected "
                "rate: build it before the Ensemble, or inside `with ensemble.rescheduling():`"
            )


# -- copies --------------------------------------------------------------------------------------------------------------

_Replay = Callable[[LRScheduler, list[dict[str, Any]]], None]


class StandIn:
    """Copies of an optimizer's parameter groups, for a scheduler to write to; whatever else it asks for is the optimizer's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.param_groups = [{key: content(value) for key, value in group.items()} for group in optimizer.param_groups]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def twin_on(scheduler: LRScheduler, stand_in: StandIn) -> LRScheduler:
    """The same state on another optimizer. Not deep: a scheduler may hold a model."""
    made: LRScheduler = object.__new__(type(scheduler))
    made.__dict__.update({name: _twin_of(value, stand_in) for name, value in vars(scheduler).items()})
    made.__dict__.update(optimizer=stand_in, _get_lr_called_within_step=True)
    return made


def _twin_of(value: Any, stand_in: StandIn) -> Any:
    if isinstance(value, LRScheduler):
        return twin_on(value, stand_in)
    if type(value) in (list, tuple):
        return type(value)(_twin_of(item, stand_in) for item in value)
    return copy.copy(value) if isinstance(value, (dict, set)) else value


def _next(twin: LRScheduler, groups: list[dict[str, Any]]) -> None:
    """What its last step() wrote: it has counted already."""
    if isinstance(twin, ChainedScheduler):
        for part in twin._schedulers:
            _next(part, groups)
    elif isinstance(twin, SequentialLR):
        number = bisect_right(twin._milestones, twin.last_epoch)
        part = twin._schedulers[number]
        begins = number > 0 and twin._milestones[number - 1] == twin.last_epoch
        (_told if begins and hasattr(part, "_get_closed_form_lr") else _next)(part, groups)
    else:
        _write(groups, twin.get_lr())


def _several(steps: int) -> _Replay:
    """What its last ``steps`` steps wrote, one after the other. Those of schedulers made of others are not replayed."""

    def replay(twin: LRScheduler, groups: list[dict[str, Any]]) -> None:
        if isinstance(twin, (ChainedScheduler, SequentialLR)):
            raise NotImplementedError
        end = twin.last_epoch
        for twin.last_epoch in range(end - steps + 1, end + 1):
            _write(groups, twin.get_lr())

    return replay


def _told(twin: LRScheduler, groups: list[dict[str, Any]]) -> None:
    """What its last step(epoch) wrote: from scratch."""
    _write(groups, twin._get_closed_form_lr())  # type: ignore[attr-defined]


def _write(groups: list[dict[str, Any]], rates: Sequence[Any]) -> None:
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = put(group["lr"], rate)


def _parts(values: Iterable[Any]) -> Iterator[LRScheduler]:
    """Schedulers inside of another one."""
    for value in values:
        if isinstance(value, LRScheduler):
            yield value
        elif type(value) in (list, tuple):
            yield from _parts(value)


def position(scheduler: Any) -> tuple[int, ...]:
    """Changes with each step."""
    own = (getattr(scheduler, "last_epoch", 0), getattr(scheduler, "_step_count", 0))
    return sum((position(part) for part in getattr(scheduler, "_schedulers", None) or ()), own)


def _name(knob: GroupKnob, i: int) -> str:
    return f"{knob.name} of parameter group {knob.indices[i]}"


def _names(schedulers: Iterable[LRScheduler]) -> str:
    return " and ".join(sorted({type(scheduler).__name__ for scheduler in schedulers}))
