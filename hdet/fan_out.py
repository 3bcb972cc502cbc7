"""Fan-out on a real optimizer: the multiplier exists inside optimizer.step() and nowhere else (Eq. 2)."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch.optim import Optimizer

from .checks import check_dense_gradients
from .knobs import GroupKnob

__all__ = ["FanOut"]


class FanOut:
    """Wraps ``optimizer.step`` of one instance.

    A step pre-hook and post-hook would not do: torch skips post-hooks when a step raises, and the multiplied value would
    stay behind. An optimizer with a ``multipliers`` list, [replica][group] (hdet's fused ones), takes the multipliers through it instead.

    ``moved`` tells whether a step has been done since the last average.
    ``stepped`` tells whether one has been done since `take_stepped`: the scheduler counts, not this wrapper, so that a
    phantom step of a checkpoint library or several calls per training step count once.

    ``first_replica``: number of the (first) replica that the optimizer steps, by which a fused one draws random numbers.
    """

    def __init__(self, optimizer: Optimizer, knobs: Sequence[GroupKnob], first_replica: int = 0) -> None:
        if getattr(optimizer, "_hdet_fan_out", None) is not None:
            raise ValueError("this optimizer is already driven by an Ensemble or OneCycleAutoLR: use one, or close() the other first")
        self.optimizer, self.knobs = optimizer, knobs
        self.multipliers: list[list[float]] = [[1.0] * len(knobs)]  # [replica][knob]
        self._unchecked = True
        self.active = True
        self.stepped = False
        self.moved = True  # since the last average; unknown at the beginning
        self.fused = isinstance(getattr(optimizer, "multipliers", None), list)
        if self.fused:
            optimizer.first_replica = first_replica  # type: ignore[attr-defined]
        self._wrap()
        optimizer._hdet_fan_out = self  # type: ignore[attr-defined]

    def _wrap(self) -> None:
        inner: Callable[..., Any] = self.optimizer.step

        @functools.wraps(inner)
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return inner(*args, **kwargs)
            if self._unchecked:
                check_dense_gradients(self.optimizer)
                self._unchecked = False
            with ExitStack() as stack:
                self.moved = True
                if not self.fused:
                    for knob, multiplier in zip(self.knobs, self.multipliers[0], strict=True):
                        stack.enter_context(knob.fanned_out(multiplier))
                result = inner(*args, **kwargs)
            self.stepped = True
            return result

        # A bound method, because torch's schedulers take step.__func__ when they wrap it in turn.
        self.optimizer.step = types.MethodType(step, self.optimizer)  # type: ignore[method-assign]
        self.optimizer.add_param_group = _refuse_group  # type: ignore[method-assign]

    def assign(self, *replicas: Sequence[float]) -> None:
        """rho for the cycle that begins, one per knob, of each replica that this optimizer steps (a stock one has one)."""
        self.multipliers = [list(multipliers) for multipliers in replicas]
        self._unchecked = True  # gradients are looked at once a cycle: each step would cost too much
        if self.fused:
            self.optimizer.multipliers[:] = [self._by_group(multipliers) for multipliers in replicas]  # type: ignore[attr-defined]

    def _by_group(self, multipliers: Sequence[float]) -> list[float]:
        row = [1.0] * len(self.optimizer.param_groups)
        for knob, multiplier in zip(self.knobs, multipliers, strict=True):
            for index in knob.indices:
                row[index] = float(multiplier)
        return row

    def take_stepped(self) -> bool:
        stepped, self.stepped = self.stepped, False
        return stepped

    def close(self) -> None:
        """Multipliers are 1 from now on; the wrapper stays in the call chain but does nothing."""
        self.assign(*[[1.0] * len(self.knobs)] * len(self.multipliers))
        self.active = False
        self.optimizer.__dict__.pop("add_param_group", None)
        self.optimizer._hdet_fan_out = None  # type: ignore[attr-defined]


def _refuse_group(param_group: dict[str, Any]) -> None:
    """What is averaged and explored is settled when an Ensemble is made: replicas would part for good in a group added later."""
    raise ValueError(
        "add_param_group: this optimizer is driven by an Ensemble, which would not average the new group: add all groups before, "
        "or converge(), close() the Ensemble and make a new one"
    )
