"""The base class of controllers: `decide`, hooks with defaults, freezing, and state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .evidence import Evidence, Run
from .plan import Decision, Plan
from .schema import FLAG, Kind, Or, Plain, read
from .validate import finite

__all__ = ["Controller", "check_name", "checked_decisions", "checked_plan"]


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
    """In records and messages; a state is loaded by a controller of the same name only."""
    measurements: Mapping[str, Any] = {}
    """By name, the `hdet.measure.Measurement` objects that it learns from."""
    needs_replicas = True
    """Does it learn from differences between replicas? If not, replicas train alike."""
    regresses = False
    """Does it tell knobs apart by regression over replicas? Then there can be at most N - 1."""
    judges_held_out = False
    """Does it learn from held-out, unregularised losses alone? Then it may move knobs that are not
    `valid_on_train_loss`."""
    leaves_schedule = False
    """Does it replace the schedule by values of its own? Then it can follow no other controller."""
    search: Any = None
    """An `AutoLR` that it is, or contains: it searches in the first steps of the run."""
    knob_per_group = False
    """Does `OneCycleAutoLR` give it a knob for each parameter group, as published?"""
    state_keys: Mapping[str, Kind] | Sequence[str] = ()
    """Attributes that are the state: numbers, booleans, and lists of them. With their kinds
    (hdet/core/schema.py), against which a state is checked before it is loaded."""
    freeze_after: float | None = None
    frozen = False

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if isinstance(keys := cls.state_keys, str):  # its letters would be taken for names
            raise TypeError(
                f"state_keys of {cls.__name__} is {keys!r}, but it is a tuple of names: "
                f"write state_keys = ({keys!r},)"
            )

    def __init__(self, freeze_after: float | None = None) -> None:
        if freeze_after is not None and not _is_limit(freeze_after):
            raise ValueError(
                "freeze_after must be a part of the run (a float in (0, 1]), a number of steps "
                f"(an int >= 1) or None, got {freeze_after!r}"
            )
        self.freeze_after = freeze_after

    # -- hooks, in the order in which they are called ----------------------------------------------

    def start(self, run: Run) -> None:
        """Once, before the first step. Raises ValueError for a run in which it cannot work."""
        self._last_step_that_moves(run.total_steps)

    def plan(self) -> Plan:
        """The cycle that begins; by default without spread and measurements once it is `idle`."""
        if self.idle:
            return Plan(spread=False)
        return Plan(spread=self.needs_replicas, measures=tuple(self.measurements))

    def learn(self, evidence: Evidence) -> list[Decision]:
        """`decide`, or `hold` after ``freeze_after``. Not called for a cycle of the warm-up, nor
        for one that was taken back."""
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
        """A cycle in which another controller decides, before this one takes over."""

    def restart(self) -> None:
        """Other weights are in place: a checkpoint was loaded, or a cycle taken back."""

    # -- what is asked -----------------------------------------------------------------------------

    def report(self) -> str:
        """What it is going to do, later what it has found, in a sentence for the log."""
        return ""

    @property
    def idle(self) -> bool:
        """Can no further decision move anything? Then nothing is spread or measured."""
        return self.frozen

    @property
    def finished(self) -> bool:
        """May the controller that follows in a `SequentialController` take over?"""
        return self.idle

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain data. Raises TypeError if an attribute of `state_keys` holds something else."""
        state: dict[str, Any] = {"frozen": self.frozen}
        for key in self.state_keys:
            value = getattr(self, key)
            try:
                state[key] = _plain(value)
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"{type(self).__name__}.{key} is {value!r}, but state_keys may only name "
                    "numbers, booleans and lists of them"
                ) from error
        return state

    def check_state(self, state: Any, knobs: int | None = None) -> dict[str, Any]:
        """The values of `state_keys` in it; changes nothing. ``knobs``: how many, where that is
        known. Raises ValueError for a key that is missing, or a value of another kind."""
        keys = self.state_keys
        kinds = keys if isinstance(keys, Mapping) else dict.fromkeys(keys, Plain())
        return read(state, {"frozen": Or(FLAG, False), **kinds}, f"{type(self).__name__}'s", knobs)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises as `check_state`; nothing is changed then."""
        for key, value in self.check_state(state).items():
            setattr(self, key, _plain(value))

    def _last_step_that_moves(self, total_steps: int | None) -> float:
        if self.freeze_after is None:
            return math.inf
        if not isinstance(self.freeze_after, float):
            return self.freeze_after
        if total_steps is None:
            raise ValueError(
                f"freeze_after={self.freeze_after!r} is a part of the run, whose length is not "
                "known: pass total_steps, a scheduler that has it, or a number of steps"
            )
        return self.freeze_after * total_steps


def check_name(controller: Controller) -> None:
    """Raises ValueError for a controller without a name."""
    if not isinstance(controller.name, str) or not controller.name:
        kind = type(controller).__name__
        raise ValueError(
            f"the name of {kind} is {controller.name!r}, by which states know their controller: "
            f'write name = "..." in class {kind}'
        )


def checked_plan(controller: Controller) -> Plan:
    """What it plans. Raises TypeError or ValueError for what cannot be carried out."""
    plan = controller.plan()
    if not isinstance(plan, Plan):
        raise TypeError(
            f"controller {controller.name!r} has planned {plan!r}: plan must return a hdet.Plan"
        )
    if isinstance(plan.measures, str):  # its letters would be taken for names
        raise TypeError(
            f"controller {controller.name!r} plans measures={plan.measures!r}, but it is a tuple "
            f"of names: write ({plan.measures!r},)"
        )
    if missing := sorted(set(plan.measures) - controller.measurements.keys()):
        raise ValueError(
            f"controller {controller.name!r} measures {missing[0]!r}, and has no measurement of "
            "that name: put one into its `measurements`"
        )
    return plan


def checked_decisions(controller: Controller, evidence: Evidence) -> list[Decision]:
    """What it decides. Raises TypeError or ValueError if that is not one Decision for each knob."""
    decisions = controller.learn(evidence)
    if not isinstance(decisions, list) or len(decisions) != len(evidence.knobs):
        raise ValueError(
            f"controller {controller.name!r} has decided {decisions!r}: decide must return a list "
            f"of {len(evidence.knobs)}, a hdet.Decision for each knob"
        )
    if wrong := [one for one in decisions if not isinstance(one, Decision)]:
        raise TypeError(
            f"controller {controller.name!r} has decided {wrong[0]!r}: each decision is a "
            "hdet.Decision, such as Decision(factor=0.5)"
        )
    return decisions


def _is_limit(value: Any) -> bool:
    """A part of the run, or a number of steps?"""
    return 0 < value <= 1 if isinstance(value, float) else finite(value) and value >= 1


def _plain(value: Any) -> Any:
    """A copy: lists of numbers and booleans, however deep."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, int) else float(value)
