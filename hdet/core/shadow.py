"""A controller that is asked and told as ever, and not obeyed: what it would have decided is recorded, and nothing is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .controller import Controller, Learning
from .evidence import Evidence, Run
from .plan import Decision, Learned, Moment, Plan

__all__ = ["Shadow"]


class Shadow(Controller):
    """``controller`` measures and decides, cycle by cycle, on a run that is bitwise the one without it.

    What it wants of cycles (their length, no spread, going back) is not done, so what it makes of them is what it would make of this run,
    and not of the one that it would have had. History records carry its slopes and errors, and its moves as notes.
    """

    def __init__(self, controller: Controller) -> None:
        if not isinstance(controller, Controller):
            raise TypeError(f"controller must be a controller, such as hdet.ProbeController(...), got {controller!r}")
        super().__init__()
        self.controller = controller
        self.name = f"shadow of {controller.name}"
        self.measurements = controller.measurements
        self.needs_replicas, self.needs_schedule_mean = controller.needs_replicas, controller.needs_schedule_mean
        self.regresses, self.knob_per_group = controller.regresses, controller.knob_per_group
        self.judges_held_out = True  # it moves nothing, so nothing has to be judged
        self.decisions: Sequence[Decision] = ()
        """By knob, what was decided last; not carried out."""

    @property
    def idle(self) -> bool:
        return self.controller.idle

    def start(self, run: Run) -> None:
        self.controller.start(run)

    def plan(self, now: Moment) -> Plan:
        wanted = self.controller.plan(now)
        kept = {
            name: replace(snapshot, state=False) for name, snapshot in wanted.snapshots.items()
        }  # to be measured from, not to go back to
        return Plan(measure=wanted.measure, snapshots=kept)

    def learn(self, evidence: Evidence) -> Learning:
        learned = self.controller.learn(evidence)
        if not isinstance(learned, Learned):
            learned = yield from learned
        self.decisions = learned.decisions
        return Learned([_as_note(decision) for decision in learned.decisions])

    def observe(self, evidence: Evidence) -> None:
        self.controller.observe(evidence)

    def restart(self, now: Moment) -> None:
        self.controller.restart(now)

    def check_state(self, state: Any, knobs: int | None = None) -> dict[str, Any]:
        return self.controller.check_state(state, knobs)

    def state_dict(self) -> dict[str, Any]:
        return self.controller.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.controller.load_state_dict(state)


def _as_note(decision: Decision) -> Decision:
    moves = [f"times {decision.factor:.4g}"] * (decision.factor != 1) + [f"{x:.4g}" for x in [decision.value] if x is not None]
    note = "; ".join(filter(None, [f"would move the value: {moves[0]}" if moves else "", decision.note]))
    return replace(decision, factor=1.0, value=None, ramp=0, ramp_from=None, note=note)
