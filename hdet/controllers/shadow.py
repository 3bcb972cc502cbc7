"""A controller that only looks on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..core.controller import Controller
from ..core.evidence import Evidence, KnobSpec, Run
from ..core.plan import Decision, Plan

__all__ = ["Shadow"]


class Shadow(Controller):
    """``controller`` measures and decides, cycle by cycle, and nothing is moved. History records
    have its slopes and errors, and its moves as notes. Of an `AutoLR`: ``report_only=True``.

    Example::

        controller = hdet.Shadow(hdet.SoftmaxController(decay=None))
        ensemble = hdet.Ensemble(optimizer, scheduler, controller=controller)
    """

    def __init__(self, controller: Controller) -> None:
        super().__init__()
        self.controller, self.name = controller, f"shadow of {controller.name}"
        self.parts = {"controller": controller}
        self.measurements = controller.measurements
        self.needs_replicas, self.regresses = controller.needs_replicas, controller.regresses
        self.decisions: Sequence[Decision] = ()
        """[knob]: what was decided last; not carried out."""

    def start(self, run: Run) -> None:
        super().start(replace(run, searches=False))  # it cannot disturb a search

    @property
    def idle(self) -> bool:
        return self.controller.idle

    def report(self) -> str:
        report = self.controller.report()
        return f"{report} (reported only: nothing is moved)" if report else ""

    def may_move(self, knob: KnobSpec) -> bool:
        return True  # it moves nothing

    def plan(self) -> Plan:
        plan = self.controller.plan()
        return Plan(measures=plan.measures) if isinstance(plan, Plan) else plan

    def learn(self, evidence: Evidence) -> list[Decision]:
        self.decisions = self.controller.learn(evidence)
        return [_as_note(decision) for decision in self.decisions]


def _as_note(decision: Decision) -> Decision:
    move = "" if decision.value is None else f"{decision.value:.4g}"
    if decision.factor != 1:
        move = f"times {decision.factor:.4g}"
    notes = [f"would move the value: {move}" if move else "", decision.note]
    return replace(decision, factor=1.0, value=None, note="; ".join(filter(None, notes)))
