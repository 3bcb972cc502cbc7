"""One run of the method: a clock, a table of multipliers, corrections. No tensors, no processes.

`hdet.Ensemble` drives it with real losses, the tests with made-up ones.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from .clock import Clock
from .controller import Controller
from .design import table_of
from .evidence import Evidence, KnobSpec
from .plan import Decision, Plan
from .schema import COUNT, MAPPING, instance, list_of, loaded, number, optional, read

__all__ = ["STATE_VERSION", "CycleOutcome", "Engine", "KnobSpec"]

STATE_VERSION = 3
LARGEST_CORRECTION = 1e6
"""A correction outside [1/this, this] is a runaway, not a tuning: it is held there and noted."""
COUNTS = ("cycle", "step", "position", "rollbacks", "rollbacks_in_row", "diverged_total")
NAME = instance(str, "a name")
IDENTITY = {"version": number(), "knobs": list_of(NAME), "controller": optional(NAME)}
REMEDIES = {
    "version": "load it with the hdet that wrote it",
    "knobs": "construct it with the same knobs",
    "controller": "construct it with the same controller, or with controller=None, which keeps the "
    "corrections and searches no further",
}

Rows = Sequence[Sequence[float] | None]


@dataclass(frozen=True)
class CycleOutcome:
    """A cycle that has ended; lists have an entry for each knob."""

    cycle: int
    begin: int  # optimizer steps done before it
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
        ValueError: there is no knob, or two have one name; or the controller would never act.
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
        total, warmup = clock.total_steps, clock.warmup_steps
        if controller is not None and total is not None and total <= warmup:
            raise ValueError(
                f"total_steps ({total}) must exceed the controller's warm-up ({warmup} steps), or "
                "it never acts: lower warmup_steps (auto_lr_warmup_steps), train longer, or run "
                "without a controller"
            )
        self.knobs, self.replicas, self.clock = list(knobs), replicas, clock
        self.controller, self.seed, self.design = controller, seed, design
        self.cycle = self.step = self.position = 0
        """Cycles and steps that are done, and steps of the running cycle that are."""
        self.corrections = [1.0] * len(knobs)
        self.held: list[float | None] = [None] * len(knobs)
        """[knob]: a base value in the place of schedule times correction."""
        self.level: float | None = None
        """Median loss of the healthy replicas in the last cycle that was not rolled back."""
        self.rollbacks = self.rollbacks_in_row = self.diverged_total = 0
        """Cycles rolled back since step 0, and in a row; how often a replica was left out of an
        average."""
        self._said_no_loss = False
        self._plan: Plan | None = None
        self._table: list[list[float]] | None = None

    # -- the running cycle -------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """Of the running cycle; the controller is asked once for each."""
        if self._plan is None:
            self._plan = Plan() if self.controller is None else self.controller.plan()
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
            spreads = [(knob.name, knob.spread) for knob in self.knobs]
            self._table = (
                table_of(self.design, self.seed, self.cycle, spreads, self.replicas)
                if self.explores
                else [[1.0] * self.replicas for _ in self.knobs]
            )
        return self._table

    # -- count -------------------------------------------------------------------------------------

    def tick(self) -> bool:
        """One optimizer step is done on every replica. Returns whether it ends the cycle: after T
        steps, and at the end of the run."""
        self.step += 1
        self.position += 1
        if self.step - 1 == self.clock.total_steps:
            self.clock.warn_of_more_steps()
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
        values: Sequence[float] | None = None,
        **seen: Any,
    ) -> CycleOutcome:
        """End the cycle: give the evidence to the controller, apply its decisions, go on.

        Args:
            losses: [replica] mean training loss; NaN, infinity and None are left out.
            measured: by name, [replica][number]; rows that are not finite are left out.
            scheduled, values, seen: as in `Evidence`: also step, peak, floor, highest, local.
                Values are those of the schedule by default.

        Raises:
            ValueError: the controller's answer is not one Decision for each knob.
        """
        losses = [x if x is not None and math.isfinite(x) else None for x in losses]
        rows = {name: _finite_rows(given) for name, given in (measured or {}).items()}
        name, learned_from = next(iter(rows.items()), ("loss", losses))
        left_out = [r for r, row in enumerate(learned_from) if row is None]
        notes = self._notes_of_missing(name, left_out)
        values = scheduled if values is None else values
        table = self._effective(values)
        decisions, evidence = [Decision()] * len(self.knobs), None
        if self.controller is not None and self.clock.controls(self.step):
            defaults = {"step": self.step, "peak": scheduled, "floor": [0.0] * len(self.knobs)}
            evidence = Evidence(
                cycle=self.cycle, knobs=[knob.name for knob in self.knobs], multipliers=table,
                losses=losses, scheduled=scheduled, values=values, measured=rows,
                corrections=list(self.corrections),
                decisions_left=self.clock.decisions_left(self.step),
                **asdict(self.clock), **{**defaults, **seen},
            )  # fmt: skip
            decisions = self._decide(self.controller, evidence)
            for k, decision in enumerate(decisions):
                notes += self.apply(k, decision, evidence.peak[k])
        ended = {"multipliers": table, "decisions": decisions, "left_out": left_out}
        return self._end(**ended, notes=notes, evidence=evidence)

    def _notes_of_missing(self, name: str, left_out: Sequence[int]) -> list[str]:
        """Of those whose numbers the controller would have read; of a loop without losses, once."""
        controller = self.controller
        if controller is None or not self.clock.controls(self.step):
            return []
        if not self.explores if controller.needs_replicas else controller.search is not None:
            return []
        if name >= "loss" and len(left_out) == self.replicas:
            note = "no finite loss was passed to step() in this cycle: pass step(loss)"
            notes, self._said_no_loss = [] if self._said_no_loss else [note], True
            return notes
        return [f"replica {r} left out: its {name} is missing or not finite" for r in left_out]

    def _effective(self, bases: Sequence[float]) -> list[list[float]]:
        """The multipliers that have really acted, where a bound has held replicas' values."""
        rows = zip(self.knobs, bases, self.multipliers(), strict=True)
        return [
            [knob.scale.effective(base, rho) for rho in row] if knob.scale.bounded else row
            for knob, base, row in rows
        ]

    def _decide(self, controller: Controller, evidence: Evidence) -> list[Decision]:
        decisions: Any = controller.learn(evidence)
        is_list = isinstance(decisions, list) and len(decisions) == len(self.knobs)
        if not is_list or not all(isinstance(one, Decision) for one in decisions):
            raise ValueError(
                f"controller {controller.name!r} has decided {decisions!r}: decide must return a "
                f"list of {len(self.knobs)}, a hdet.Decision such as Decision(factor=0.5) for each "
                "knob"
            )
        return list(decisions)

    def _end(self, **outcome: Any) -> CycleOutcome:
        begin = self.step - self.position
        ended = CycleOutcome(cycle=self.cycle, begin=begin, plan=self.plan, **outcome)
        self.cycle, self.position = self.cycle + 1, 0
        self._plan = self._table = None
        return ended

    def set_value(self, knob: int, value: float, scheduled: float) -> None:
        """Somebody sets a base value: from now on the correction is the one that leads there from
        ``scheduled``. Raises ValueError if none does."""
        spec = self.knobs[knob]
        correction = spec.scale.correction_to(value, scheduled)
        in_range = 1 / LARGEST_CORRECTION >= correction <= LARGEST_CORRECTION
        if not in_range or spec.scale.hold(value) != value:
            raise ValueError(
                f"{spec.name} cannot be set to {value!r} while its schedule is at {scheduled:g}: "
                "no correction leads there"
            )
        if self.held[knob] is None:
            self.corrections[knob] = correction
        else:
            self.held[knob] = value

    def apply(self, knob: int, decision: Decision, peak: float) -> list[str]:
        """From the next step on. ``peak``: of the untouched schedule. Returns notes."""
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
        """The cycle that ends is not rolled back. ``level``: its median loss, with which the next
        one is compared; ``left_out``: how many replicas were left out of its average."""
        self.level = self.level if level is None else level
        self.rollbacks_in_row = 0
        self.diverged_total += left_out

    def roll_back(self, factor: float) -> CycleOutcome:
        """End a cycle that is rolled back: its rates were too high, and are multiplied by
        ``factor``."""
        for k in (k for k, knob in enumerate(self.knobs) if knob.rate):
            self.corrections[k] = max(self.corrections[k] * factor, 1 / LARGEST_CORRECTION)
            held = self.held[k]
            self.held[k] = None if held is None else held * factor
        self.rollbacks += 1
        self.rollbacks_in_row += 1
        outcome = self._end(
            multipliers=self.multipliers(), decisions=[Decision()] * len(self.knobs),
            left_out=list(range(self.replicas)), notes=[], rolled_back=True,
        )  # fmt: skip
        self.restart()
        return outcome

    # -- checkpoint --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain data; the same on every rank and for every N, so it loads with another number of
        replicas."""
        controller = self.controller
        return {
            "version": STATE_VERSION,
            "knobs": [knob.name for knob in self.knobs],
            "controller": None if controller is None else controller.name,
            **{name: getattr(self, name) for name in COUNTS},
            "seed": self.seed,
            "level": self.level,
            "corrections": list(self.corrections),
            "bases": list(self.held),
            "controller_state": None if controller is None else controller.state_dict(),
        }

    def check_state(self, state: Any) -> dict[str, Any]:
        """The values in it; changes nothing. A run without a controller takes the state of any:
        its corrections stay, and no other values are tried. Raises ValueError for a state that
        does not belong to this run, or is damaged."""
        where, own, of_knobs = "the ensemble's state", self.state_dict(), len(self.knobs)
        for key, saved in read(state, IDENTITY, where).items():
            if saved != own[key] and not (key == "controller" and self.controller is None):
                raise ValueError(
                    f"{where} was saved with {key} {reprlib.repr(saved)}, this run has "
                    f"{own[key]!r}: {REMEDIES[key]}"
                )
        correction = number(LARGEST_CORRECTION**-2, LARGEST_CORRECTION)
        fields = {
            **dict.fromkeys(COUNTS, COUNT),
            "seed": number(whole=True),
            "level": optional(number()),
            "corrections": list_of(correction, of_knobs),
            "bases": list_of(optional(number(1e-100)), of_knobs),
            "controller_state": optional(MAPPING) if self.controller is None else MAPPING,
        }
        values = read(state, fields, where)
        if values["position"] > values["step"]:
            raise ValueError(f"position of {where} is above its step: it is damaged")
        if self.controller is not None:
            self.controller.check_state(values["controller_state"])
        elif any(base is not None for base in values["bases"]):
            raise ValueError(
                f"{where} was saved with controller {reprlib.repr(state['controller'])}, whose "
                "values stand in the place of the schedule: construct it with the same controller, "
                "and freeze_after=1 to search no further"
            )
        return values

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `taken_over`."""
        with self.taken_over(state):
            pass

    @contextmanager
    def taken_over(self, state: Mapping[str, Any]) -> Iterator[None]:
        """Continues from `state_dict`, unless what is done inside raises. The seed of the saved run
        is kept, so that its assignments go on. Raises as `check_state`; nothing is changed then."""
        values = self.check_state(state)
        with loaded(self.controller, values["controller_state"]):
            yield
        self.held = values["bases"]
        for key in (*COUNTS, "seed", "level", "corrections"):
            setattr(self, key, values[key])
        self._plan = self._table = None


def _finite_rows(rows: Rows) -> list[Sequence[float] | None]:
    """None in the place of a row with a number that is not finite. A finite sum has finite terms,
    which is the quick way to know."""
    if math.isfinite(sum(sum(row) for row in rows if row is not None)):
        return list(rows)
    return [row if row is not None and all(map(math.isfinite, row)) else None for row in rows]
