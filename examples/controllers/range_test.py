"""The LR range test (Smith 2017): one value a cycle, each from the same weights, twice as high each time, until the loss gets worse."""

from __future__ import annotations

import hdet

START = "start"


class RangeTest(hdet.Controller):
    """Tries multiples 1, 2, 4, ... of ``lowest`` times the user's rate for ``steps`` steps each, goes back after each, and keeps the best."""

    name = "range test"
    needs_replicas = False
    state_keys = ("losses", "done")

    def __init__(self, steps: int = 20, lowest: float = 1 / 64, doublings: int = 12, threshold: float = 2.0) -> None:
        super().__init__()
        self.steps, self.lowest, self.doublings, self.threshold = steps, lowest, doublings, threshold
        self.losses: list[float] = []
        self.done = False

    @property
    def idle(self) -> bool:
        return bool(self.done)

    def start(self, run: hdet.Run) -> None:
        self.knobs, self.replicas = len(run.knobs), run.replicas

    def _tried(self, number: int) -> float:
        return self.lowest * 2.0**number

    def plan(self, now: hdet.Moment) -> hdet.Plan:
        if self.done:
            return hdet.Plan()
        rows = [[self._tried(len(self.losses))] * self.replicas] * self.knobs
        back, kept = hdet.Restore(START), {START: hdet.SnapshotOf()}
        return hdet.Plan(self.steps, multipliers=rows, judged=False, snapshots=kept, end=back)

    def learn(self, evidence: hdet.Evidence) -> hdet.Learned:
        if self.done:
            return hdet.Learned([hdet.Decision() for _ in evidence.knobs])
        known = [loss for loss in evidence.losses if loss is not None]
        loss = sum(known) / len(known) if known else float("inf")
        self.losses.append(min(loss, 1e30))
        self.done = loss > self.threshold * min(self.losses) or len(self.losses) == self.doublings
        best = self._tried(self.losses.index(min(self.losses))) if self.done else 1.0
        note = f"best of {len(self.losses)}: {best:.3g} times the user's rate" if self.done else ""
        return hdet.Learned([hdet.Decision(factor=best, note=note) for _ in evidence.knobs])

    def restart(self, now: hdet.Moment) -> None:
        """A test under way begins again: the weights that it compares from are other ones."""
        if not self.done:
            self.losses = []
