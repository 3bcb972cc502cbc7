"""The one base class of controllers: documented hooks with defaults that do nothing, freezing, and state."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .evidence import Evidence, Run
from .plan import Decision, Learned, Moment, Plan, Question
from .schema import FLAG, Kind, Or, Plain, read
from .validate import finite

__all__ = ["Controller", "Learning", "RuledController", "learning_of"]

Learning = Learned | Generator[Question, Any, Learned]
"""What `Controller.learn` returns; a generator asks its questions by ``answer = yield question``."""


class Controller:
    """Plans cycles and learns from them. It runs on every rank on bitwise equal inputs, so it is a function of these and of its own state
    alone: no clock, no random numbers, no tensors, no process groups.

    A controller overrides `learn`, or `decide` if `freeze_after` is to work; all else has a default.

    Args:
        freeze_after: from there on nothing moves: a part of the run, a float in (0, 1], or a number of steps, an int >= 1. A decision
            at exactly this step still moves. None: never. What was learned stays in force, and decisions go on to report slopes where
            evidence comes ("probe, report, freeze").
    """

    name = ""
    """In records and messages; a state is loaded by a controller of the same name only. To be given by each class."""
    measurements: Mapping[str, Any] = {}
    """What `Plan.measure` may name: `hdet.measure.Measurement` objects, made by whoever constructs the controller."""
    measures: Sequence[str] = ()
    """Names that its plans measure by default, while it is not idle."""
    needs_replicas = True
    """Does it learn from differences between replicas? If not, one replica is enough."""
    plans_lengths = False
    """Does it plan the lengths of its cycles itself? If not it decides every T steps, and a run of fewer than two cycles is warned of."""
    regresses = False
    """Does it tell knobs apart by regression over replicas? Then there can be at most N - 1."""
    judges_held_out = False
    """Does it learn from held-out, unregularised losses alone? Then it may move knobs that are not `valid_on_train_loss`."""
    leaves_schedule = False
    """Does it replace the schedule by values of its own, from its first decision on? Then it can follow no other controller."""
    search: Any = None
    """An `AutoLR` that it is, or that it contains: it searches in the first steps, before the first cycle ends."""
    knob_per_group = False
    """Does `OneCycleAutoLR` give it a knob for each parameter group, as published? Else one for all."""
    state_keys: Mapping[str, Kind] | Sequence[str] = ()
    """Attributes that are the state, and their kinds (hdet/core/schema.py), against which a state is checked before it is loaded; what
    older states lack is an `Or`. Names alone: numbers, booleans, and lists of them. Hyperparameters are not state."""
    freeze_after: float | None = None
    frozen = False

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        for key in ("measures", "state_keys"):
            if isinstance(names := getattr(cls, key), str):  # its letters would be taken for names
                raise TypeError(f"{key} of {cls.__name__} is {names!r}, but it is a tuple of names: write {key} = ({names!r},)")

    def __init__(self, freeze_after: float | None = None) -> None:
        part = isinstance(freeze_after, float)
        if freeze_after is not None and not (finite(freeze_after) and (0 < freeze_after <= 1 if part else freeze_after >= 1)):
            raise ValueError(
                f"freeze_after must be a part of the run (a float in (0, 1]), a number of steps (an int >= 1) or None, got {freeze_after!r}"
            )
        self.freeze_after = freeze_after

    # -- hooks, in the order in which they are called ----------------------------------------------------------------------

    def start(self, run: Run) -> None:
        """Once, before the first step. Refuse (ValueError) a run in which this controller could not work, here: a ``freeze_after`` that is a part of
        a run whose length is not known."""
        self._limit(run.total_steps)

    def plan(self, now: Moment) -> Plan:
        """The cycle that begins. By default as published, with all of `measures`; if `idle` without spread and measurements."""
        return Plan(spread=False) if self.idle else Plan(measure=dict.fromkeys(self.measures))

    def learn(self, evidence: Evidence) -> Learning:
        """From a cycle that has ended; not called for one that was taken back, nor for those of the warm-up."""
        limit = self._limit(evidence.total_steps)
        learned = self.decide(evidence) if evidence.step <= limit else self.hold(evidence)
        # As soon as the next cycle would end too late, of those whose length is known.
        next_end = evidence.step if self.plans_lengths else min(evidence.step + evidence.sync_interval, evidence.total_steps or math.inf)
        frozen = next_end > limit or evidence.step >= limit
        if isinstance(learned, Generator):
            return self._ask(learned, frozen)
        self.frozen = frozen
        return Learned(learned) if isinstance(learned, list) else learned

    def _ask(self, learning: Generator[Question, Any, Learned], frozen: bool) -> Generator[Question, Any, Learned]:
        learned: Any = yield from learning
        self.frozen = frozen
        return Learned(learned) if isinstance(learned, list) else learned

    def decide(self, evidence: Evidence) -> list[Decision] | Learning:
        """One Decision for each knob, or what `learn` returns; a function of the evidence and of the state alone."""
        raise NotImplementedError(f"{type(self).__name__} has no decide(evidence)")

    def hold(self, evidence: Evidence) -> list[Decision] | Learning:
        """Instead of `decide` after ``freeze_after``: reports what that measures, and moves nothing. To be overridden where `decide` asks."""
        decided = self.decide(evidence)
        return [replace(decision, factor=1.0, value=None) for decision in decided] if isinstance(decided, list) else self._nothing(evidence)

    @staticmethod
    def _nothing(evidence: Evidence) -> Learned:
        """No knob moves."""
        return Learned([Decision() for _ in evidence.knobs])

    def observe(self, evidence: Evidence) -> None:
        """A cycle in which another controller decides, before this one takes over: whatever must not be missed."""

    def restart(self, now: Moment) -> None:
        """The weights are other ones than this controller knows: a checkpoint was loaded, or a cycle taken back."""

    # -- what is asked ------------------------------------------------------------------------------------------------------

    def report(self) -> str:
        """In a sentence: before the run what it is going to do, later what it has found. Empty if it has nothing to say. Trainers log it."""
        return ""

    @property
    def idle(self) -> bool:
        """Can no further decision move anything? Then nothing is spread or measured, and replicas train alike."""
        return self.frozen

    @property
    def finished(self) -> bool:
        """May the controller that follows in a `SequentialController` take over?"""
        return self.idle

    # -- state --------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain data. Raises TypeError if an attribute of `state_keys` holds something else."""
        state: dict[str, Any] = {"frozen": self.frozen}
        for key in self.state_keys:
            value = getattr(self, key)
            try:
                state[key] = _plain(value)
            except (TypeError, ValueError) as error:
                name, kinds = f"{type(self).__name__}.{key}", "numbers, booleans and lists of them"
                raise TypeError(f"{name} is {value!r}, but state_keys may only name {kinds}") from error
        return state

    def check_state(self, state: Any, knobs: int | None = None) -> dict[str, Any]:
        """The values of `state_keys` in it; changes nothing, and leaves out further keys. ``knobs``: how many, where that is known. Raises
        ValueError if a key is missing that is no `Or`, or its value of another kind."""
        kinds = self.state_keys if isinstance(self.state_keys, Mapping) else dict.fromkeys(self.state_keys, Plain())
        return read(state, {"frozen": Or(FLAG, False), **kinds}, f"{type(self).__name__}'s", knobs)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises as `check_state`; nothing is changed then."""
        for key, value in self.check_state(state).items():
            setattr(self, key, _plain(value))

    def _limit(self, total_steps: int | None) -> float:
        """The last step at which a decision may move anything."""
        if isinstance(self.freeze_after, float):
            if total_steps is None:
                raise ValueError(
                    f"freeze_after={self.freeze_after!r} is a part of the run, whose length is not known: pass total_steps, a scheduler that "
                    "has it, or a number of steps"
                )
            return self.freeze_after * total_steps
        return math.inf if self.freeze_after is None else self.freeze_after


def learning_of(controller: Controller, evidence: Evidence) -> Generator[Question, Any, Learned]:
    """What it learns, whether it asks or not: ``learned = yield from learning_of(controller, evidence)``."""
    learned = controller.learn(evidence)
    if isinstance(learned, Learned):
        return learned
    if not isinstance(learned, Generator):
        raise TypeError(
            f"controller {controller.name!r} has learned {learned!r}: decide must return a list with one Decision for each knob, or ask; "
            "learn a Learned"
        )
    return (yield from learned)


def rule_or_own(rule: Any, own: type[Any], freeze_after: float | None) -> Controller:
    """The ``rule`` that a user has given, or one of our ``own``. Raises TypeError for what is no rule, ValueError for settings beside one."""
    if rule is None:
        return own(freeze_after=freeze_after)
    if not isinstance(rule, Controller):
        raise TypeError(f"rule must be a {own.__name__}, got {type(rule).__name__}")
    if freeze_after is not None:
        raise ValueError(f"freeze_after is {freeze_after!r}, but a rule is given: pass it to the rule, {own.__name__}(freeze_after=...)")
    return rule


class RuledController(Controller):
    """A controller whose decisions and state are those of a ``rule``, another controller, to which it brings the ``measurements``, by name."""

    def __init__(self, rule: Controller, measurements: Mapping[str, Any]) -> None:
        self.rule, self.measurements = rule, dict(measurements)
        self.name, self.leaves_schedule = rule.name, rule.leaves_schedule
        self.needs_replicas, self.regresses, self.plans_lengths = rule.needs_replicas, rule.regresses, rule.plans_lengths

    def report(self) -> str:
        return self.rule.report()

    @property
    def idle(self) -> bool:
        return self.rule.idle

    @property
    def finished(self) -> bool:
        return self.rule.finished

    def start(self, run: Run) -> None:
        self.rule.start(run)

    def plan(self, now: Moment) -> Plan:
        return self.rule.plan(now)

    def learn(self, evidence: Evidence) -> Learning:
        return self.rule.learn(evidence)

    def observe(self, evidence: Evidence) -> None:
        self.rule.observe(evidence)

    def restart(self, now: Moment) -> None:
        self.rule.restart(now)

    def check_state(self, state: Any, knobs: int | None = None) -> Any:
        return self.rule.check_state(state, knobs)

    def state_dict(self) -> dict[str, Any]:
        return self.rule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rule.load_state_dict(state)


def _plain(value: Any) -> Any:
    """A copy: lists of numbers and booleans, however deep."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, int) else float(value)
