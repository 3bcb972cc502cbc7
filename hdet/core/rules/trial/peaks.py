"""The peaks that trials have found: what is told of them, and whether a rate is a raised one. Pure."""

from __future__ import annotations

import math

from .scores import Finding, between

__all__ = ["Peaks"]


class Peaks:
    """Of the schedule's rate, with corrections."""

    def __init__(self) -> None:
        self.peaks: list[list[float]] = []
        """By trial: the schedule's peak, and the one that is in force after it."""
        self.said = False
        """Has a check said where the best peak lies?"""
        self.edge = 0.0
        """`Finding.edge`."""
        self.in_force: float | None = None
        """The peak that is; None: not known, since this process began or something was decided. It is another one where `Divergence` has lowered it, or
        nobody obeys (`Shadow`)."""

    def add(self, yours: float, now: float, found: Finding) -> None:
        self.peaks.append([yours, now * found.factor])
        self.said, self.edge, self.in_force = found.edge is not None, found.edge or 0.0, None

    @property
    def raised(self) -> bool:
        return bool(self.peaks) and (self.in_force or self.peaks[-1][1]) > self.peaks[-1][0]

    def sentence(self, over: bool) -> str:
        """For a report: the interval, yours, and what became of it. ``over``: is no trial to come?"""
        yours, now = self.peaks[-1]
        where = f"{between(now, self.edge)}; " if self.said else "no interval, as no check was made of this rate; " if over else ""
        again = any(moved > peak for peak, moved in self.peaks)
        what = f"now {now:.2g}" if now != yours else "in force again" if again else "kept"
        if self.in_force is not None and not math.isclose(self.in_force, now, rel_tol=1e-6):
            what = f"{now:.2g} by what was found, and {self.in_force:.2g} in force"
        return f"{where}yours {yours:.2g}, {what}"
