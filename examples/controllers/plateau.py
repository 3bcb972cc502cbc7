"""Halves the value when the training loss has stopped falling, as ReduceLROnPlateau does with a
metric; one replica is enough."""

from __future__ import annotations

import hdet


class PlateauHalver(hdet.Controller):
    """A cycle counts as progress if the mean loss of the replicas is below ``1 - least`` times the
    best one; after ``patience`` others in a row every knob is halved."""

    name = "plateau"
    needs_replicas = False
    state_keys = ("best", "waited")

    def __init__(
        self, patience: int = 5, least: float = 0.01, freeze_after: float | None = None
    ) -> None:
        super().__init__(freeze_after)
        self.patience, self.least = patience, least
        self.best, self.waited = 1e30, 0.0

    def decide(self, evidence: hdet.Evidence) -> list[hdet.Decision]:
        known = [loss for loss in evidence.losses if loss is not None]
        if known and sum(known) / len(known) < (1 - self.least) * self.best:
            self.best, self.waited = sum(known) / len(known), 0.0
        else:
            self.waited += 1
        if self.waited < self.patience:
            return [hdet.Decision() for _ in evidence.knobs]
        self.waited = 0.0
        return [hdet.Decision(factor=0.5, note="plateau") for _ in evidence.knobs]
