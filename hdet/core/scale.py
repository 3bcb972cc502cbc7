"""Scales: what a correction and a multiplier do to a knob's value. The engine itself only ever
multiplies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .validate import within

__all__ = ["Scale"]

KINDS = ("log", "linear", "horizon")


@dataclass(frozen=True)
class Scale:
    """From a base value, a correction c > 0 and a multiplier rho > 0 to the value in use, which is
    held within [low, high].

    - ``"log"``: value * c * rho, for values above 0 (rates, decay, temperatures).
    - ``"linear"``: value + unit * ln(c) + unit * (rho - 1), for values that may reach or pass 0.
    - ``"horizon"``: 1 - value is divided by c * rho: the log scale of 1 / (1 - value), the number
      of steps that a running average with this beta remembers.

    Bounds are hard, for base values and for those of replicas. A factor of 1 leaves a value within
    them as it is, to the bit.
    """

    kind: str = "log"
    unit: float = 1.0
    low: float = -math.inf
    high: float = math.inf

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"scale must be one of {', '.join(map(repr, KINDS))}, got {self.kind!r}"
            )
        within(self.unit, "unit", "(0, inf)", "it is the change of the value for a factor e")
        if not (_is_number(self.low) and _is_number(self.high) and self.low < self.high):
            raise ValueError(
                f"bounds must be (low, high) with low < high, got ({self.low!r}, {self.high!r})"
            )
        if self.kind == "log" and self.high <= 0:
            raise ValueError(
                f"bounds ({self.low!r}, {self.high!r}) have no value above 0, which scale='log' "
                "needs: use scale='linear'"
            )

    @property
    def bounded(self) -> bool:
        return self.low > -math.inf or self.high < math.inf

    def hold(self, value: Any) -> Any:
        """Within the bounds. Tensors stay tensors, and nobody waits for their device."""
        if not self.bounded:
            return value
        return (
            min(max(value, self.low), self.high)
            if isinstance(value, (int, float))
            else value.clamp(self.low, self.high)
        )

    def corrected(self, value: Any, correction: float) -> Any:
        """The base value: of the schedule's and a correction."""
        if self.kind == "linear" and correction != 1.0:
            return self.hold(value + self.unit * math.log(correction))
        return self.hold(self._moved(value, correction))

    def correction_to(self, value: float, scheduled: float) -> float:
        """The correction by which ``scheduled`` becomes ``value``; NaN if there is none."""
        if self.kind == "linear":
            return _exp((value - scheduled) / self.unit)
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

    def effective(self, value: float, multiplier: float) -> float:
        """The multiplier that really acts on this base value, where a bound holds the replica's
        back."""
        moved = self._moved(value, multiplier)
        held = self.hold(moved)
        if held == moved:
            return multiplier
        if self.kind == "linear":
            return 1.0 + (held - value) / self.unit
        before, after = (value, held) if self.kind == "log" else (1.0 - held, 1.0 - value)
        return after / before if before > 0 and after > 0 else multiplier

    def corrections(self, value: float) -> tuple[float, float]:
        """Lowest and highest correction that change anything, for this value of the schedule:
        beyond them a bound holds."""
        if self.kind == "linear":
            return _exp((self.low - value) / self.unit), _exp((self.high - value) / self.unit)
        if self.kind == "log":
            return (max(self.low, 0.0) / value, self.high / value) if value > 0 else (0.0, math.inf)
        short, long = (1.0 - value) / (1.0 - self.low), 1.0 - self.high
        return (
            (short, (1.0 - value) / long if 0 < long < math.inf else math.inf)
            if value < 1
            else (0.0, math.inf)
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def _exp(x: float) -> float:
    return math.exp(min(x, 700.0))
