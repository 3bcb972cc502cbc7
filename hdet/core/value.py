"""The value of a knob, and all that it depends on: one owner. No cells, no processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .evidence import KnobSpec
from .plan import Decision
from .scale import Scale
from .spread import Grid

__all__ = ["LARGEST_CORRECTION", "Value"]

LARGEST_CORRECTION = 1e6
"""A correction outside [1/this, this] is a runaway, not a tuning: it is held there and noted."""


class Value:
    """Where a knob stands: base value = schedule x correction, or a value off the schedule.

    A knob may stand in several places (cells), which all move by the same factor (on a linear
    scale: by the same amount).

    Args:
        name: unique in a run.
        grid: of multipliers; a number is the spread of an even one.
        scale: what corrections and multipliers do to it; default: log, without bounds.
        rate, valid_on_train_loss: as in `KnobSpec`.
        scheduled: [cell]: the schedule's first values.
    """

    scheduled: list[Any]
    """[cell]: the untouched schedule's values; tensors stay tensors."""
    left: list[Any]
    """[cell]: the base values."""
    correction = 1.0
    """> 0, by which decisions have moved it."""
    off_schedule: float | None = None
    """A base value in the place of schedule times correction."""
    multiplier = 1.0
    """This replica's, in the running cycle."""
    highest: Any = -math.inf
    """Of the first cell of `scheduled`, in the steps since the controller was last asked; -inf
    before the first."""
    simulated: Sequence[tuple[float, float]] = ()
    """[cell]: the highest and lowest value of the untouched schedule, if it was simulated."""

    def __init__(
        self,
        name: str,
        grid: Grid | float,
        scale: Scale | None = None,
        *,
        rate: bool = True,
        valid_on_train_loss: bool = True,
        scheduled: Sequence[Any] = (1.0,),
    ) -> None:
        grid = grid if isinstance(grid, Grid) else Grid(grid)
        self.spec = KnobSpec(name, grid, scale or Scale(), rate, valid_on_train_loss)
        self.name, self.grid, self.scale = name, grid, self.spec.scale
        self.scheduled = self.left = list(scheduled)
        self.note_peaks()

    # -- what it is --------------------------------------------------------------------------------

    def scheduled_value(self) -> float:
        """The untouched schedule's, of the first cell. Waits for the device of a tensor."""
        return float(self.scheduled[0])

    def base_value(self) -> float:
        """As it was left in the first cell. Waits for the device of a tensor."""
        return float(self.left[0])

    def uncorrected_value(self) -> float:
        """What a correction of 1 would leave in the first cell."""
        return self.scheduled_value()

    def highest_value(self) -> float:
        """Of the untouched schedule, now and since the controller was last asked."""
        return max(float(self.highest), self.scheduled_value())

    def peaks(self) -> list[float]:
        """[cell]: the highest value of the untouched schedule, as far as it is known."""
        return [high for high, _ in self.simulated] or [float(value) for value in self.scheduled]

    def floor(self) -> float:
        """The lowest value of the untouched schedule, of the first cell; 0 is unknown."""
        return max(self.simulated[0][1], 0.0) if self.simulated else 0.0

    def note_peaks(self) -> None:
        """Take the ratios of cells from their peaks, which may have changed."""
        peaks = self.peaks()
        self._ratios = [peak / peaks[0] if peaks[0] > 0 else 1.0 for peak in peaks]

    def points(self, count: int) -> list[float]:
        """The multipliers of its grid, of so many replicas, in order; NaN for a value that none
        leads to."""
        points = self.grid.points(count)
        if self.grid.values is None:
            return points
        peak = self.peaks()[0]
        return [self.scale.multiplier_to(value, peak) for value in points]

    def acting(self, multiplier: float, cell: int = 0) -> float:
        """The multiplier that acts on the base value of a cell; another one than the given where a
        bound holds the replica's value back."""
        if not self.scale.bounded:
            return multiplier
        return self.scale.effective(float(self.left[cell]), multiplier)

    # -- who moves it ------------------------------------------------------------------------------

    def follow(self, scheduled: Sequence[Any]) -> None:
        """The schedule's next values."""
        self.scheduled = list(scheduled)
        self.correct()

    def correct(self) -> None:
        """Base values."""
        self.left = [self.corrected(value, cell) for cell, value in enumerate(self.scheduled)]

    def corrected(self, value: Any, cell: int) -> Any:
        """The base value where the schedule's is ``value``; off the schedule, `off_schedule`
        (further cells keep the ratio of their peaks)."""
        if self.off_schedule is None:
            return self.scale.corrected(value, self._correction_of(cell))
        return self.scale.hold(self.off_schedule * self._ratios[cell])

    def _correction_of(self, cell: int) -> float:
        return self.correction

    def move(self, decision: Decision) -> list[str]:
        """A controller's decision, from the next `correct` on. Returns notes."""
        self.off_schedule = decision.value
        wanted = self.correction * decision.factor
        # What passes a bound changes no value, but would take as long to come back.
        lowest, highest = self.scale.corrections(self.peaks()[0])
        held = min(max(wanted, 1 / LARGEST_CORRECTION, lowest), LARGEST_CORRECTION, highest)
        self.correction = held
        notes = [f"{self.name}: {decision.note}"] if decision.note else []
        if held != wanted:
            notes.append(f"{self.name}: correction {wanted:.3g} held at {held:.3g}")
        return notes

    def set(self, value: float) -> None:
        """Somebody sets the base value: from now on the correction is the one that leads there from
        the schedule's. Raises ValueError if none does."""
        scheduled = self.uncorrected_value()
        correction = self.scale.correction_to(value, scheduled)
        in_range = 1 / LARGEST_CORRECTION <= correction <= LARGEST_CORRECTION
        if not in_range or self.scale.hold(value) != value:
            raise ValueError(
                f"{self.name} cannot be set to {value!r} while its schedule is at {scheduled:g}: "
                "no correction leads there"
            )
        if self.off_schedule is None:
            self.correction = correction
        else:
            self.off_schedule = value

    def lower(self, factor: float) -> None:
        """A cycle was rolled back."""
        self.correction = max(self.correction * factor, 1 / LARGEST_CORRECTION)
        if self.off_schedule is not None:
            self.off_schedule *= factor
