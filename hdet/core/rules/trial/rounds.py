"""The rounds of trials of one run: which one it is, at which rates its arms train, and where they begin. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .costs import AGAIN, CHECK, SCAN
from .protocol import ORIGIN
from .scores import SCAN_RAISES, Finding

__all__ = ["ANEW", "CHECKS", "LATEST", "SCANS", "Rounds"]

SCANS, CHECKS, ANEW = (-3.0, 0.0, 7.0), (-2.0, 0.0, 2.0), (-6.0, -3.0, 0.0)
"""Octaves from the rate in force to each arm's, ascending."""
RESCANS = ((0.0, 6.0), (0.0,))
"""Of the scan's repetitions, if it may raise the rate: octaves from the one that it may be raised to. The second may raise it no further."""
LATEST = 0.35
"""Of the run: how long a check may wait for the schedule's peak."""


class Rounds:
    """Octaves of arms are ascending; see `Arms`."""

    def __init__(self) -> None:
        self.rounds: Sequence[float] = ()
        """Those that the budget affords: after which part of the run each begins, `SCAN`, `CHECK` or `ALONE`."""
        self.round = 0
        """Of `rounds`: the next one, or the one that goes on."""
        self.repeated = 0
        """How often it has been repeated."""
        self.lowered = False
        """Did the run go on as a lower arm, when it was repeated last?"""
        self.anew = False
        """Is the trial that goes on one anew?"""
        self.scan: list[float] = []
        """What the rate in force has learned in the scan, and the most that any arm has; empty: there was none."""

    @property
    def over(self) -> bool:
        return self.round >= len(self.rounds)

    @property
    def scans(self) -> bool:
        """Is it one at the first step, from the run's own beginning?"""
        return self.rounds[self.round] == SCAN

    @property
    def from_first(self) -> bool:
        """Do its arms go from the run's first weights?"""
        return self.scans or self.anew

    @property
    def rising(self) -> bool:
        """Is a scan of the rate that the one in force may be raised to?"""
        return self.scans and self.repeated > 0 and not self.lowered and bool(self.scan)

    def due(self, total: int) -> tuple[int, int]:
        """From which step of the schedule on it may begin, and before which."""
        begins, ends = self.rounds[self.round], CHECK if self.scans else LATEST
        return math.ceil(begins * total), math.ceil(ends * total)

    def octaves(self) -> tuple[float, ...]:
        """Of its arms."""
        if not self.scans:
            return ANEW if self.anew else CHECKS
        if self.rising:
            return RESCANS[self.repeated - 1]
        return SCANS[:2] if self.lowered else SCANS

    def settings(self, end: float) -> dict[str, Any]:
        """Of its measurement. ``end``: the part of its peak to which an arm falls."""
        multiples = [2.0 ** (octave + SCAN_RAISES * self.rising) for octave in self.octaves()]
        origins = [ORIGIN] * len(multiples) if self.scans else [ORIGIN if octave else "" for octave in ANEW] if self.anew else None
        # The scan's higher arms are to show how much there is to learn, not the noise that their rates would leave.
        ends = [0.0 if self.scans and multiple > 1 else end for multiple in multiples]
        return {"multiples": multiples, "of": "peak" if self.scans else "base", "origins": origins, "ends": ends}

    def go_on(self, found: Finding) -> None:
        """To the next one, or to this one once more."""
        if found.again and self.repeated < AGAIN:
            self.repeated, self.lowered = self.repeated + 1, found.snapshot is not None
        else:
            self.next()

    def next(self) -> None:
        self.round, self.repeated, self.lowered = self.round + 1, 0, False

    def end(self) -> None:
        """Nothing more is tried."""
        self.round = len(self.rounds)

    def to_come(self, total: int) -> str:
        """For a report before the first one."""
        of_rounds = (
            f"from step {math.ceil(part * total)} at {', '.join(f'{2.0**octave:g}' for octave in (SCANS if part == SCAN else CHECKS))} times your rate"
            for part in self.rounds
        )
        return f"trials {', and '.join(of_rounds)}"
