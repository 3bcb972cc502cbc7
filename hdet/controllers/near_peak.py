"""Controllers that learn while the schedule is near its peak. Before it values are low on purpose,
and any evidence says "higher"; after it a lower value is the point of the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.controller import Controller
from ..core.evidence import Evidence
from ..core.schema import COUNT, FLAG, Check, list_of, number
from ..core.validate import warn

__all__ = ["BEGIN", "END", "NearPeak"]

BEGIN, END = 0.95, 0.9
"""Parts of the schedule's peak, on the way up and on the way down, between which cycles count."""


class NearPeak(Controller):
    """Knows where each knob's schedule is. It rests once all are past their peaks."""

    enough = 2
    """Cycles near the peak without which next to nothing can be corrected."""
    columns: Sequence[str] = ("warm", "phase", "looks")
    """Lists of its state with an entry for each knob."""
    state_keys: Mapping[str, Check] = {
        "warm": list_of(FLAG),
        "phase": list_of(number()),
        "looks": list_of(COUNT),
    }

    def __init__(self, freeze_after: float | None = None) -> None:
        super().__init__(freeze_after)
        self.begin_run(0)

    def begin_run(self, knobs: int) -> None:
        """The state at the first evidence, when the number of knobs is known."""
        self.warm = [False] * knobs
        """[knob]: has the schedule been near its peak?"""
        self.phase = [0.0] * knobs
        """[knob]: scheduled / peak in the evidence before."""
        self.looks = [0] * knobs
        """[knob]: cycles near the peak; `enough` also where too few were warned of."""

    @property
    def idle(self) -> bool:
        """Frozen, or the schedule of every knob is past its peak for good."""
        pairs = zip(self.warm, self.phase, strict=False)
        return self.frozen or (bool(self.warm) and all(w and p < END for w, p in pairs))

    def check_state(self, state: Any) -> dict[str, Any]:
        return self.check_columns(super().check_state(state), *self.columns)

    def look(self, evidence: Evidence) -> list[bool]:
        """[knob]: does this cycle count? To be called in each `decide`."""
        self.observe(evidence)
        is_near = [w and p >= END for w, p in zip(self.warm, self.phase, strict=True)]
        self.looks = [count + near for count, near in zip(self.looks, is_near, strict=True)]
        return is_near

    def observe(self, evidence: Evidence) -> None:
        """Where the schedule is now: also where another controller decides, so that its peak is
        not missed."""
        if any(len(getattr(self, name)) != len(evidence.knobs) for name in self.columns):
            self.begin_run(len(evidence.knobs))
        self.phase = _parts(evidence.scheduled, evidence.peak)
        highest = _parts(evidence.highest or evidence.scheduled, evidence.peak)
        self.warm = [w or p >= BEGIN for w, p in zip(self.warm, highest, strict=True)]
        missed = [
            k
            for k, count in enumerate(self.looks)
            if self.warm[k] and self.phase[k] < END and count < self.enough
        ]
        if missed and not self.frozen:
            looks = self.looks
            self.looks = [self.enough if k in missed else count for k, count in enumerate(looks)]
            warn(
                f"the schedule of {', '.join(evidence.knobs[k] for k in missed)} has fallen below "
                f"{END:.0%} of its peak before the controller {self.name!r} has seen {self.enough} "
                f"cycles near it, which have {evidence.sync_interval} steps: it rests from now on. "
                f"Make cycles shorter, sync=hdet.Sync(...), so that {self.enough} or more end "
                f"between {BEGIN:.0%} of the peak on the way up and {END:.0%} on the way down",
            )


def _parts(values: Sequence[float], peaks: Sequence[float]) -> list[float]:
    """[knob]: of its peak."""
    return [value / peak if peak > 0 else 1.0 for value, peak in zip(values, peaks, strict=True)]
