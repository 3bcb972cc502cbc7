"""The paper's controller: replicas with a lower training loss pull the base value towards their own
(Eq. 4 to 7)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.controller import Controller
from ..core.evidence import Evidence, Run
from ..core.plan import Decision
from ..core.schema import Check, list_of, number
from ..core.validate import within

__all__ = [
    "SoftmaxController", "gamma_floor", "momentum_update", "signal", "softmax_weights",
]  # fmt: skip


def softmax_weights(losses: Sequence[float], temperature: float) -> list[float]:
    """Eq. 4: s_r = (mean(L) - L_r) / sigma, w = softmax(s). ``losses`` finite; ``temperature``
    (sigma) in the loss's unit."""
    mean = math.fsum(losses) / len(losses)
    scores = [(mean - loss) / temperature for loss in losses]
    highest = max(scores)
    raised = [math.exp(score - highest) for score in scores]
    total = math.fsum(raised)
    return [x / total for x in raised]


def signal(weights: Sequence[float], rates: Sequence[float]) -> float:
    """Eq. 5: Delta = sum_r w_r eta_r - mean_r eta_r, in the unit of ``rates``."""
    weighted = math.fsum(w * eta for w, eta in zip(weights, rates, strict=True))
    return weighted - math.fsum(rates) / len(rates)


def momentum_update(
    velocity: float, delta: float, base: float,
    *, momentum: float, step_size: float, gamma: float = 0.0,
) -> tuple[float, float]:  # fmt: skip
    """Eq. 6: v <- beta v + (1 - beta) Delta; base <- base (1 - gamma) + lambda v. Returns (v,
    base)."""
    velocity = momentum * velocity + (1 - momentum) * delta
    return velocity, base * (1 - gamma) + step_size * velocity


def gamma_floor(base: float, floor: float, intervals: float) -> float:
    """Eq. 7, corrected: gamma = 1 - (min_lr / base_at_warm)^(1/K), so that K neutral intervals end
    at the schedule's floor."""
    return 1 - (floor / base) ** (1 / intervals)


class SoftmaxController(Controller):
    """Eq. 4 to 7, with sigma, lambda, beta and the decay explicit.

    Args:
        temperature: sigma of Eq. 4, in the loss's unit. Not scale-free: at 0.1 nats differences of
            0.001 hardly move anything.
        step_size: lambda of Eq. 6.
        momentum: beta of Eq. 6, in [0, 1).
        decay: ``None`` - corrections multiply the schedule, which keeps its shape; Eq. 6 runs on
            relative values in log space. ``"floor"`` - the published behaviour with the corrected
            gamma: after the warm-up the schedule is left and the base value decays to the
            schedule's floor.
        freeze_after: see `Controller`. A decay goes on after it, because it stands for the
            schedule; losses move nothing.

    A base value is held within [floor of the schedule, 1000 times its value after the warm-up].
    Replicas without a finite loss are left out of the weights and of the mean; with fewer than two
    left nothing moves. With several knobs each uses its own multipliers and the common weights, as
    published.

    Raises:
        ValueError: a setting out of its range.

    Example::

        controller = hdet.SoftmaxController(decay=None)
        ensemble = hdet.Ensemble(optimizer, scheduler, controller=controller)
    """

    state_keys: Mapping[str, Check] = {
        "velocities": list_of(number()),
        "gammas": list_of(number()),
        "ceilings": list_of(number(1e-100)),
    }

    def __init__(
        self,
        temperature: float = 0.1,
        step_size: float = 0.5,
        momentum: float = 0.9,
        decay: str | None = "floor",
        *,
        freeze_after: float | None = None,
    ) -> None:
        super().__init__(freeze_after)
        within(temperature, "temperature", "(0, inf)")
        within(step_size, "step_size", "[0, 100]")
        within(momentum, "momentum", "[0, 1)")
        if decay not in (None, "floor"):
            raise ValueError(f"decay must be None or 'floor', got {decay!r}")
        self.temperature, self.step_size, self.momentum = temperature, step_size, momentum
        self.decay = decay
        self.velocities: list[float] = []
        """[knob], once there was a decision."""
        self.gammas: list[float] = []
        """[knob], once the schedule was left."""
        self.ceilings: list[float] = []
        """[knob]: the highest base value that a decay may lead to."""

    def start(self, run: Run) -> None:
        """Raises ValueError for a decay without the length of the run, towards a floor that the
        schedule does not have, of a knob that is no rate, or after a search."""
        super().start(run)
        if self.decay is None:
            return
        if run.searches:
            raise ValueError(
                f"the controller {self.name!r} decays from where it takes over, in the place of a "
                "schedule whose peak may be still to come after a search: pass decay=None"
            )
        if run.total_steps is None:
            raise ValueError(
                "decay='floor' needs the length of the run: pass total_steps, or a "
                "scheduler that has it, or decay=None"
            )
        if min(run.floor) <= 0:
            raise ValueError(
                "decay='floor' needs a schedule with a lowest value above zero (OneCycleLR's "
                "min_lr): use decay=None with this scheduler"
            )
        if other := [knob.name for knob in run.knobs if not knob.rate]:
            raise ValueError(
                "SoftmaxController's decay='floor' takes the place of a rate's schedule "
                f"and means nothing for the knob {other[0]!r}: pass decay=None"
            )

    def check_state(self, state: Any) -> dict[str, Any]:
        values = self.check_columns(super().check_state(state), "gammas", "ceilings")
        return self.check_columns(values, "velocities")

    def decide(self, evidence: Evidence) -> list[Decision]:
        knobs = len(evidence.knobs)
        if self.decay is not None and not len(self.gammas) == len(self.ceilings) == knobs:
            if min(evidence.values) <= 0:  # a schedule that begins or ends at zero
                note = "the scheduled value is not positive: no decision"
                return [Decision(note=note) for _ in evidence.knobs]
            self._leave_schedule(evidence)
        if len(self.velocities) != knobs:
            self.velocities = [0.0] * knobs
        present = {r: loss for r, loss in enumerate(evidence.losses) if loss is not None}
        # With fewer than two nothing moves, but the decay goes on: it is a clock.
        note = "" if len(present) >= 2 else "fewer than two usable losses"
        weights = softmax_weights(list(present.values()), self.temperature) if present else []
        decisions = []
        for k, row in enumerate(evidence.multipliers):
            relative = signal(weights, [row[r] for r in present]) if weights else 0.0
            decisions.append(self._decide(k, relative, evidence, note))
        return decisions

    def hold(self, evidence: Evidence) -> list[Decision]:
        self.velocities = []
        nothing = replace(evidence, losses=[None] * len(evidence.losses))
        return [replace(decision, note="") for decision in self.decide(nothing)]

    def _leave_schedule(self, evidence: Evidence) -> None:
        """Fix gamma at the end of the warm-up, from the values then in use."""
        intervals = evidence.decisions_left or 1
        self.ceilings = [1000 * value for value in evidence.values]
        self.gammas = [
            gamma_floor(base, min(floor, base), intervals)
            for base, floor in zip(evidence.values, evidence.floor, strict=True)
        ]

    def _decide(self, k: int, relative: float, evidence: Evidence, note: str) -> Decision:
        """``relative``: Eq. 5, of multipliers in the place of rates."""
        step = {"momentum": self.momentum, "step_size": self.step_size}
        velocity = self.velocities[k]
        if self.decay is None:
            # Relative values keep a stale velocity harmless while the schedule falls; exp keeps
            # the value positive.
            self.velocities[k], moved = momentum_update(velocity, relative, 1.0, **step)
            return Decision(factor=math.exp(min(max(moved - 1.0, -700.0), 700.0)), note=note)
        # What is in use, and not what was decided: a cycle that was rolled back has lowered it.
        before = evidence.values[k]
        self.velocities[k], base = momentum_update(
            velocity, before * relative, before, gamma=self.gammas[k], **step
        )
        return Decision(value=min(max(base, evidence.floor[k]), self.ceilings[k]), note=note)
