"""Where a probe scores the replicas: each at its own cycle's average, or all on the line through an
interval of several cycles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .measurement import Watched
from .weight_line import RunningMean, WeightLine

__all__ = ["CyclePoints", "LinePoints"]


class CyclePoints:
    """Each replica at the average of its own weights over the cycle.

    Args:
        run: whose weights.
        every: steps between samples of the average; the cycle's last step is one.
        after: the part of the cycle, in [0, 1), that is left out at its beginning.
        place: of the averages, "device" or "host".
    """

    is_due = True

    def __init__(self, run: Watched, every: int, after: float, place: str) -> None:
        pairs = zip(run.sets, run.masters, strict=True)
        self.averages = [RunningMean(own, masters, place) for own, masters in pairs]
        self._every, self._after = every, after

    def on_cycle_start(self) -> None:
        """A cycle's average needs no beginning."""

    def reset(self) -> None:
        for average in self.averages:
            average.reset()

    restart = reset

    def sample(self, position: int, length: int) -> None:
        if position > self._after * length and (length - position) % self._every == 0:
            for average in self.averages:
                average.add()

    @contextmanager
    def at(self, place: int) -> Iterator[None]:
        """Inside, the weights of the local replica at ``place`` are those to be scored; afterwards
        bitwise what they were."""
        average = self.averages[place]
        if not average.samples:
            average.add()  # a cycle cut too short for a sample: the weights as they are
        average.exchange()
        try:
            yield
        finally:
            average.exchange()


class LinePoints:
    """All replicas on one line, each at the multiplier of the cycle that ends:
    origin + rho_r (average - origin), by knob.

    The origin is where an interval of several cycles began, the average that of the mean trajectory
    over its later part. Each replica averages its own weights, mean + (rho_r - 1) s, and at the
    interval's end these averages are averaged over replicas. That is the mean trajectory's average
    for one all_reduce, bitwise the same on all replicas, whatever the optimizer. (Samples at the
    ends of cycles would need no all_reduce, but are too few to take the noise out.)

    Args:
        cycles: of an interval.
        run, every, after, place: as for `CyclePoints`; ``after`` is a part of the interval.
    """

    def __init__(self, run: Watched, cycles: int, every: int, after: float, place: str) -> None:
        self._run, self._cycles, self._every, self._after = run, cycles, every, after
        knob_of = {index: k for k, knob in enumerate(run.knobs) for index in knob.indices}
        groups = enumerate(run.optimizer.param_groups)
        self._owners = [knob_of.get(g) for g, group in groups for _ in group["params"]]
        self._place = place
        self._line: WeightLine | None = None
        self.restart()

    def restart(self) -> None:
        self._has_begun, self._is_shared, self._done = False, False, 0

    def on_cycle_start(self) -> None:
        """Before the first step after an average: here an interval begins, unless one is under
        way."""
        if not self._has_begun:
            self._line = self._line or self._make_line()
            self._line.begin()
            self._has_begun = True

    def _make_line(self) -> WeightLine:
        (first, its_masters), *others = zip(self._run.sets, self._run.masters, strict=True)
        line = WeightLine(first, its_masters, self._place)
        for own, masters in others:
            line.mean.follow(own, masters)
        return line

    def reset(self) -> None:
        """A cycle begins, or replicas were averaged ahead of time, which makes no difference to the
        mean trajectory."""
        if self.is_due:
            self.restart()

    def sample(self, position: int, length: int) -> None:
        interval = self._run.clock.sync_interval
        left = (self._cycles - self._done - 1) * interval + length - position
        whole = self._cycles * interval
        is_late = whole - left > self._after * whole
        if self._line is not None and is_late and left % self._every == 0:
            self._line.mean.add()
        self._done += position == length

    @property
    def is_due(self) -> bool:
        """Does an interval end with this cycle?"""
        return self._has_begun and self._done == self._cycles

    @contextmanager
    def at(self, place: int) -> Iterator[None]:
        """As `CyclePoints.at`. The first call communicates."""
        assert self._line is not None, "on_cycle_start comes first"
        if not self._is_shared:
            self._line.share(self._run.replicas)
            self._is_shared = True
        rho = self._run.multipliers()[place]
        of_parameters = [1.0 if k is None else rho[k] for k in self._owners]
        with self._line.at(of_parameters, self._run.sets[place]):
            yield
