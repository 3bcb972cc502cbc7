"""Controllers made of others: two in a row, as torch has SequentialLR; and one that only looks
on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.controller import Controller
from ..core.evidence import Evidence, Run
from ..core.plan import Decision, Plan
from ..core.schema import FLAG, Instance, read, unchanged_on_error

__all__ = ["SequentialController", "Shadow"]


class SequentialController(Controller):
    """``first`` decides until it is `finished`; from the next cycle on ``then`` does, which
    `observe`s meanwhile. A checkpoint holds the state of both.

    Args:
        first, then: controllers; their measurements must have different names, and ``then`` must
            follow the schedule (`Controller.leaves_schedule`).

    Raises:
        TypeError, ValueError: one of them cannot be used so.

    Example::

        controller = hdet.SequentialController(hdet.AutoLR(model), probe)
    """

    def __init__(self, first: Controller, then: Controller) -> None:
        _check_controller("first", first)
        _check_controller("then", then)
        both = sorted(first.measurements.keys() & then.measurements.keys())
        if both:
            raise ValueError(
                f"both controllers have a measurement {both[0]!r}: give one of them another name"
            )
        if then.leaves_schedule:
            raise ValueError(
                f"the controller {then.name!r} decays from where it takes over, in the place of a "
                "schedule whose peak may be still to come: pass decay=None"
            )
        if then.search is not None:
            raise ValueError(
                "an AutoLR searches in the first steps of a run: pass it as the first controller"
            )
        super().__init__()
        self.first, self.then, self.name = first, then, f"{first.name}, then {then.name}"
        self.measurements = {**first.measurements, **then.measurements}
        self.needs_replicas = first.needs_replicas or then.needs_replicas
        self.regresses = first.regresses or then.regresses
        self.judges_held_out = first.judges_held_out and then.judges_held_out
        self.knob_per_group = first.knob_per_group and then.knob_per_group
        self.leaves_schedule, self.search = first.leaves_schedule, first.search
        self.handed_over = False
        """Does ``then`` decide from now on?"""

    @property
    def active(self) -> Controller:
        """The one that decides."""
        return self.then if self.handed_over else self.first

    @property
    def idle(self) -> bool:
        return self.active.idle and self.then.idle

    def report(self) -> str:
        return "; then: ".join(filter(None, (self.first.report(), self.then.report())))

    def start(self, run: Run) -> None:
        self.first.start(run)
        self.then.start(run)

    def plan(self) -> Plan:
        return self.active.plan()

    def learn(self, evidence: Evidence) -> list[Decision]:
        if self.handed_over:
            return self.then.learn(evidence)
        self.then.observe(evidence)
        decisions = self.first.learn(evidence)
        self.handed_over = self.first.finished
        return decisions

    def observe(self, evidence: Evidence) -> None:
        self.first.observe(evidence)
        self.then.observe(evidence)

    def restart(self) -> None:
        self.first.restart()
        self.then.restart()

    def state_dict(self) -> dict[str, Any]:
        return {
            "first": self.first.state_dict(),
            "then": self.then.state_dict(),
            "handed_over": self.handed_over,
        }

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
                raise ValueError(
                    f"the state of {self.name!r} has handed over before the first was finished: "
                    "it is damaged"
                )
        self.handed_over = values["handed_over"]


class Shadow(Controller):
    """``controller`` measures and decides, cycle by cycle, on a run that is bitwise the one without
    it. History records have its slopes and errors, and its moves as notes.

    Example::

        ensemble = hdet.Ensemble(optimizer, scheduler, controller=hdet.Shadow(probe))
    """

    judges_held_out = True  # it moves nothing, so nothing has to be judged

    def __init__(self, controller: Controller) -> None:
        _check_controller("controller", controller)
        super().__init__()
        self.controller, self.name = controller, f"shadow of {controller.name}"
        self.measurements, self.search = controller.measurements, controller.search
        self.needs_replicas, self.regresses = controller.needs_replicas, controller.regresses
        self.knob_per_group = controller.knob_per_group
        if self.search is not None:
            self.search.obeyed = False
        self.decisions: Sequence[Decision] = ()
        """[knob]: what was decided last; not carried out."""

    @property
    def idle(self) -> bool:
        return self.controller.idle

    def report(self) -> str:
        report = self.controller.report()
        return f"{report} (reported only: nothing is moved)" if report else ""

    def start(self, run: Run) -> None:
        self.controller.start(run)

    def plan(self) -> Plan:
        # A run that would have had an AutoLR is not one of replicas that differ.
        plan = self.controller.plan()
        return replace(plan, spread=plan.spread or self.search is None)

    def learn(self, evidence: Evidence) -> list[Decision]:
        self.decisions = self.controller.learn(evidence)
        return [_as_note(decision) for decision in self.decisions]

    def observe(self, evidence: Evidence) -> None:
        self.controller.observe(evidence)

    def restart(self) -> None:
        self.controller.restart()

    def state_dict(self) -> dict[str, Any]:
        return self.controller.state_dict()

    def check_state(self, state: Any, knobs: int | None = None) -> dict[str, Any]:
        return self.controller.check_state(state, knobs)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.controller.load_state_dict(state)


def _as_note(decision: Decision) -> Decision:
    move = f"times {decision.factor:.4g}" if decision.factor != 1 else ""
    if decision.value is not None and not move:
        move = f"{decision.value:.4g}"
    notes = [f"would move the value: {move}" if move else "", decision.note]
    return replace(decision, factor=1.0, value=None, note="; ".join(filter(None, notes)))


def _check_controller(name: str, controller: object) -> None:
    if not isinstance(controller, Controller):
        raise TypeError(
            f"{name} must be a controller, such as hdet.ProbeController(...), got {controller!r}"
        )
