"""One run of the method: a clock, a table of multipliers, corrections. No tensors, no processes.

`hdet.Ensemble` drives it with real losses, the tests with made-up ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .clock import Clock
from .controller import Controller, check_name, checked_decisions, checked_plan
from .design import table_of
from .engine_state import LARGEST_CORRECTION, STATE_VERSION, check_identity, read_values
from .evidence import Evidence
from .plan import Decision, Plan
from .scale import Scale
from .schema import unchanged_on_error

__all__ = ["CycleOutcome", "Engine", "KnobSpec"]

Rows = Sequence[Sequence[float] | None]


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
    """A cycle that has ended; lists have an entry for each knob."""

    cycle: int
    begin: int
    """Optimizer steps done before it."""
    plan: Plan
    multipliers: list[list[float]]
    decisions: list[Decision]
    left_out: list[int]
    notes: list[str]
    evidence: Evidence | None = None
    """What the controller was given; None where it was not asked."""
    rolled_back: bool = False


class Engine:
    """Counts steps and cycles, draws multipliers, asks the controller, keeps one correction (or
    base value) for each knob.

    Args:
        knobs: what is explored; names must differ.
        replicas: N, >= 1.
        clock: cycle, warm-up and length of the run, in optimizer steps.
        controller: None keeps corrections at 1 (spread and averages still run).
        seed: key of the assignments (Eq. 8).
        design: "permutation", each knob by itself (Eq. 8), or "orthogonal", two levels for all
            knobs together (core/design.py).

    Raises:
        ValueError: an argument that cannot be used.
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
            check_name(controller)
            clock.check_controller_can_act()
        self.knobs, self.replicas, self.clock = list(knobs), replicas, clock
        self.controller, self.seed, self.design = controller, seed, design
        self.cycle = 0
        self.step = 0
        self.position = 0
        """Steps of the running cycle that are done."""
        self.corrections = [1.0] * len(knobs)
        self.held: list[float | None] = [None] * len(knobs)
        """[knob]: a base value in the place of schedule times correction."""
        self.level: float | None = None
        """Median loss of the healthy replicas in the last cycle that was not taken back."""
        self.rollbacks = 0
        """Cycles taken back since step 0."""
        self.rollbacks_in_row = 0
        self.diverged_total = 0
        """How often a replica was left out of an average since step 0."""
        self._plan: Plan | None = None
        self._table: list[list[float]] | None = None

    # -- the running cycle -------------------------------------------------------------------------

    @property
    def controller_name(self) -> str:
        """For messages; "" without one."""
        return "" if self.controller is None else self.controller.name

    @property
    def plan(self) -> Plan:
        """Of the running cycle; the controller is asked once for each."""
        if self._plan is None:
            self._plan = Plan() if self.controller is None else checked_plan(self.controller)
        return self._plan

    @property
    def explores(self) -> bool:
        """Can replicas differ in the running cycle?"""
        spreads = self.plan.spread and any(knob.spread > 0 for knob in self.knobs)
        return self.replicas > 1 and spreads

    def multipliers(self) -> list[list[float]]:
        """[knob][replica]: rho of the running cycle: drawn (Eq. 1 and 8), or all 1. Not to be
        written to."""
        if self._table is None:  # kept: at 1 024 replicas hashing is most of a cycle's cost
            ones = [1.0] * self.replicas
            spreads = [(knob.name, knob.spread) for knob in self.knobs]
            self._table = (
                table_of(self.design, self.seed, self.cycle, spreads, self.replicas)
                if self.explores
                else [list(ones) for _ in self.knobs]
            )
        return self._table

    def value(self, knob: int, scheduled: float) -> float:
        """The base value in force, given the untouched schedule's."""
        held, scale = self.held[knob], self.knobs[knob].scale
        if held is not None:
            return scale.hold(held)
        return scale.corrected(scheduled, self.corrections[knob])

    def _effective(self, scheduled: Sequence[float]) -> list[list[float]]:
        """The multipliers that have really acted, where a bound has held replicas' values."""
        table = self.multipliers()
        if not any(knob.scale.bounded for knob in self.knobs):
            return table
        bases = (self.value(k, value) for k, value in enumerate(scheduled))
        return [
            [knob.scale.effective(base, rho) for rho in row] if knob.scale.bounded else row
            for knob, base, row in zip(self.knobs, bases, table, strict=True)
        ]

    # -- count -------------------------------------------------------------------------------------

    def tick(self) -> bool:
        """One optimizer step is done on every replica. Returns whether it ends the cycle: after T
        steps, and at the end of the run."""
        self.step += 1
        self.position += 1
        return self.position >= self.clock.sync_interval or self.step == self.clock.total_steps

    def restart(self) -> None:
        """Other weights were loaded or restored: the controller plans the running cycle again."""
        if self.controller is not None:
            self.controller.restart()
        self._plan = self._table = None

    # -- control -----------------------------------------------------------------------------------

    def close(
        self,
        losses: Sequence[float | None],
        measured: Mapping[str, Rows] | None = None,
        *,
        scheduled: Sequence[float],
        peak: Sequence[float] | None = None,
        floor: Sequence[float] | None = None,
        highest: Sequence[float] | None = None,
        schedule_step: int | None = None,
        local: bool = False,
    ) -> CycleOutcome:
        """End the cycle: give the evidence to the controller, apply its decisions, go on.

        Args:
            losses: [replica] mean training loss; NaN, infinity and None are left out.
            measured: by name, [replica][number]; rows that are not finite are left out.
            scheduled, peak, floor, highest, local: see `Evidence`.
            schedule_step: steps of the schedule done, where they are not the engine's.

        Raises:
            TypeError, ValueError: the controller's answer is not one Decision for each knob.
        """
        losses = [x if x is not None and math.isfinite(x) else None for x in losses]
        rows = {name: _finite_rows(given) for name, given in (measured or {}).items()}
        name, read_rows = next(iter(rows.items()), ("loss", losses))
        left_out = [r for r, row in enumerate(read_rows) if row is None]
        notes = [f"replica {r} left out: no finite {name}" for r in left_out]
        table = self._effective(scheduled)
        peak = list(peak or scheduled)
        decisions, evidence = [Decision()] * len(self.knobs), None
        if self.controller is not None and self.clock.controls(self.step):
            evidence = self._evidence(
                step=self.step if schedule_step is None else schedule_step,
                multipliers=table, losses=losses, measured=rows, scheduled=list(scheduled),
                peak=peak, floor=list(floor or [0.0] * len(self.knobs)), local=local,
                highest=list(map(max, scheduled, highest or scheduled)),
            )  # fmt: skip
            decisions = checked_decisions(self.controller, evidence)
            for k, decision in enumerate(decisions):
                notes += self._apply(k, decision, peak[k])
        return self._ended(table, decisions, left_out, notes, evidence)

    def _evidence(self, *, scheduled: Sequence[float], **given: Any) -> Evidence:
        clock = self.clock
        return Evidence(
            cycle=self.cycle, total_steps=clock.total_steps, warmup_steps=clock.warmup_steps,
            sync_interval=clock.sync_interval, knobs=[knob.name for knob in self.knobs],
            values=[self.value(k, value) for k, value in enumerate(scheduled)],
            corrections=list(self.corrections), decisions_left=clock.decisions_left(self.step),
            scheduled=scheduled, **given,
        )  # fmt: skip

    def _ended(
        self, table: list[list[float]], decisions: list[Decision], left_out: list[int],
        notes: list[str], evidence: Evidence | None = None, rolled_back: bool = False,
    ) -> CycleOutcome:  # fmt: skip
        outcome = CycleOutcome(
            self.cycle, self.step - self.position, self.plan, table, decisions, left_out, notes,
            evidence, rolled_back,
        )  # fmt: skip
        self.cycle, self.position = self.cycle + 1, 0
        self._plan = self._table = None
        return outcome

    def multiply(self, knob: int, factor: float, peak: float) -> list[str]:
        """A correction, from the next step on. ``peak``: of the untouched schedule. Returns
        notes."""
        return self._apply(knob, Decision(factor=factor), peak)

    def set_value(self, knob: int, value: float, scheduled: float) -> None:
        """Somebody sets a base value: from now on the correction is the one that leads there from
        ``scheduled``. Raises ValueError if none does."""
        spec = self.knobs[knob]
        correction = spec.scale.correction_to(value, scheduled)
        in_range = 1 / LARGEST_CORRECTION <= correction <= LARGEST_CORRECTION
        if not in_range or spec.scale.hold(value) != value:
            raise ValueError(
                f"{spec.name} cannot be set to {value!r} while its schedule is at {scheduled:g}: "
                "no correction leads there"
            )
        if self.held[knob] is None:
            self.corrections[knob] = correction
        else:
            self.held[knob] = value

    def _apply(self, knob: int, decision: Decision, peak: float) -> list[str]:
        self.held[knob] = decision.value
        wanted = self.corrections[knob] * decision.factor
        # What passes a knob's bound changes no value, but would take as long to come back.
        lowest, highest = self.knobs[knob].scale.corrections(peak)
        held = min(max(wanted, 1 / LARGEST_CORRECTION, lowest), LARGEST_CORRECTION, highest)
        self.corrections[knob] = held
        name = self.knobs[knob].name
        notes = [f"{name}: {decision.note}"] if decision.note else []
        if held != wanted:
            notes.append(f"{name}: correction {wanted:.3g} held at {held:.3g}")
        return notes

    # -- divergence --------------------------------------------------------------------------------

    def accept(self, level: float | None, left_out: int) -> None:
        """The cycle that ends is not taken back. ``level``: its median loss, with which the next
        one is compared; ``left_out``: how many replicas were left out of its average."""
        self.level = self.level if level is None else level
        self.rollbacks_in_row = 0
        self.diverged_total += left_out

    def roll_back(self, factor: float) -> CycleOutcome:
        """End a cycle that is taken back: its rates were too high, and are multiplied by
        ``factor``."""
        table = self.multipliers()
        for k in (k for k, knob in enumerate(self.knobs) if knob.rate):
            self.corrections[k] = max(self.corrections[k] * factor, 1 / LARGEST_CORRECTION)
            held = self.held[k]
            self.held[k] = None if held is None else held * factor
        self.rollbacks += 1
        self.rollbacks_in_row += 1
        nothing, everybody = [Decision()] * len(self.knobs), list(range(self.replicas))
        outcome = self._ended(table, nothing, everybody, [], rolled_back=True)
        self.restart()
        return outcome

    # -- checkpoint --------------------------------------------------------------------------------

    _COUNTS = ("cycle", "step", "position", "rollbacks", "rollbacks_in_row", "diverged_total")

    def state_dict(self) -> dict[str, Any]:
        """Plain data; the same on every rank and for every N, so it loads with another number of
        replicas."""
        return {
            **self._identity(),
            **{name: getattr(self, name) for name in self._COUNTS},
            "seed": self.seed,
            "level": self.level,
            "corrections": list(self.corrections),
            "bases": list(self.held),
            "controller_state": None if self.controller is None else self.controller.state_dict(),
        }

    def _identity(self) -> dict[str, Any]:
        """What a state must have alike to be loaded."""
        return {
            "version": STATE_VERSION,
            "knobs": [knob.name for knob in self.knobs],
            "controller": None if self.controller is None else self.controller.name,
        }

    def check_state(self, state: Any) -> dict[str, Any]:
        """The values in it; changes nothing. A run without a controller takes the state of any:
        its corrections stay, and nothing is searched any more. Raises ValueError for a state that
        does not belong to this run, or is damaged."""
        check_identity(state, self._identity())
        return read_values(state, self._COUNTS, self.controller, len(self.knobs))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. The seed of the saved run is kept, so that its assignments
        go on. Raises as `check_state`; nothing is changed then."""
        values = self.check_state(state)
        with unchanged_on_error(self.controller):
            if self.controller is not None:
                self.controller.load_state_dict(values["controller_state"])
        for key in (*self._COUNTS, "seed"):
            setattr(self, key, values[key])
        self.level = None if values["level"] is None else float(values["level"])
        self.corrections = [float(x) for x in values["corrections"]]
        self.held = [None if x is None else float(x) for x in values["bases"]]
        self._plan = self._table = None


def _finite_rows(rows: Rows) -> list[Sequence[float] | None]:
    """None in the place of a row with a number that is not finite. A finite sum has finite terms,
    which is the quick way to know."""
    if math.isfinite(sum(sum(row) for row in rows if row is not None)):
        return list(rows)
    return [row if row is not None and all(map(math.isfinite, row)) else None for row in rows]
