"""What all controllers have in common: when they come to rest, and how their state travels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..schema import Flag, Kind, Or, Plain, read
from .protocol import Controller, Decision, Evidence

__all__ = [
    "BaseController",
    "RuledController",
    "check_run",
    "check_state",
    "cycle_steps",
    "is_idle",
    "needs_replicas",
    "opening",
    "regresses",
    "see",
    "spreads",
]


class BaseController:
    """A controller is ``name``, `decide` and ``state_keys``; the rest is here.

    Args:
        freeze_after: from there on nothing moves: a part of the run, a float in (0, 1], or a number of steps, an int >= 1. A decision
            at exactly this step still moves. None: never. What was learned stays in force, and decisions go on to report slopes where
            evidence comes ("probe, report, freeze").
    """

    name = ""
    needs_probe = False
    needs_replicas = True
    """Does it learn from differences between replicas? If not, one replica is enough."""
    spreads = True
    """Do replicas train under different values for it? If not, the spread rests."""
    opening = 1.0
    """The correction with which a run begins."""
    regresses = False
    """Does it tell knobs apart by regression over replicas? Then there can be at most N - 1. (Every one with a probe does.)"""
    state_keys: Mapping[str, Kind] | Sequence[str] = ()
    """Attributes that are the state, and their kinds (hdet/core/schema.py), which a state is held to before it is loaded. Names alone: numbers,
    booleans, and lists of them. Hyperparameters are not state."""

    def __init__(self, freeze_after: float | None = None) -> None:
        whole = isinstance(freeze_after, int) and not isinstance(freeze_after, bool) and freeze_after >= 1
        part = isinstance(freeze_after, float) and 0 < freeze_after <= 1
        if freeze_after is not None and not (whole or part):
            raise ValueError(
                f"freeze_after must be a part of the run (a float in (0, 1]), a number of steps (an int >= 1) or None, got {freeze_after!r}"
            )
        self.freeze_after = freeze_after
        self.frozen = False

    @property
    def idle(self) -> bool:
        """Can no decision to come move anything? Then the spread rests, nothing is measured, and replicas train alike.

        `update` is still called, with probes, line and inner None.
        """
        return self.frozen

    def check_run(self, total_steps: int | None, floor: Sequence[float]) -> None:
        """Refuse a run, before it begins, in which this controller could not work. ``floor``: lowest value of each knob's schedule.

        Raises:
            ValueError: ``freeze_after`` is a part of a run whose length is not known.
        """
        if isinstance(self.freeze_after, float) and total_steps is None:
            raise ValueError(
                f"freeze_after={self.freeze_after!r} is a part of the run, whose length is not known: pass total_steps, a scheduler that "
                "has it, or a number of steps"
            )

    def update(self, evidence: Evidence) -> list[Decision]:
        """One Decision per knob."""
        limit = self._limit(evidence.total_steps)
        decisions = self.decide(evidence) if evidence.step <= limit else self.hold(evidence)
        # Rest as soon as the next cycle would end too late.
        self.frozen = min(evidence.step + evidence.sync_interval, evidence.total_steps or math.inf) > limit or evidence.step >= limit
        return decisions

    def decide(self, evidence: Evidence) -> list[Decision]:
        """One Decision per knob; a function of the evidence and of the state alone. The part that a controller has to have."""
        raise NotImplementedError(f"{type(self).__name__} has no decide(evidence)")

    def see(self, evidence: Evidence) -> None:
        """A cycle in which another controller decides, before this one takes over: whatever must not be missed."""

    def hold(self, evidence: Evidence) -> list[Decision]:
        """In the place of `decide` after ``freeze_after``: reports what that measures, and moves nothing."""
        return [replace(decision, factor=1.0, base=None) for decision in self.decide(evidence)]

    def _limit(self, total_steps: int | None) -> float:
        """The last step at which a decision may move anything."""
        if self.freeze_after is None:
            return math.inf
        if isinstance(self.freeze_after, int):
            return self.freeze_after
        self.check_run(total_steps, ())
        return self.freeze_after * (total_steps or 0)

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"frozen": self.frozen, **{key: _plain(getattr(self, key)) for key in self.state_keys}}

    def check_state(self, state: Any, knobs: int | None = None) -> dict[str, Any]:
        """The values of `state_keys` in it; changes nothing. Further keys are those of older versions. ``knobs``: how many, where that is known.

        Raises:
            ValueError: a key is missing, or its value of another kind.
        """
        kinds = self.state_keys if isinstance(self.state_keys, Mapping) else dict.fromkeys(self.state_keys, Plain())
        return read(state, {"frozen": Or(Flag(), False), **kinds}, f"{type(self).__name__}'s", knobs)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises as `check_state`; nothing is changed then."""
        for key, value in self.check_state(state).items():
            setattr(self, key, _plain(value))


class RuledController(BaseController):
    """A controller that measures on tensors and leaves the decisions, and the state, to a pure rule.

    Args:
        rule: anything with a controller's protocol.
    """

    def __init__(self, rule: Any) -> None:
        self.rule = rule

    @property
    def idle(self) -> bool:
        """Nothing is left to decide: nothing is measured any more, and the spread rests."""
        return is_idle(self.rule)

    @property
    def freeze_after(self) -> float | None:  # type: ignore[override]
        return getattr(self.rule, "freeze_after", None)

    @property
    def frozen(self) -> bool:  # type: ignore[override]
        return bool(getattr(self.rule, "frozen", False))

    @property
    def opening(self) -> float:  # type: ignore[override]
        return opening(self.rule)

    def check_run(self, total_steps: int | None, floor: Sequence[float]) -> None:
        check_run(self.rule, total_steps, floor)

    def see(self, evidence: Evidence) -> None:
        see(self.rule, evidence)

    def update(self, evidence: Evidence) -> list[Decision]:
        return self.rule.update(evidence)

    def check_state(self, state: Any, knobs: int | None = None) -> Any:
        return check_state(self.rule, state, knobs)

    def state_dict(self) -> dict[str, Any]:
        return self.rule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rule.load_state_dict(state)


def _plain(value: Any) -> Any:
    """A copy: lists of floats and booleans, however deep."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool) else float(value)


# -- a controller that has the protocol alone, and none of what is optional ---------------------------------------------------


def is_idle(controller: Controller | None) -> bool:
    """`BaseController.idle`; False without it: such a controller always explores."""
    return bool(getattr(controller, "idle", False))


def needs_replicas(controller: Controller) -> bool:
    """`BaseController.needs_replicas`; True without it."""
    return bool(getattr(controller, "needs_replicas", True))


def spreads(controller: Controller | None) -> bool:
    """`BaseController.spreads`; True without it, and without a controller."""
    return bool(getattr(controller, "spreads", True))


def opening(controller: Controller | None) -> float:
    """`BaseController.opening`; 1 without it, and without a controller."""
    return float(getattr(controller, "opening", 1.0))


def cycle_steps(controller: Controller | None, began: int, total_steps: int | None, sync_interval: int) -> int:
    """`LineRule.cycle_steps`; T without it."""
    asked = getattr(controller, "cycle_steps", None)
    return sync_interval if asked is None else int(asked(began, total_steps or 0, sync_interval))


def regresses(controller: Controller) -> bool:
    """`BaseController.regresses`; True with a probe."""
    return controller.needs_probe or bool(getattr(controller, "regresses", False))


def see(controller: Controller, evidence: Evidence) -> None:
    """`BaseController.see`; without it there is nothing to miss."""
    getattr(controller, "see", lambda _: None)(evidence)


def check_run(controller: Controller, total_steps: int | None, floor: Sequence[float]) -> None:
    """`BaseController.check_run`; without it every run will do."""
    getattr(controller, "check_run", lambda *_: None)(total_steps, floor)


def check_state(controller: Controller, state: Any, knobs: int | None) -> Any:
    """`BaseController.check_state`; without it every state will do."""
    return getattr(controller, "check_state", lambda *_: None)(state, knobs)
