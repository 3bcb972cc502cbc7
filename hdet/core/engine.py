"""One run of the method as a state machine: cycle count, multipliers, corrections. No tensors, no processes.

`hdet.Ensemble` drives it with real losses, `hdet simulate` and the tests with made-up ones.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .clock import Clock
from .controller import Controller, learning_of
from .design import orthogonal
from .evidence import Evidence
from .plan import Adopt, Decision, Ending, Learned, Moment, Plan, Question, Restore
from .scale import Scale
from .schema import COUNT, POSITIVE, Instance, Kind, ListOf, Number, Optional, Or, Row, read, unchanged_on_error
from .spread import assignment, multipliers

__all__ = ["CycleOutcome", "Engine", "KnobSpec", "ask_and_tell"]

STATE_VERSION = 2
LARGEST_CORRECTION = 1e6
"""A correction outside [1/this, this] is a runaway, not a tuning: it is held there and noted."""
LARGEST_SEED = 1 << 4096
"""of a saved run"""


@dataclass(frozen=True)
class KnobSpec:
    """Name, spread alpha and scale of one explored hyperparameter."""

    name: str
    spread: float
    scale: Scale = field(default_factory=Scale)
    rate: bool = True
    """Is it a learning rate? Those are lowered where a cycle is taken back."""


@dataclass(frozen=True)
class CycleOutcome:
    """What `Engine.close` did, one entry per knob in the lists."""

    cycle: int
    multipliers: list[list[float]]
    decisions: list[Decision]
    left_out: list[int]
    notes: list[str]
    end: Ending | None = None
    """What the controller has asked for after the cycle's own ending."""
    evidence: Evidence | None = None
    """What it was told; None where it was not."""
    answers: list[Any] = field(default_factory=list)
    """To its questions, in their order."""


class Engine:
    """Knobs, clock, controller and what was learned: one correction (or base value) per knob.

    Args:
        knobs: what is explored; names must differ.
        controller: None keeps corrections at 1 (spread and converge still run).
        seed: key of the assignments (Eq. 8).
        design: "permutation", each knob by itself (Eq. 8), or "orthogonal", two levels for all knobs together (core/design.py).
    """

    def __init__(
        self,
        knobs: Sequence[KnobSpec],
        replicas: int,
        clock: Clock,
        controller: Controller | None = None,
        seed: int = 0,
        design: str = "permutation",
    ) -> None:
        names = [knob.name for knob in knobs]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"knobs must be at least one, with different names, got {names}")
        if replicas < 1:
            raise ValueError(f"replicas must be at least 1, got {replicas!r}")
        if controller is not None:
            if not isinstance(controller.name, str) or not controller.name:
                kind = type(controller).__name__
                raise ValueError(
                    f'the name of {kind} is {controller.name!r}, by which states know their controller: write name = "..." in class {kind}'
                )
            clock.check_controller_can_act()
        self.knobs, self.replicas, self.clock, self.controller, self.seed = list(knobs), replicas, clock, controller, seed
        self.design = design
        self.cycle = 0
        self.step = 0
        self.position = 0
        self.corrections = [1.0] * len(knobs)
        self.held: list[float | None] = [None] * len(knobs)
        """By knob: a base value that a controller has put in the place of schedule and correction."""
        self.ramps: list[tuple[float, int, int]] = [(1.0, 0, 0)] * len(knobs)
        """By knob: the correction before, and the first step and the number of steps of the ramp to the one in `corrections`."""
        self.schedule_step: int | None = None
        """Steps of the schedule done, where they are not this engine's (a step that a scaler skips, or several calls for each)."""
        self._plan: Plan | None = None
        self.planned_at = Moment(0, 0, 0)
        """When the controller was asked for `plan` last."""
        self.level: float | None = None
        """Median loss of the healthy replicas in the last cycle that was not taken back."""
        self.rollbacks = 0
        """Cycles taken back since step 0."""
        self.rollbacks_in_row = 0
        self.diverged_total = 0
        """How often a replica was left out of an average since step 0."""
        self._table: list[list[float]] | None = None

    # -- plan and fan out ------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """Of the running cycle; the controller is asked once for each. Raises ValueError for a plan that cannot be carried out."""
        if self._plan is None:
            self.planned_at = self.moment
            plan = Plan() if self.controller is None else self.controller.plan(self.planned_at)
            self._check_plan(plan)
            self._plan = plan
        return self._plan

    @property
    def controller_name(self) -> str:
        """For messages; "" without one."""
        return "" if self.controller is None else self.controller.name

    @property
    def moment(self) -> Moment:
        """The beginning of the running cycle."""
        began = self.step - self.position
        return Moment(self.cycle, began, began if self.schedule_step is None else self.schedule_step, self.position)

    def _check_plan(self, plan: Plan) -> None:
        name = self.controller_name
        if not isinstance(plan, Plan):
            raise TypeError(f"controller {name!r} has planned {plan!r}: plan must return a hdet.Plan")
        for what, given, example in (("measure", plan.measure, "None"), ("snapshots", plan.snapshots, "SnapshotOf()")):
            if not isinstance(given, Mapping):
                raise TypeError(f"controller {name!r} plans {what}={given!r}: give a dict by name, such as {{'mine': {example}}}")
        if plan.steps is not None and plan.steps < 1:
            raise ValueError(f"controller {name!r} plans a cycle of {plan.steps!r} steps: a cycle has at least 1")
        self._check_end(plan.end, plan)
        rows = plan.multipliers
        if rows is not None and not (
            [len(row) for row in rows] == [self.replicas] * len(self.knobs) and all(math.isfinite(x) and x > 0 for row in rows for x in row)
        ):
            raise ValueError(
                f"controller {name!r} plans the multipliers {rows!r}: give {len(self.knobs)} knobs times {self.replicas} replicas, all positive"
            )

    @property
    def explores(self) -> bool:
        """Can replicas differ in the running cycle?"""
        if self.replicas == 1:
            return False
        if self.plan.multipliers is not None:
            return any(len(set(row)) > 1 for row in self.plan.multipliers)
        return self.plan.spread and any(knob.spread > 0 for knob in self.knobs)

    def multipliers(self) -> list[list[float]]:
        """[knob][replica]: rho of the running cycle: the plan's, or drawn (Eq. 1 and 8), or all 1. Not to be written to."""
        if self._table is None:  # a cycle asks when it begins and when it ends, and at 1 024 replicas hashing is most of its cost
            if self.plan.multipliers is not None:
                self._table = [list(map(float, row)) for row in self.plan.multipliers]
            else:
                self._table = self._draw() if self.explores else [[1.0] * self.replicas for _ in self.knobs]
        return self._table

    def _draw(self) -> list[list[float]]:
        if self.design == "orthogonal":
            levels = orthogonal(self.seed, self.cycle, [knob.name for knob in self.knobs], self.replicas)
            return [[1.0 + knob.spread * level for level in row] for knob, row in zip(self.knobs, levels, strict=True)]
        grids = {spread: multipliers(self.replicas, spread) for spread in {knob.spread for knob in self.knobs}}
        places = (assignment(self.seed, self.cycle, knob.name, self.replicas) for knob in self.knobs)
        return [list(map(grids[knob.spread].__getitem__, row)) for knob, row in zip(self.knobs, places, strict=True)]

    def value(self, knob: int, scheduled: float) -> float:
        """The base value in force, given the untouched schedule's."""
        held, scale = self.held[knob], self.knobs[knob].scale
        return scale.corrected(scheduled, self.in_force(knob)) if held is None else scale.hold(held)

    def in_force(self, knob: int) -> float:
        """The correction in the step to come: a sudden rise of a rate is a shock to the moments, so there may be a ramp."""
        before, since, steps = self.ramps[knob]
        part = (self.step - since + 1) / steps if steps else 1.0
        return self.corrections[knob] if part >= 1 else before * (self.corrections[knob] / before) ** part

    def _effective(self, table: list[list[float]], scheduled: Sequence[float]) -> list[list[float]]:
        """The multipliers that have really acted, where a bound has held replicas' values."""
        if not any(knob.scale.bounded for knob in self.knobs):
            return table
        bases = (self.value(k, value) for k, value in enumerate(scheduled))
        return [
            [knob.scale.effective(base, rho) for rho in row] if knob.scale.bounded else row
            for knob, base, row in zip(self.knobs, bases, table, strict=True)
        ]

    # -- count -----------------------------------------------------------------------------------------------------------

    @property
    def cycle_length(self) -> int:
        """Steps of the running cycle: T, unless the controller plans another length."""
        return self.plan.steps or self.clock.sync_interval

    def tick(self) -> bool:
        """One optimizer step is done on every replica. Returns whether it ends the cycle."""
        self.step += 1
        self.position += 1
        return self.clock.ends_cycle(self.position, self.step, self.cycle_length)

    def controls(self, end: int) -> bool:
        """May the controller use the running cycle, which ends at step ``end``?"""
        return self.clock.controls(end, self.cycle_length)

    # -- control ---------------------------------------------------------------------------------------------------------

    def close(
        self,
        losses: Sequence[float | None],
        measured: Mapping[str, Sequence[Sequence[float] | None]] | None = None,
        *,
        scheduled: Sequence[float],
        peak: Sequence[float] | None = None,
        floor: Sequence[float] | None = None,
        highest: Sequence[float] | None = None,
        schedule_step: int | None = None,
        local: bool = False,
        answer: Callable[[Question], Any] | None = None,
    ) -> CycleOutcome:
        """End the cycle: hand the evidence to the controller, apply what it decides, move on to the next cycle.

        ``losses``: [replica] mean training loss; one that is NaN, infinite or None never reaches the controller. ``measured``: by name,
        [replica][number]; rows with a number that is not finite are left out. ``highest``, ``local``: see `Evidence`. ``schedule_step``: see
        the attribute; controllers count in them. ``answer``: to the controller's questions.
        """
        self.schedule_step = schedule_step
        table = self._effective(self.multipliers(), scheduled)
        clean = [x if x is not None and math.isfinite(x) else None for x in losses]
        rows = {name: _finite_rows(given) for name, given in (measured or {}).items()}
        name, read = next(iter(rows.items()), ("loss", clean))
        left_out = [r for r, x in enumerate(read) if x is None]
        notes = [f"replica {r} left out: no finite {name}" for r in left_out]
        learned = Learned([Decision()] * len(self.knobs))
        evidence: Evidence | None = None
        answers: list[Any] = []
        if self.controller is not None and self.controls(self.step):
            evidence = Evidence(
                cycle=self.cycle, step=self.step if schedule_step is None else schedule_step, total_steps=self.clock.total_steps,
                warmup_steps=self.clock.warmup_steps, sync_interval=self.clock.sync_interval,
                knobs=[knob.name for knob in self.knobs], multipliers=table, losses=clean, measured=rows,
                scheduled=list(scheduled), peak=list(peak or scheduled), floor=list(floor or [0.0] * len(self.knobs)),
                values=[self.value(k, s) for k, s in enumerate(scheduled)], corrections=list(self.corrections),
                decisions_left=self.clock.decisions_left(self.step), local=local,
                highest=[max(pair) for pair in zip(scheduled, highest or scheduled, strict=True)],
            )  # fmt: skip
            learned, answers = ask_and_tell(self.controller, evidence, answer)
            if len(learned.decisions) != len(self.knobs):
                raise ValueError(
                    f"controller {self.controller.name!r} returned {len(learned.decisions)} decisions for {len(self.knobs)} knobs"
                )
            wrong = [one for one in learned.decisions if not isinstance(one, Decision)]
            if wrong:
                raise TypeError(
                    f"controller {self.controller.name!r} has decided {wrong[0]!r}: each decision is a hdet.Decision, such as Decision(factor=0.5)"
                )
            self._check_end(learned.end, self.plan)
            pace = self.step / schedule_step if schedule_step else 1.0
            for k, decision in enumerate(learned.decisions):
                notes += self._apply(k, decision, (peak or scheduled)[k], round(decision.ramp * pace))
        outcome = CycleOutcome(self.cycle, table, list(learned.decisions), left_out, notes, learned.end, evidence, answers)
        self._next_cycle()
        return outcome

    def _next_cycle(self) -> None:
        self.cycle += 1
        self.position = 0
        self._plan = self._table = None

    def multiply(self, knob: int, factor: float, peak: float) -> list[str]:
        """A base value, from the next step on. ``peak``: of the untouched schedule. Returns notes."""
        return self._apply(knob, Decision(factor=factor), peak, 0)

    def set_value(self, knob: int, value: float, scheduled: float) -> None:
        """Somebody sets a base value: from now on the correction is the one that leads there from ``scheduled``. Raises ValueError if none does."""
        spec = self.knobs[knob]
        correction = spec.scale.correction_to(value, scheduled)
        if not 1 / LARGEST_CORRECTION <= correction <= LARGEST_CORRECTION or spec.scale.hold(value) != value:
            raise ValueError(f"{spec.name} cannot be set to {value!r} while its schedule is at {scheduled:g}: no correction leads there")
        if self.held[knob] is None:
            self.corrections[knob], self.ramps[knob] = correction, (1.0, 0, 0)
        else:
            self.held[knob] = value

    def restart(self) -> None:
        """Weights were loaded or restored: the controller plans the running cycle anew."""
        if self.controller is not None:
            self.controller.restart(self.moment)
        self._plan = self._table = None

    def roll_back(self, factor: float, schedule_step: int | None = None) -> CycleOutcome:
        """End a cycle that is taken back: nothing was learned in it but that the rates were too high. ``schedule_step`` as for `close`."""
        self.schedule_step = schedule_step
        table = self.multipliers()
        for k in (k for k, knob in enumerate(self.knobs) if knob.rate):
            self.corrections[k] = max(self.in_force(k) * factor, 1 / LARGEST_CORRECTION)
            self.ramps[k] = (1.0, 0, 0)
            held = self.held[k]
            self.held[k] = None if held is None else held * factor
        self.rollbacks += 1
        self.rollbacks_in_row += 1
        outcome = CycleOutcome(self.cycle, table, [Decision()] * len(self.knobs), list(range(self.replicas)), [])
        self._next_cycle()
        self.restart()
        return outcome

    def _check_end(self, end: Ending | None, plan: Plan) -> None:
        name = self.controller_name
        if isinstance(end, Adopt) and not 0 <= end.replica < self.replicas:
            raise ValueError(f"controller {name!r} asks for replica {end.replica!r} to be adopted, but there are {self.replicas}")
        if isinstance(end, Restore) and end.snapshot not in plan.snapshots:
            raise ValueError(
                f"controller {name!r} asks for the snapshot {end.snapshot!r}, but its plan keeps {sorted(plan.snapshots)}: name it in Plan.snapshots"
            )

    def accept(self, level: float | None, left_out: int) -> None:
        """The cycle that ends is not taken back: remember what the next one is compared with."""
        self.level = self.level if level is None else level
        self.rollbacks_in_row = 0
        self.diverged_total += left_out

    def _apply(self, knob: int, decision: Decision, peak: float, ramp: int) -> list[str]:
        """``ramp``: the decision's, in steps of this engine."""
        self.held[knob] = decision.value
        before, wanted = self.in_force(knob), self.corrections[knob] * decision.factor
        # What passes a knob's bound changes no value, but would take as long to come back.
        lowest, highest = self.knobs[knob].scale.corrections(peak)
        self.corrections[knob] = min(max(wanted, 1 / LARGEST_CORRECTION, lowest), LARGEST_CORRECTION, highest)
        if decision.factor != 1:
            self.ramps[knob] = (before, self.step, ramp if self.corrections[knob] > before else 0)
        name = self.knobs[knob].name
        notes = [f"{name}: {decision.note}"] if decision.note else []
        if self.corrections[knob] != wanted:
            notes.append(f"{name}: correction {wanted:.3g} held at {self.corrections[knob]:.3g}")
        return notes

    # -- checkpoint ------------------------------------------------------------------------------------------------------

    _COUNTS = ("cycle", "step", "position", "rollbacks", "rollbacks_in_row", "diverged_total")

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists; the same on every rank and for every N, so it loads with another number of replicas."""
        return {
            **self._whose(),
            **{name: getattr(self, name) for name in self._COUNTS},
            "seed": self.seed,
            "level": self.level,
            "corrections": list(self.corrections),
            "bases": list(self.held),
            "ramps": [list(ramp) for ramp in self.ramps],
            "controller_state": None if self.controller is None else self.controller.state_dict(),
        }

    def _whose(self) -> dict[str, Any]:
        """What a state must have alike to be loaded."""
        controller = None if self.controller is None else self.controller.name
        return {"version": STATE_VERSION, "knobs": [knob.name for knob in self.knobs], "controller": controller}

    def check_state(self, state: Any) -> dict[str, Any]:
        """The values in it; changes nothing. Raises ValueError for a state that does not belong to this run, or is damaged. A run without a
        controller takes that of any: this is how a search is turned off, and its corrections kept."""
        knobs, correction = len(self.knobs), Number(LARGEST_CORRECTION**-2, LARGEST_CORRECTION)
        named: dict[str, Kind] = {
            "version": Or(Number(), STATE_VERSION), "knobs": ListOf(Instance(str)), "controller": Optional(Instance(str)),
        }  # fmt: skip
        found = read(state, named, "ensemble's")
        for key, mine in self._whose().items():
            if found[key] != mine and not (key == "controller" and mine is None):
                remedy = {
                    "version": "load it with the hdet that wrote it", "knobs": "construct it with the same knobs",
                    "controller": "construct it with the same controller, or with controller=None, which keeps the corrections and searches no "
                    "further",
                }[key]  # fmt: skip
                raise ValueError(f"the ensemble's state was saved with {key} {reprlib.repr(found[key])}, this run has {mine!r}: {remedy}")
        fields: dict[str, Kind] = {
            **dict.fromkeys(self._COUNTS, COUNT),
            "seed": Number(-LARGEST_SEED, LARGEST_SEED, whole=True),
            "level": Optional(Number(-sys.float_info.max, sys.float_info.max)),
            "corrections": ListOf(correction, knobs),
            "bases": ListOf(Optional(POSITIVE), knobs),
            "ramps": Or(ListOf(Row(Number(POSITIVE.low, LARGEST_CORRECTION), COUNT, COUNT), knobs), [(1.0, 0, 0)] * knobs),  # or older
            "controller_state": Optional(Instance(Mapping)) if self.controller is None else Instance(Mapping),
        }
        values = read(state, fields, "ensemble's")
        if not values["position"] <= values["step"] >= max(since for _, since, _ in values["ramps"]):
            raise ValueError(
                f"the ensemble's state has step {values['step']}, but position {values['position']} and ramps {values['ramps']}: it is damaged"
            )
        if self.controller is not None:
            self.controller.check_state(values["controller_state"], knobs)
        elif any(base is not None for base in values["bases"]):
            raise ValueError(
                f"the ensemble's state was saved with controller {reprlib.repr(found['controller'])}, whose values stand in the place of the schedule, "
                "and would stay where they are without it: construct it with the same controller, and freeze_after=1 to search no further"
            )
        return values

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. The seed of the saved run is kept, so that its assignments go on. Raises as `check_state`; nothing is
        changed then."""
        values = self.check_state(state)
        with unchanged_on_error(self.controller):
            if self.controller is not None:
                self.controller.load_state_dict(values["controller_state"])
        for key in (*self._COUNTS, "seed"):
            setattr(self, key, values[key])
        self.level = None if values["level"] is None else float(values["level"])
        self.corrections = [float(x) for x in values["corrections"]]
        self.held = [None if x is None else float(x) for x in values["bases"]]
        self.ramps = [(float(before), since, steps) for before, since, steps in values["ramps"]]
        self._plan = self._table = None


def ask_and_tell(controller: Controller, evidence: Evidence, answer: Callable[[Question], Any] | None) -> tuple[Learned, list[Any]]:
    """Let the controller learn; its questions are answered one after the other. Returns what it has learned, and the answers. Raises ValueError
    if it asks, and nobody is there to answer."""
    learning = learning_of(controller, evidence)
    answers: list[Any] = []
    try:
        question = next(learning)
        while True:
            if answer is None:
                raise ValueError(f"controller {controller.name!r} asks {question!r}, but nothing was measured that could answer")
            answers.append(answer(question))
            question = learning.send(answers[-1])
    except StopIteration as end:
        return end.value, answers


def _finite_rows(rows: Sequence[Sequence[float] | None]) -> list[Sequence[float] | None]:
    """None in the place of a row with a number that is not finite. A finite sum has finite terms, which is the quick way to know."""
    if math.isfinite(sum(sum(row) for row in rows if row is not None)):
        return list(rows)
    return [row if row is not None and all(map(math.isfinite, row)) else None for row in rows]
