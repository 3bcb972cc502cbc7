"""A controller that is asked and told as ever, and not obeyed: what it would have decided is recorded, and nothing is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .controller import Controller, Learning, RuledController, learning_of
from .evidence import Evidence
from .plan import Decision, Learned, Moment, Plan

__all__ = ["Shadow"]


class Shadow(RuledController):
    """``controller`` measures and decides, cycle by cycle, on a run that is bitwise the one without it.

    What it wants of cycles (their length, no spread, going back) is not done. So it learns from this run, and not from the one that it
    would have had. History records carry its slopes and errors, and its moves as notes.
    """

    def __init__(self, controller: Controller) -> None:
        if not isinstance(controller, Controller):
            raise TypeError(f"controller must be a controller, such as hdet.ProbeController(...), got {controller!r}")
        super().__init__(controller, controller.measurements)
        self.name, self.knob_per_group = f"shadow of {controller.name}", controller.knob_per_group
        self.leaves_schedule = False
        self.judges_held_out = True  # it moves nothing, so nothing has to be judged
        self.decisions: Sequence[Decision] = ()
        """By knob, what was decided last; not carried out."""

    @property
    def finished(self) -> bool:
        return self.idle

    def plan(self, now: Moment) -> Plan:
        wanted = super().plan(now)
        return Plan(measure=wanted.measure, snapshots=wanted.snapshots)  # to measure with, not to go back to

    def learn(self, evidence: Evidence) -> Learning:
        learned = yield from learning_of(self.rule, evidence)
        self.decisions = learned.decisions
        return Learned([_as_note(decision) for decision in learned.decisions])


def _as_note(decision: Decision) -> Decision:
    moves = [f"times {decision.factor:.4g}"] * (decision.factor != 1) + [f"{x:.4g}" for x in [decision.value] if x is not None]
    note = "; ".join(filter(None, [f"would move the value: {moves[0]}" if moves else "", decision.note]))
    return replace(decision, factor=1.0, value=None, ramp=0, note=note)
