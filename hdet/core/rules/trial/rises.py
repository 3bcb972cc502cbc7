"""May a rate be raised because a trial's higher arm is better? What a high rate costs may show later in the run than a trial lasts."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Rises"]

FALLS = 0.2
"""The part of its peak to which a schedule falls, or below, in the end: what a high rate costs in noise is mostly gone then."""
FEW, MANY = 2, 12
"""Times that a run sees its examples, beyond which, without a judge, a raised rate is taken back when they come again, and beyond which it is not raised
at all. With labels of which some are wrong raised rates helped in runs of 10 epochs, and overfitted in those of 20 and more. With users and things,
which are learned by heart, they helped in runs of 2.5, and overfitted in those of 3; taken back at the second epoch, they helped in those of 11."""


@dataclass(frozen=True)
class Rises:
    """What is known of the run. Three things speak against a rise:

    - *A judge*: there are few examples, of which a high rate learns all there is sooner, and overfits sooner. A scan raises nothing, a check only
      where the rate in force has hardly learned anything.
    - *A schedule that does not fall*, or of which that is not known: in the end the noise of its rate is there. A check is as careful as with a judge, and
      what a scan has raised is taken back if the check's lower arm is any better.
    - *Examples that come again* more than `MANY` times, and no judge: a high rate overfits, and nobody sees it. Nothing is raised. Beyond `FEW` times,
      nothing is raised, nor stays so, from the second epoch on: until then a high rate only learns sooner.
    """

    judged: bool
    falls_to: float | None
    """The part of its peak to which the schedule falls in the end, in [0, 1]; None: not known."""
    epochs: float
    """How often the run will have seen its examples in the end, as far as it is known."""
    again: bool
    """Have examples come again already?"""

    @property
    def end(self) -> float:
        """The part of its rate with which an arm ends: 0, unless the schedule is known not to fall."""
        return self.falls_to if self.falls_to is not None and self.falls_to > FALLS else 0.0

    @property
    def overfit(self) -> bool:
        return not self.judged and (self.epochs > MANY or (self.epochs > FEW and self.again))

    @property
    def stays_high(self) -> bool:
        """The schedule, as far as anybody knows."""
        return self.falls_to is None or self.end > 0

    def allowed(self, scan: bool, far_behind: bool) -> bool:
        """To a scan, or a check. ``far_behind``: has the rate in force hardly learned anything, beside the higher one?"""
        if self.overfit or (scan and self.judged):
            return False
        return far_behind or not (scan or self.judged or self.stays_high)

    def forecast(self) -> str:
        """For a report before trials: what of the schedule keeps the rate from being raised."""
        if self.falls_to is None:
            return ". Nobody knows to what the schedule falls (AutoLR's falls_to=), so the rate is raised only where it hardly learns"
        if self.end:
            falls = "stays at its peak" if self.falls_to == 1 else f"falls to {self.falls_to:.0%} of its peak only"
            return f". The schedule {falls}, so the rate is raised only where it hardly learns (falls_to=0, if averaged weights are what counts)"
        return ""

    def why(self) -> str:
        """Where it has `overfit`."""
        return f"examples come again, {self.epochs:.{0 if self.epochs >= 10 else 1}f} times in this run or more"

    def found(self) -> str:
        """For a report after trials."""
        return f"; no rise, as {self.why()}, and there is no judge=" if self.overfit else ""
