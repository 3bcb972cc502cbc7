"""The user's scheduler and what it schedules: untouched values on one side, corrected base values at rest on the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from .core.controllers.protocol import require_keys
from .core.engine import Engine
from .forecast import highest_factors, means
from .knobs import Bound, GroupKnob

__all__ = ["Schedule", "Scheduler", "plain"]


class Scheduler(Protocol):
    """What an Ensemble asks of a scheduler: any of torch's. One that wraps torch's may have ``torch_alone()``: a scheduler of torch's, of the
    same run and optimizer, that can be copied and run ahead (`forecast.means`)."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Schedule:
    """A scheduler, or constant values, and the knobs of a run; only those of parameter groups does it move."""

    def __init__(self, scheduler: Scheduler | None, knobs: Sequence[Bound], total_steps: int | None) -> None:
        self.scheduler, self.knobs = scheduler, list(knobs)
        self.total_steps: int | None = getattr(scheduler, "total_steps", None) if total_steps is None else total_steps
        self._highest = highest_factors(scheduler, self.total_steps)

    @property
    def step(self) -> int | None:
        """Steps of the schedule done; None where nobody counts them."""
        return getattr(self.scheduler, "last_epoch", None)

    @property
    def is_over(self) -> bool:
        """Where a scheduler is stepped more often than the optimizer (several times a step, or in a step of rate 0), its end is the run's."""
        total = getattr(self.scheduler, "total_steps", self.total_steps)
        return total is not None and self.step == total

    def advance(self) -> None:
        """One step. The scheduler sees its own values, as it left them, and never a correction."""
        for knob in self.knobs:
            knob.show_schedule()
        if self.scheduler is not None:
            self.scheduler.step()
        for knob in self.knobs:
            knob.take_schedule()

    def write(self, engine: Engine) -> None:
        """Leave the corrected base values in their places. Rates come first: a product's decay follows its rate's correction."""
        for k, knob in enumerate(self.knobs):
            knob.write(engine.in_force(k), engine.held[k])

    def values(self) -> list[float]:
        """[knob]: the untouched schedule's value now."""
        return [knob.scheduled_value() for knob in self.knobs]

    def base_values(self) -> list[float]:
        """[knob]: the base value in force, as `write` has left it."""
        return [knob.base_value() for knob in self.knobs]

    def peaks_and_floors(self) -> tuple[list[float], list[float]]:
        """Highest and lowest values of the untouched schedule, by knob."""
        pairs = [knob.peak_and_floor() for knob in self.knobs]
        return [peak * self._highest_of(knob) for (peak, _), knob in zip(pairs, self.knobs, strict=True)], [floor for _, floor in pairs]

    def means(self) -> list[float]:
        """[knob]: the mean of the untouched schedule from now to the end of the run; its peak where that cannot be told."""
        ahead = means(self.scheduler, self.total_steps)
        return [
            ahead[knob.indices[0]] if ahead and isinstance(knob, GroupKnob) and knob.key == "lr" else peak
            for knob, peak in zip(self.knobs, self.peaks_and_floors()[0], strict=True)
        ]

    def _highest_of(self, knob: Bound) -> float:
        return self._highest[knob.indices[0]] if self._highest and isinstance(knob, GroupKnob) and knob.key == "lr" else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "scheduled": {knob.name: [float(x) for x in knob.scheduled] for knob in self.knobs},
            "scheduler": None if self.scheduler is None else plain(self.scheduler.state_dict()),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for a state of another run, or a damaged one."""
        _scheduled(state, self.knobs, self.scheduler)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of a state that `check_state` has let pass."""
        scheduled = _scheduled(state, self.knobs, self.scheduler)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        for knob in self.knobs:
            knob.scheduled = scheduled[knob.name]


def _scheduled(state: Mapping[str, Any], knobs: Sequence[Bound], scheduler: Any) -> dict[str, list[float]]:
    """The schedule's own values by knob, out of an ensemble's state. Raises ValueError for a state of another run, or a damaged one."""
    require_keys(state, ("scheduled", "scheduler"), "ensemble's")
    if (state["scheduler"] is None) != (scheduler is None):
        raise ValueError("the ensemble's state and this run differ in having a scheduler: construct it as the saved run did")
    if scheduler is not None and not isinstance(state["scheduler"], Mapping):
        raise ValueError(
            f"the ensemble's state has a {type(state['scheduler']).__name__} where the scheduler's state should be: it is damaged"
        )
    total = (state["scheduler"] or {}).get("total_steps")
    if total is not None and total != getattr(scheduler, "total_steps", total):
        raise ValueError(
            f"the saved run has total_steps {total!r}, this one {getattr(scheduler, 'total_steps', None)!r}: build the scheduler as the saved run did"
        )
    try:
        scheduled = {knob.name: [float(x) for x in state["scheduled"][knob.name]] for knob in knobs}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the ensemble's state has unusable scheduled values ({error}): it is damaged") from error
    for knob in knobs:
        if len(scheduled[knob.name]) != len(knob.cells):
            raise ValueError(
                f"the ensemble's state has {len(scheduled[knob.name])} scheduled values for {knob.name!r}, this run {len(knob.cells)} groups"
            )
    return scheduled


def plain(value: Any) -> Any:
    """Tensors as numbers, so that a state loads with weights_only and holds no device."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
