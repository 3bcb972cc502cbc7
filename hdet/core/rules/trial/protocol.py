"""What a `TrialRule` and the measurement of trials (`hdet.measure.trials`) know of each other: names, and a row of what was measured. All of it is plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from ...plan import SnapshotOf

__all__ = ["BROKEN", "HELD_OUT", "ORIGIN", "REPEATS", "RUN", "TRIALS", "Told", "arm", "by_arm", "last", "snapshots"]

TRIALS = "trials"
"""The measurement's name."""
REPEATS = "repeats"
"""That of another one (`hdet.measure.repeats`), whose rows are `Told.part` alone, of cycles between trials and after them."""
HELD_OUT = "held out"
"""That of the judge's losses of the run's own weights (`hdet.measure.held_out`), at the end of a cycle: rows are [mini-batch]."""
RUN = "run"
"""The snapshot in which the run itself waits."""
ORIGIN = "origin"
"""The snapshot with which the arms of a scan begin."""
BROKEN = 1e30
"""The loss of an arm that has none that is finite."""


def arm(number: int) -> str:
    """The name of the snapshot that a trial's arm lives in."""
    return f"arm {number}"


def snapshots(arms: int, origin: str = "", place: str = "device") -> dict[str, SnapshotOf]:
    """What a plan with so many arms has to keep."""
    return {name: SnapshotOf(place) for name in [RUN, *map(arm, range(arms)), *filter(None, [origin])]}


def last(steps: int) -> int:
    """Of how many of a trial's last steps the losses are told with which arms have come to their batches."""
    return steps - steps // 2


@dataclass(frozen=True)
class Told:
    """Of one replica, after a trial."""

    broken: float
    """On how many ranks the run's own weights are not finite."""
    scores: Sequence[Sequence[float]]
    """[arm][batch]: losses of batches that no arm has trained on."""
    trained: Sequence[Sequence[float]]
    """[arm][step]: losses of the `last` batches that it has trained on, before it did."""
    far: float
    """How many times as far as the run's an arm's first step went at the run's own rate: 1, if arms do what the loop does (and where nothing is known)."""
    part: float
    """Of the data that a step of the run takes, as far as its first examples have been seen again: 0, if none has."""
    began: float
    """The loss with which the first arm began: by the judge; or of the batches of its scores, if it began with a snapshot; or of the first batch, whose
    loss is a noisy one."""

    def row(self) -> list[float]:
        """As in `Evidence.measured`."""
        return [self.broken, *chain(*self.scores), *chain(*self.trained), self.far, self.part, self.began]

    @classmethod
    def read(cls, row: Sequence[float], arms: int, steps: int) -> Told:
        """Raises ValueError for a row of a trial with another number of arms, or of steps."""
        broken, *losses, far, part, began = row
        told = arms * last(steps)
        scores, trained = losses[: len(losses) - told], losses[len(losses) - told :]
        if not arms or len(losses) <= told or len(scores) % arms:
            raise ValueError(f"a row of {len(row)} numbers is not of a trial with {arms} arms and {steps} steps")
        return cls(broken, by_arm(scores, arms), by_arm(trained, arms), far, part, began)


def by_arm(losses: Sequence[float], arms: int) -> list[Sequence[float]]:
    """[arm * each + number] -> [arm][number]"""
    each = len(losses) // arms
    return [losses[i * each : (i + 1) * each] for i in range(arms)]
