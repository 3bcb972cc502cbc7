"""The base class of controllers: `decide`, hooks with defaults, freezing, and state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .evidence import Evidence, KnobSpec, Run
from .plan import Decision, Plan
from .schema import FLAG, MAPPING, Check, plain, read
from .validate import finite

__all__ = ["Controller"]


class Controller:
    """Decides at the end of each cycle by how much knobs move.

    It runs on every rank on bitwise equal inputs, so it is a function of these and of its own
    state: no clock, no random numbers, no tensors, no communication. A controller overrides
    `decide`; everything else has a default.

    Args:
        freeze_after: from there on nothing moves: a part of the run, a float in (0, 1], or a number
            of steps, an int >= 1. A decision at exactly this step still moves. None: never.

    Raises:
        ValueError: ``freeze_after`` is neither.

    Example::

        class Halver(hdet.Controller):
            name, needs_replicas = "halver", False

            def decide(self, evidence):
                return [hdet.Decision(factor=0.5) for _ in evidence.knobs]
    """

    name = ""
    """In records and messages; a state is loaded by a controller of the same name only. Default:
    the class's."""
    measurements: Mapping[str, Any] = {}
    """By name, the `hdet.controllers.Measurement` objects that it learns from."""
    parts: Mapping[str, Controller] = {}
    """By name, controllers that it is made of: they start, restart, observe and are saved with
    it."""
    needs_replicas = True
    """Does it learn from differences between replicas? If not, replicas train alike."""
    regresses = False
    """Does it tell knobs apart by regression over replicas? Then there can be at most N - 1."""
    state_keys: Mapping[str, Check] | Sequence[str] = ()
    """Attributes that are the state: numbers, booleans, and lists of them. A mapping also says how
    each is checked before it is loaded (hdet/core/schema.py)."""
    freeze_after: float | None = None
    frozen = False
    _knobs: int | None = None  # of the run, once it has started

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if cls.name in ("", *(base.__name__ for base in cls.__mro__)):
            cls.name = cls.__name__

    def __init__(self, freeze_after: float | None = None) -> None:
        at, is_part = freeze_after, isinstance(freeze_after, float)
        if at is not None and not (0 < at <= 1 if is_part else finite(at) and at >= 1):
            raise ValueError(
                "freeze_after must be a part of the run (a float in (0, 1]), a number of steps "
                f"(an int >= 1) or None, got {freeze_after!r}"
            )
        self.freeze_after = freeze_after

    # -- hooks, in the order in which they are called ----------------------------------------------

    def start(self, run: Run) -> None:
        """Before the first step; for another run, if that one was refused. Raises ValueError for a
        run in which it cannot work."""
        self._last_step_that_moves(run.total_steps)
        self._knobs = len(run.knobs)
        for part in self.parts.values():
            part.start(run)

    def may_move(self, knob: KnobSpec) -> bool:
        """Asked before the run, for each knob; the run is refused for one that it may not. By
        default those on which training losses may decide. One that learns from held-out,
        unregularised losses alone says True."""
        return knob.valid_on_train_loss

    def plan(self) -> Plan:
        """The cycle that begins; by default without spread and measurements once it is `idle`."""
        if self.idle:
            return Plan(spread=False)
        return Plan(spread=self.needs_replicas, measures=tuple(self.measurements))

    def learn(self, evidence: Evidence) -> list[Decision]:
        """`decide`, or `hold` after ``freeze_after``. Not called for a cycle of the warm-up, nor
        for one that was rolled back."""
        limit = self._last_step_that_moves(evidence.total_steps)
        decisions = self.decide(evidence) if evidence.step <= limit else self.hold(evidence)
        # Frozen as soon as the next cycle would end too late.
        next_end = min(evidence.step + evidence.sync_interval, evidence.total_steps or math.inf)
        self.frozen = next_end > limit or evidence.step >= limit
        return decisions

    def decide(self, evidence: Evidence) -> list[Decision]:
        """One Decision for each knob, a function of the evidence and of the state alone."""
        raise NotImplementedError(f"{type(self).__name__} has no decide(evidence)")

    def hold(self, evidence: Evidence) -> list[Decision]:
        """In the place of `decide` after ``freeze_after``: reports slopes, and moves nothing."""
        return [replace(one, factor=1.0, value=None) for one in self.decide(evidence)]

    def observe(self, evidence: Evidence) -> None:
        """A cycle in which a search moves the rate, before this controller takes over."""
        for part in self.parts.values():
            part.observe(evidence)

    def restart(self) -> None:
        """Other weights are in place: a checkpoint was loaded, a cycle rolled back, or a search has
        begun again with the first ones."""
        for part in self.parts.values():
            part.restart()

    # -- what is asked -----------------------------------------------------------------------------

    def report(self) -> str:
        """What it is going to do, later what it has found, in a sentence for the log."""
        return ""

    @property
    def idle(self) -> bool:
        """Can no further decision move anything? Then nothing is spread or measured."""
        return self.frozen

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain data. Raises ValueError if an attribute of `state_keys` holds something else."""
        state: dict[str, Any] = {"frozen": self.frozen}
        for key in self.state_keys:
            try:
                state[key] = plain(getattr(self, key), key)
            except ValueError as error:
                raise ValueError(
                    f"{type(self).__name__}.{key} is {getattr(self, key)!r}, but state_keys may "
                    "only name numbers, booleans and lists of them"
                ) from error
        return state | {name: part.state_dict() for name, part in self.parts.items()}

    def check_state(self, state: Any) -> dict[str, Any]:
        """The checked values of a `state_dict`; changes nothing. Raises ValueError for a key that
        is missing, or a value of another kind."""
        keys = self.state_keys
        checks = dict(keys) if isinstance(keys, Mapping) else dict.fromkeys(keys, plain)
        checks = {"frozen": FLAG, **checks, **dict.fromkeys(self.parts, MAPPING)}
        where = f"the {type(self).__name__}'s state"
        # A controller that writes its state itself may leave it out.
        values = read({"frozen": False, **MAPPING(state, where)}, checks, where)
        for name, part in self.parts.items():
            part.check_state(values[name])
        return values

    def check_columns(self, values: Mapping[str, Any], *names: str) -> dict[str, Any]:
        """The values, in which these lists have one entry for each knob, or none before there was
        anything to keep. Raises ValueError if not."""
        lengths = {name: len(values[name]) for name in names}
        length, *others = {*lengths.values()}
        if others or (self._knobs is not None and length not in (0, self._knobs)):
            raise ValueError(
                f"the {type(self).__name__}'s state has lists of other lengths than the run has "
                f"knobs ({lengths}): it is damaged, or of another run"
            )
        return dict(values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises as `check_state`; nothing is changed then."""
        values = self.check_state(state)
        for name, part in self.parts.items():
            part.load_state_dict(values.pop(name))
        for key, value in values.items():
            setattr(self, key, value)

    def _last_step_that_moves(self, total_steps: int | None) -> float:
        if not isinstance(self.freeze_after, float):
            return math.inf if self.freeze_after is None else self.freeze_after
        if total_steps is None:
            raise ValueError(
                f"freeze_after={self.freeze_after!r} is a part of the run, whose length is not "
                "known: pass total_steps, a scheduler that has it, or a number of steps"
            )
        return self.freeze_after * total_steps
