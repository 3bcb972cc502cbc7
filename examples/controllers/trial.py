"""A trial of candidates: one a replica, or one after the other with a single replica; all from the same weights, to which the run goes back."""

from __future__ import annotations

import hdet

START = "start"


class Trial(hdet.Controller):
    """Trains ``steps`` steps at each of ``candidates``, multiples of the user's value, then goes on from the beginning at the best one."""

    name = "trial"
    needs_replicas = False
    state_keys = ("losses",)

    def __init__(self, candidates: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0), steps: int = 40) -> None:
        super().__init__()
        self.candidates, self.steps = candidates, steps
        self.losses: list[float] = []

    @property
    def idle(self) -> bool:
        return len(self.losses) >= len(self.candidates)

    def start(self, run: hdet.Run) -> None:
        self.knobs, self.replicas = len(run.knobs), run.replicas

    def restart(self, now: hdet.Moment) -> None:
        """A trial under way begins again: what was measured began at other weights."""
        self.losses = self.losses if self.idle else []

    def _now(self) -> list[float]:
        """The candidate of each replica: the next ones, from the first again where there are more replicas than are left."""
        left = self.candidates[len(self.losses) :]
        return [left[r % len(left)] for r in range(self.replicas)]

    def plan(self, now: hdet.Moment) -> hdet.Plan:
        if self.idle:
            return hdet.Plan(spread=False)
        rows = [self._now()] * self.knobs
        back = hdet.Restore(START)
        return hdet.Plan(self.steps, multipliers=rows, judged=False, snapshots={START: hdet.SnapshotOf()}, end=back)

    def learn(self, evidence: hdet.Evidence) -> hdet.Learned:
        if self.idle:
            return hdet.Learned([hdet.Decision() for _ in evidence.knobs])
        new = min(self.replicas, len(self.candidates) - len(self.losses))
        self.losses += [1e30 if loss is None else loss for loss in evidence.losses[:new]]
        factor = self.candidates[self.losses.index(min(self.losses))] if self.idle else 1.0
        return hdet.Learned([hdet.Decision(factor=factor, note=f"candidate {factor:g}" if self.idle else "") for _ in evidence.knobs])
