"""One run of the method: a clock, a table of multipliers, a controller. No tensors, no processes.

`hdet.Ensemble` drives it with real losses, the tests with made-up ones.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .clock import Clock
from .controller import Controller
from .design import table_of
from .evidence import Evidence, KnobSpec
from .plan import Decision, Plan
from .schema import COUNT, FLAG, MAPPING, instance, list_of, loaded, number, optional, read
from .value import Value

__all__ = ["STATE_VERSION", "CycleOutcome", "Engine"]

STATE_VERSION = 5
COUNTS = ("cycle", "step", "position", "rollbacks", "rollbacks_in_row", "diverged_total")
NAME = instance(str, "a name")
CYCLE_FIELDS = {"step": COUNT, "position": COUNT, "is_searching": FLAG}
IDENTITY = {"version": number(), "knobs": list_of(NAME), "controller": optional(NAME)}
REMEDIES = {
    "version": "load it with the hdet that wrote it",
    "knobs": "construct it with the same knobs",
    "controller": "construct it with the same controller, or with controller=None, which keeps the "
    "corrections and moves nothing further",
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
    observed: bool = False
    """Has the controller only looked on, because a search moves the rate?"""


class Engine:
    """Counts steps and cycles, draws multipliers, asks the controller, and hands its decisions to
    the values of the knobs, which it keeps no copy of.

    Args:
        values: of what is explored; names must differ.
        replicas: N, >= 1.
        clock: cycle, warm-up and length of the run, in optimizer steps.
        controller: None decides nothing at a cycle's end (spread and averages still run).
        seed: key of the assignments (Eq. 8).
        design: "permutation", each knob by itself (Eq. 8), or "orthogonal", two levels for all
            knobs together (core/design.py).
        searches: does a search move rates in the first steps? Until it is over replicas train
            alike, and the controller looks on; without a controller they train alike for good.
        coming_rate: of the optimizer after so many steps, by which periods grow; None: not known.

    Raises:
        ValueError: there is no knob, or two have one name; or the controller would never act.
    """

    def __init__(
        self,
        values: Sequence[Value],
        replicas: int,
        clock: Clock,
        controller: Controller | None = None,
        seed: int = 0,
        design: str = "permutation",
        searches: bool = False,
        coming_rate: Callable[[int], float | None] = lambda step: None,
    ) -> None:
        names = [value.name for value in values]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"knobs must be at least one, with different names, got {names}")
        total, warmup = clock.total_steps, clock.warmup_steps
        if controller is not None and total is not None and total <= warmup:
            raise ValueError(
                f"total_steps ({total}) must exceed the controller's warm-up ({warmup} steps), or "
                "it never acts: lower warmup_steps (auto_lr_warmup_steps), train longer, or run "
                "without a controller"
            )
        self.values, self.replicas, self.clock = list(values), replicas, clock
        self.controller, self.seed, self.design = controller, seed, design
        self.coming_rate = coming_rate
        self.knobs: list[KnobSpec] = [value.spec for value in values]
        self.cycle = self.step = self.position = 0
        """Cycles and steps that are done, and steps of the running cycle that are."""
        self.level: float | None = None
        """Median loss of the healthy replicas in the last cycle that was not rolled back."""
        self.rollbacks = self.rollbacks_in_row = self.diverged_total = 0
        """Cycles rolled back since step 0, and in a row; how often a replica was left out of an
        average."""
        self.searches = self.is_searching = searches
        """`is_searching`: has the running cycle begun before the search was over?"""
        self._said_no_loss = False
        self._interval: int | None = None
        self._plan: Plan | None = None
        self._table: list[list[float]] | None = None

    # -- the running cycle -------------------------------------------------------------------------

    @property
    def first(self) -> int:
        """Steps done before it."""
        return self.step - self.position

    @property
    def interval(self) -> int:
        """T of it: by the rate where it begins, or by a higher one that `tick` has seen since."""
        if self._interval is None:
            self._interval = self._interval_by_rate()
        return self._interval

    def _interval_by_rate(self) -> int:
        rate = self.coming_rate(self.step) if self.clock.period else None
        return self.clock.interval(self.first, rate)

    def note_schedule(self) -> None:
        """That of the rate is another one, before the first step: T is decided again."""
        self._interval = None

    @property
    def steps_left(self) -> int:
        """To its end, or that of the run."""
        left, total = self.interval - self.position, self.clock.total_steps
        return left if total is None else min(left, max(0, total - self.step))

    @property
    def may_differ(self) -> bool:
        """May replicas differ? Before `Sync.begin`, and while a search goes on beyond it, they
        share gradients and train alike."""
        return self._may_differ(self.first, self.is_searching)

    def may_differ_after(self, state: Any) -> bool:
        """`may_differ` once this state is loaded. Raises ValueError for one that does not say."""
        values = read(state, CYCLE_FIELDS, "the ensemble's state")
        return self._may_differ(
            values["step"] - values["position"], self._goes_on_searching(values)
        )

    def _may_differ(self, first: int, is_searching: bool) -> bool:
        begin = self.clock.begin
        return not begin or (first >= begin and not is_searching)

    def _goes_on_searching(self, state: Mapping[str, Any]) -> bool:
        return self.searches and bool(state["is_searching"])

    @property
    def plan(self) -> Plan:
        """Of the running cycle; the controller is asked once for each."""
        if self._plan is None:
            self._plan = self._ask_plan(self.is_searching)
        return self._plan

    def _ask_plan(self, is_searching: bool, is_restart: bool = False) -> Plan:
        """Of a cycle; ``is_restart``: with other weights. Raises TypeError for what is no plan,
        ValueError for one of another run."""
        controller = self.controller
        if controller is not None and is_restart:
            controller.restart()
        if controller is None or is_searching:
            return Plan(spread=not self.searches)
        plan: Any = controller.plan()
        if not isinstance(plan, Plan):
            raise TypeError(
                f"controller {controller.name!r} has planned {plan!r}: plan must return an "
                "hdet.Plan, such as hdet.Plan(spread=False)"
            )
        try:
            plan.check(self.knobs, self.replicas, controller.measurements)
        except ValueError as error:
            raise ValueError(f"controller {controller.name!r}: {error}") from None
        return plan

    @property
    def explores(self) -> bool:
        """Can replicas differ by their knobs in the running cycle?"""
        if not self.may_differ:
            return False
        if self.plan.multipliers is not None:
            return any(len(set(row)) > 1 for row in self.multipliers())
        spreads = self.plan.spread and any(knob.grid.explores for knob in self.knobs)
        return self.replicas > 1 and spreads

    def multipliers(self) -> list[list[float]]:
        """[knob][replica]: rho of the running cycle: the plan's, drawn (Eq. 1 and 8), or all 1. Not
        to be written to."""
        if self._table is not None:  # kept: at 1 024 replicas hashing is most of a cycle's cost
            return self._table
        if self.plan.multipliers is not None and self.may_differ:
            self._table = [list(row) for row in self.plan.multipliers]
        elif self.explores:
            self._table = table_of(self.design, self.seed, self.cycle, self.values, self.replicas)
        else:
            self._table = [[1.0] * self.replicas for _ in self.knobs]
        return self._table

    # -- count -------------------------------------------------------------------------------------

    def tick(self) -> bool:
        """One optimizer step is done on every replica. Returns whether it ends the cycle: after T
        steps, and at the end of the run."""
        self.step += 1
        self.position += 1
        if self.step - 1 == self.clock.total_steps:
            self.clock.warn_of_more_steps()
        interval = self._interval or self.interval  # a call less in each step
        period = self.clock.period
        if period is not None and self.position % period.least == 0:
            # Not in each step: the rate may be a tensor, for whose device this waits.
            self._interval = interval = min(interval, self._interval_by_rate())
        return self.position >= interval or self.step == self.clock.total_steps

    def restart(self) -> None:
        """Other weights were restored: the controller plans the running cycle again."""
        self._plan, self._table = self._ask_plan(self.is_searching, is_restart=True), None

    # -- control -----------------------------------------------------------------------------------

    def close(
        self,
        losses: Sequence[float | None],
        measured: Mapping[str, Rows] | None = None,
        *,
        step: int | None = None,
        local: bool = False,
        is_search_over: bool = True,
    ) -> CycleOutcome:
        """End the cycle: give the evidence to the controller, hand on its decisions. Values must be
        those of the next step, and are to be corrected after it.

        Args:
            losses: [replica] mean training loss; NaN, infinity and None are left out.
            measured: by name, [replica][number]; rows that are not finite are left out.
            step: of the schedule; None: the engine's.
            local: as in `Evidence`.
            is_search_over: does the controller decide from the next cycle on, if it did not?

        Raises:
            TypeError, ValueError: the controller's answer is not one Decision for each knob, or
                what it plans for the next cycle cannot be. This cycle has not ended then.
        """
        losses = [x if x is not None and math.isfinite(x) else None for x in losses]
        rows = {name: _finite_rows(given) for name, given in (measured or {}).items()}
        name, learned_from = next(iter(rows.items()), ("loss", losses))
        left_out = [r for r, row in enumerate(learned_from) if row is None]
        notes, values = self._notes_of_missing(name, left_out), self.values
        planned = self.multipliers()
        table = [
            [value.acting(rho) for rho in row] for value, row in zip(values, planned, strict=True)
        ]
        decisions, evidence = [Decision()] * len(values), None
        if self.controller is not None and self.clock.controls(self.first):
            evidence = Evidence(
                cycle=self.cycle, step=self.step if step is None else step,
                knobs=[value.name for value in values], multipliers=table,
                planned=planned, losses=losses,
                scheduled=[value.scheduled_value() for value in values],
                peak=[value.peaks()[0] for value in values],
                floor=[value.floor() for value in values],
                values=[value.base_value() for value in values],
                corrections=[value.correction for value in values],
                highest=[value.highest_value() for value in values],
                decisions_left=self.clock.decisions_left(self.step, self.interval),
                local=local, measured=rows, sync_interval=self.interval,
                warmup_steps=self.clock.warmup_steps, total_steps=self.clock.total_steps,
            )  # fmt: skip
            if self.is_searching:
                self.controller.observe(evidence)
            else:
                decisions = self._decide(self.controller, evidence)
        is_searching = self.is_searching and not is_search_over
        plan = self._ask_plan(is_searching)  # before anything has ended or moved
        if evidence is not None:
            for value, decision in zip(values, decisions, strict=True):
                notes += value.move(decision)
                value.highest = -math.inf
        outcome = self._end(
            plan, multipliers=table, decisions=decisions, left_out=left_out, notes=notes,
            evidence=evidence,
        )  # fmt: skip
        self.is_searching = is_searching
        return outcome

    def _notes_of_missing(self, name: str, left_out: Sequence[int]) -> list[str]:
        """Of those whose numbers the controller would have read; of a loop without losses, once."""
        controller = self.controller
        if controller is None or self.is_searching or not self.clock.controls(self.first):
            return []
        if controller.needs_replicas and not self.explores:
            return []
        if name == "loss" and len(left_out) == self.replicas:
            note = "no finite loss was passed to step() in this cycle: pass step(loss)"
            notes, self._said_no_loss = [] if self._said_no_loss else [note], True
            return notes
        return [f"replica {r} left out: its {name} is missing or not finite" for r in left_out]

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

    def _end(self, next_plan: Plan, **outcome: Any) -> CycleOutcome:
        ended = CycleOutcome(
            cycle=self.cycle, begin=self.first, plan=self.plan,
            observed=self.is_searching, **outcome,
        )  # fmt: skip
        self.cycle, self.position = self.cycle + 1, 0
        self._plan, self._table, self._interval = next_plan, None, None
        return ended

    # -- divergence --------------------------------------------------------------------------------

    def accept(self, level: float | None, left_out: int) -> None:
        """The cycle that ends is not rolled back. ``level``: its median loss, with which the next
        one is compared; ``left_out``: how many replicas were left out of its average."""
        self.level = self.level if level is None else level
        self.rollbacks_in_row = 0
        self.diverged_total += left_out

    def roll_back(self, factor: float) -> CycleOutcome:
        """End a cycle that is rolled back: its rates were too high, and are multiplied by
        ``factor``. Raises as `close`."""
        plan = self._ask_plan(self.is_searching, is_restart=True)
        for value in self.values:
            if value.spec.rate:
                value.lower(factor)
        self.rollbacks += 1
        self.rollbacks_in_row += 1
        return self._end(
            plan, multipliers=self.multipliers(), decisions=[Decision()] * len(self.knobs),
            left_out=list(range(self.replicas)), notes=[], rolled_back=True,
        )  # fmt: skip

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
            "is_searching": self.is_searching,
            "interval": self.interval,
            "seed": self.seed,
            "level": self.level,
            "controller_state": None if controller is None else controller.state_dict(),
        }

    def check_state(self, state: Any) -> dict[str, Any]:
        """The values in it; changes nothing. A run without a controller takes the state of any:
        its corrections stay, and no other values are tried. Raises ValueError for a state that
        does not belong to this run, or is damaged."""
        where, own = "the ensemble's state", self.state_dict()
        for key, saved in read(state, IDENTITY, where).items():
            if saved != own[key] and not (key == "controller" and self.controller is None):
                raise ValueError(
                    f"{where} was saved with {key} {reprlib.repr(saved)}, this run has "
                    f"{own[key]!r}: {REMEDIES[key]}"
                )
        fields = {
            **dict.fromkeys(COUNTS, COUNT),
            **CYCLE_FIELDS,
            "interval": COUNT,
            "seed": number(whole=True),
            "level": optional(number()),
            "controller_state": optional(MAPPING) if self.controller is None else MAPPING,
        }
        values = read(state, fields, where)
        if values["position"] > values["step"]:
            raise ValueError(f"position of {where} is above its step: it is damaged")
        if self.controller is not None:
            self.controller.check_state(values["controller_state"])
        elif any(base is not None for base in state.get("bases", ())):
            raise ValueError(
                f"{where} was saved with controller {reprlib.repr(state['controller'])}, whose "
                "values stand in the place of the schedule: construct it with the same controller, "
                "and freeze_after=1 to move nothing further"
            )
        return values

    @contextmanager
    def taken_over(self, state: Mapping[str, Any]) -> Iterator[None]:
        """Continues from `state_dict`, unless what is done inside raises. The seed of the saved run
        is kept, so that its assignments go on. Raises as `check_state`, and for a plan that cannot
        be; nothing is changed then."""
        values = self.check_state(state)
        is_searching = self._goes_on_searching(values)
        with loaded(self.controller, values["controller_state"]):
            plan = self._ask_plan(is_searching, is_restart=True)
            yield
        for key in (*COUNTS, "seed", "level"):
            setattr(self, key, values[key])
        self.is_searching, self._plan, self._table = is_searching, plan, None
        # One that does not grow is what this run says, also if the saved one had another.
        self._interval = values["interval"] if self.clock.period else None


def _finite_rows(rows: Rows) -> list[Sequence[float] | None]:
    """None in the place of a row with a number that is not finite. A finite sum has finite terms,
    which is the quick way to know."""
    if math.isfinite(sum(sum(row) for row in rows if row is not None)):
        return list(rows)
    return [row if row is not None and all(map(math.isfinite, row)) else None for row in rows]
