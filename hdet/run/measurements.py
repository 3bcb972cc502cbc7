"""The measurements of a run's controller: rows at a cycle's end, and what they are as evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ..core.engine import Engine
from ..measure.measurement import Measurement, Watched
from .cycle_stats import CycleStats

__all__ = ["Panel"]


class Panel:
    """The measurements that the running cycle's plan names.

    Args:
        engine: whose controller has them.
        during: is put, with a name, around what communicates.
    """

    def __init__(
        self, engine: Engine, during: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        self._engine, self._during = engine, during
        controller = engine.controller
        self._all: Mapping[str, Measurement] = {} if controller is None else controller.measurements
        self._widths: list[tuple[str, int]] = []

    def watch(self, watched: Watched) -> None:
        """Once, before the first step. Raises ValueError for a run in which something cannot be
        measured."""
        for measurement in self._all.values():
            measurement.watch(watched)

    @property
    def modules(self) -> list[nn.Module]:
        """The models that are run."""
        return [module for measurement in self._all.values() for module in measurement.modules]

    # -- a cycle, in this order --------------------------------------------------------------------

    def begin_cycle(self) -> None:
        """Releases what the plan does not name any more."""
        for name, measurement in self._all.items():
            if name not in self._engine.plan.measures:
                measurement.release()
        self.reset()

    def reset(self) -> None:
        """A cycle begins, or replicas were averaged ahead of time."""
        for name in self._engine.plan.measures:
            self._all[name].reset()

    def on_cycle_start(self) -> None:
        """Before the first optimizer step after an average."""
        for _, measurement in self._used(self._engine.step + self._steps_left):
            measurement.on_cycle_start()

    def sample(self) -> None:
        """A step is done and counted."""
        if not self._engine.plan.measures:
            return
        position, left = self._engine.position, self._steps_left
        for _, measurement in self._used(self._engine.step + left):
            measurement.sample(position, position + left)

    def rows(
        self, as_replica: Callable[[int], AbstractContextManager[Any]], places: int
    ) -> list[torch.Tensor] | None:
        """At the cycle's end, one row for each local replica, ``as_replica(place)`` being it; None
        if nothing is measured."""
        used = list(self._used(self._engine.step))
        if not used:
            return None
        table = []
        for place in range(places):
            with self._during("probe"), as_replica(place):
                rows = {name: m.measure(self._engine.cycle, place) for name, m in used}
            measured = {name: row for name, row in rows.items() if row is not None}
            for name, row in measured.items():
                self._check_row(name, row)
            self._widths = [(name, len(row)) for name, row in measured.items()]
            pieces = list(measured.values()) or [torch.zeros(0, dtype=torch.float64)]
            table.append(torch.cat([row.to(pieces[0].device) for row in pieces]))
        return table

    def _check_row(self, name: str, row: Any) -> None:
        if not isinstance(row, torch.Tensor) or row.dim() != 1:
            raise TypeError(
                f"{type(self._all[name]).__name__}.measure gave {getattr(row, 'shape', row)!r}: a "
                "row is a tensor of one dimension, such as loss.reshape(1)"
            )

    def measured(self, stats: Sequence[CycleStats]) -> dict[str, list[list[float]]]:
        """By name, [replica]: what the rows have become, added up over each replica's ranks."""
        measured, begin = {}, 0
        for name, width in self._widths:
            rows = [stat.probe[begin : begin + width] for stat in stats]
            measured[name] = self._all[name].split(rows)
            begin += width
        self._widths = []
        return measured

    def restart(self) -> None:
        """Parameters were loaded or restored."""
        for measurement in self._all.values():
            measurement.restart()

    def release(self) -> None:
        """The Ensemble is closed."""
        for measurement in self._all.values():
            measurement.release()

    # -- where the run is --------------------------------------------------------------------------

    def _used(self, cycle_end: int) -> Iterator[tuple[str, Measurement]]:
        """Those of a cycle from which the controller may learn. The same on every rank, because
        controllers run on equal inputs."""
        names = self._engine.plan.measures if self._engine.clock.controls(cycle_end) else ()
        return ((name, self._all[name]) for name in names)

    @property
    def _steps_left(self) -> int:
        """Steps to the end of the running cycle, which the end of the run may cut short."""
        clock, engine = self._engine.clock, self._engine
        left = clock.sync_interval - engine.position
        if clock.total_steps is None:
            return left
        return min(left, max(0, clock.total_steps - engine.step))
