"""Scales: what a correction and a multiplier do to a knob's value. The engine itself only ever
multiplies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .validate import within

__all__ = ["Scale"]


@dataclass(frozen=True)
class Scale:
    """From a base value, a correction c > 0 and a multiplier rho > 0 to the value in use, which is
    held within [low, high].

    - ``"log"``: value * c * rho, for values above 0 (rates, decay, temperatures).
    - ``"linear"``: value + unit * ln(c) + unit * (rho - 1), for values that may reach or pass 0.
    - ``"horizon"``: 1 - value is divided by c * rho: the log scale of 1 / (1 - value), the number
      of steps that a running average with this beta remembers.

    Bounds are hard, for base values and for those of replicas. A factor of 1 leaves a value within
    them as it is, bitwise.
    """

    kind: str = "log"
    unit: float = 1.0
    low: float = -math.inf
    high: float = math.inf

    def __post_init__(self) -> None:
        if self.kind not in ("log", "linear", "horizon"):
            raise ValueError(f"scale must be 'log', 'linear' or 'horizon', got {self.kind!r}")
        within(self.unit, "unit", "(0, inf)", "it is the change of the value for a factor e")
        if not self.low < self.high or (self.kind == "log" and self.high <= 0):
            raise ValueError(
                f"bounds must be (low, high) with low < high, and high > 0 with scale='log', got "
                f"({self.low!r}, {self.high!r})"
            )

    @property
    def bounded(self) -> bool:
        return self.low > -math.inf or self.high < math.inf

    def hold(self, value: Any) -> Any:
        """Within the bounds. Tensors stay tensors, and nobody waits for their device."""
        if not self.bounded:
            return value
        if isinstance(value, (int, float)):
            return min(max(value, self.low), self.high)
        return value.clamp(self.low, self.high)

    def corrected(self, value: Any, correction: float) -> Any:
        """The base value: of the schedule's and a correction."""
        if self.kind == "linear" and correction != 1.0:
            return self.hold(value + self.unit * math.log(correction))
        return self.hold(self._moved(value, correction))

    def correction_to(self, value: float, scheduled: float) -> float:
        """The correction by which ``scheduled`` becomes ``value``; NaN if there is none."""
        if self.kind == "linear":
            return math.exp(min((value - scheduled) / self.unit, 700.0))
        before, after = (scheduled, value) if self.kind == "log" else (1.0 - value, 1.0 - scheduled)
        return after / before if before > 0 and after > 0 else math.nan

    def fanned(self, value: Any, multiplier: float) -> Any:
        """A replica's value: of the base value and its multiplier."""
        return self.hold(self._moved(value, multiplier))

    def _moved(self, value: Any, factor: float) -> Any:
        if factor == 1.0:
            return value
        if self.kind == "linear":
            return value + self.unit * (factor - 1.0)
        return value * factor if self.kind == "log" else 1.0 - (1.0 - value) / factor

    def multiplier_to(self, value: float, base: float) -> float:
        """The multiplier by which ``base`` becomes ``value``; NaN if there is none."""
        if self.kind == "linear":
            return 1.0 + (value - base) / self.unit
        return self.correction_to(value, base)

    def factor_to(self, multiplier: float) -> float:
        """Of a correction: it makes a replica's value with this multiplier the base value."""
        return math.exp(multiplier - 1.0) if self.kind == "linear" else multiplier

    def effective(self, value: float, multiplier: float) -> float:
        """The multiplier that really acts on this base value, where a bound holds the replica's
        back."""
        moved = self._moved(value, multiplier)
        held = self.hold(moved)
        if held == moved:
            return multiplier
        acting = self.multiplier_to(held, value)
        return multiplier if math.isnan(acting) else acting

    def corrections(self, value: float) -> tuple[float, float]:
        """Lowest and highest correction that change anything, for this value of the schedule:
        beyond them a bound holds."""
        lowest, highest = (self.correction_to(bound, value) for bound in (self.low, self.high))
        return 0.0 if math.isnan(lowest) else lowest, math.inf if math.isnan(highest) else highest
