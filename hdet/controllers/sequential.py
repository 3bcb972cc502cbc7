"""Controllers made of others: two in a row, as torch has SequentialLR; and one that only looks
on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..core.controller import Controller
from ..core.evidence import Evidence
from ..core.plan import Decision, Plan
from ..core.schema import FLAG, Check

__all__ = ["SequentialController", "Shadow"]


class SequentialController(Controller):
    """``first`` decides until it is `idle`; from the next cycle on ``then`` does, which `observe`s
    meanwhile. A checkpoint holds the state of both.

    Args:
        first, then: controllers; their measurements must have different names, and ``then`` must
            follow the schedule (`Controller.leaves_schedule`).

    Raises:
        ValueError: one of them cannot be used so.

    Example::

        probe = hdet.ProbeController(loss_fn, held_out_batches, model=model)
        controller = hdet.SequentialController(hdet.AutoLR(model), probe)
    """

    state_keys: Mapping[str, Check] = {"handed_over": FLAG}

    def __init__(self, first: Controller, then: Controller) -> None:
        if both := sorted(first.measurements.keys() & then.measurements.keys()):
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
        self.parts = {"first": first, "then": then}
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

    def plan(self) -> Plan:
        return self.active.plan()

    def learn(self, evidence: Evidence) -> list[Decision]:
        if self.handed_over:
            return self.then.learn(evidence)
        self.then.observe(evidence)
        decisions = self.first.learn(evidence)
        self.handed_over = self.first.idle
        return decisions


class Shadow(Controller):
    """``controller`` measures and decides, cycle by cycle, on a run that is bitwise the one without
    it. History records have its slopes and errors, and its moves as notes.

    Example::

        controller = hdet.Shadow(hdet.AutoLR(model))
        ensemble = hdet.Ensemble(optimizer, scheduler, controller=controller)
    """

    judges_held_out = True  # it moves nothing, so nothing has to be judged

    def __init__(self, controller: Controller) -> None:
        super().__init__()
        self.controller, self.name = controller, f"shadow of {controller.name}"
        self.parts = {"controller": controller}
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

    def plan(self) -> Plan:
        # A run that would have had an AutoLR is not one of replicas that differ.
        plan = self.controller.plan()
        return replace(plan, spread=plan.spread or self.search is None)

    def learn(self, evidence: Evidence) -> list[Decision]:
        self.decisions = self.controller.learn(evidence)
        return [_as_note(decision) for decision in self.decisions]


def _as_note(decision: Decision) -> Decision:
    move = "" if decision.value is None else f"{decision.value:.4g}"
    if decision.factor != 1:
        move = f"times {decision.factor:.4g}"
    notes = [f"would move the value: {move}" if move else "", decision.note]
    return replace(decision, factor=1.0, value=None, note="; ".join(filter(None, notes)))
