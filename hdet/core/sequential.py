"""Controllers made of others, of which they know nothing: two in a row, as torch has SequentialLR; and one that is asked and not obeyed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .controller import Controller, Learning, RuledController, learning_of
from .evidence import Evidence, Run
from .plan import Decision, Learned, Moment, Plan
from .schema import FLAG, Instance, read, unchanged_on_error

__all__ = ["SequentialController", "Shadow"]


class SequentialController(Controller):
    """``first`` decides until it is `finished`; from the next cycle on ``then`` does. Meanwhile the second `observe`s.

    Args:
        first, then: controllers; their measurements must have different names, and ``then`` must follow the schedule
            (`Controller.leaves_schedule`). A checkpoint holds the state of both.
    """

    def __init__(self, first: Controller, then: Controller) -> None:
        _check("first", first)
        _check("then", then)
        both = sorted(first.measurements.keys() & then.measurements.keys())
        if both:
            raise ValueError(f"both controllers have a measurement {both[0]!r}: give one of them another name")
        if then.leaves_schedule:
            raise ValueError(
                f"the controller {then.name!r} decays from where it takes over, in the place of a schedule whose peak may be still to come: pass "
                "decay=None"
            )
        if then.search is not None:
            raise ValueError("an AutoLR searches in the first steps of a run: pass it as the first controller")
        super().__init__()
        self.first, self.then, self.name = first, then, f"{first.name}, then {then.name}"
        self.measurements = {**first.measurements, **then.measurements}
        self.needs_replicas = first.needs_replicas or then.needs_replicas
        self.plans_lengths = first.plans_lengths and then.plans_lengths
        self.regresses = first.regresses or then.regresses
        self.judges_held_out = first.judges_held_out and then.judges_held_out
        self.knob_per_group = first.knob_per_group and then.knob_per_group
        self.leaves_schedule = first.leaves_schedule  # the second does not
        self.search = first.search
        self.handed_over = False
        """Does ``then`` decide from now on?"""

    @property
    def active(self) -> Controller:
        """The one that decides."""
        return self.then if self.handed_over else self.first

    def report(self) -> str:
        return "; then: ".join(filter(None, (self.first.report(), self.then.report())))

    @property
    def idle(self) -> bool:
        return self.active.idle and self.then.idle

    def start(self, run: Run) -> None:
        self.first.start(run)
        self.then.start(run)

    def plan(self, now: Moment) -> Plan:
        return self.active.plan(now)

    def learn(self, evidence: Evidence) -> Learning:
        if self.handed_over:
            return (yield from learning_of(self.then, evidence))
        self.then.observe(evidence)
        learned = yield from learning_of(self.first, evidence)
        self.handed_over = self.first.finished
        return learned

    def observe(self, evidence: Evidence) -> None:
        self.first.observe(evidence)
        self.then.observe(evidence)

    def restart(self, now: Moment) -> None:
        self.first.restart(now)
        self.then.restart(now)

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first.state_dict(), "then": self.then.state_dict(), "handed_over": self.handed_over}

    def check_state(self, state: Any, knobs: int | None = None) -> dict[str, Any]:
        kinds = {"first": Instance(Mapping), "then": Instance(Mapping), "handed_over": FLAG}
        values = read(state, kinds, f"{type(self).__name__}'s", knobs)
        self.first.check_state(values["first"], knobs)
        self.then.check_state(values["then"], knobs)
        return values

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        values = self.check_state(state)
        with unchanged_on_error(self.first), unchanged_on_error(self.then):
            self.first.load_state_dict(values["first"])
            self.then.load_state_dict(values["then"])
            if values["handed_over"] and not self.first.finished:
                raise ValueError(f"the state of {self.name!r} has handed over before the first was finished: it is damaged")
        self.handed_over = values["handed_over"]


class Shadow(RuledController):
    """``controller`` measures and decides, cycle by cycle, on a run that is bitwise the one without it.

    What it wants of cycles (their length, no spread, going back) is not done. So it learns from this run, and not from the one that it
    would have had. History records carry its slopes and errors, and its moves as notes.
    """

    def __init__(self, controller: Controller) -> None:
        _check("controller", controller)
        super().__init__(controller, controller.measurements)
        self.name, self.knob_per_group = f"shadow of {controller.name}", controller.knob_per_group
        self.leaves_schedule, self.plans_lengths = False, controller.search is not None
        self.judges_held_out = True  # it moves nothing, so nothing has to be judged
        self.search = controller.search
        if self.search is not None:
            self.search.obeyed = False
        self.decisions: Sequence[Decision] = ()
        """By knob, what was decided last; not carried out."""

    @property
    def finished(self) -> bool:
        return self.idle

    def report(self) -> str:
        said = super().report()
        return f"{said} (told only: nothing is moved)" if said else ""

    def plan(self, now: Moment) -> Plan:
        wanted = super().plan(now)
        # Snapshots are to measure with, not to go back to. A run that would have had an AutoLR is not one of replicas that differ.
        return Plan(measure=wanted.measure, snapshots=wanted.snapshots, spread=wanted.spread or self.search is None)

    def learn(self, evidence: Evidence) -> Learning:
        learned = yield from learning_of(self.rule, evidence)
        self.decisions = learned.decisions
        return Learned([_as_note(decision) for decision in learned.decisions])


def _as_note(decision: Decision) -> Decision:
    moves = [f"times {decision.factor:.4g}"] * (decision.factor != 1) + [f"{x:.4g}" for x in [decision.value] if x is not None]
    note = "; ".join(filter(None, [f"would move the value: {moves[0]}" if moves else "", decision.note]))
    return replace(decision, factor=1.0, value=None, ramp=0, note=note)


def _check(name: str, controller: object) -> None:
    if not isinstance(controller, Controller):
        raise TypeError(f"{name} must be a controller, such as hdet.ProbeController(...), got {controller!r}")
