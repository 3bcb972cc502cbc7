"""The hypergradient: gradients are compared with the displacement since the cycle began, and a `HypergradientRule` decides."""

from __future__ import annotations

from ..core.controller import Controller, RuledController, rule_or_own
from ..core.rules import COSINES, HypergradientRule
from ..measure.gradient_cosines import GradientCosines

__all__ = ["HypergradientController"]


class HypergradientController(RuledController):
    """Compares gradients with the displacement since the cycle began and lets a `HypergradientRule` decide. GREEDY: read that rule first.

    Learning rates only; works with one replica, and with any spread, 0 included. `GradientCosines` says what is measured, and what it costs.

    Args:
        samples: gradients per cycle, >= 2; the error of the slope comes from their scatter.
        rule: turns cosines into decisions; see `HypergradientRule` for its settings.
        freeze_after: see `Controller`; of a rule of your own it is the rule's.
    """

    def __init__(self, samples: int = 8, *, rule: Controller | None = None, freeze_after: float | None = None) -> None:
        super().__init__(rule_or_own(rule, HypergradientRule, freeze_after), {COSINES: GradientCosines(samples)})
        self.name = "hypergradient"
