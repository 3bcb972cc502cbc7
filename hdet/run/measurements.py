"""The measurements of a run's controller: rows at a cycle's end, and what they are as evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from ..controllers.measurement import Measurement, Watched
from ..optim.snapshot import masters_of
from .setup import Setup

__all__ = ["Measurements"]


class Measurements:
    """Those of the controller that the running cycle's plan names.

    Args:
        run: whose controller has them.
        guard: is put, with a name, around what communicates.
        attached: is given what releases them.

    Raises:
        ValueError: something cannot be measured in this run.
    """

    def __init__(
        self,
        run: Setup,
        guard: Callable[[str], AbstractContextManager[None]],
        attached: ExitStack,
    ) -> None:
        self._engine, self._guard, controller = run.engine, guard, run.controller
        self._all: Mapping[str, Measurement] = {} if controller is None else controller.measurements
        sets = run.replicas.sets(run.trained)
        masters = [masters_of(run.optimizer, run.trained, slot) for slot in range(len(sets))]
        # They are not given what holds them in turn.
        watched = Watched(run.optimizer, sets, masters, run.engine.clock)
        for measurement in self._all.values():
            measurement.watch(watched)
            attached.callback(measurement.release)

    # -- a cycle, in this order --------------------------------------------------------------------

    def release(self, keep: Sequence[str]) -> None:
        """All but those that the plan of a cycle that begins names."""
        for name, measurement in self._all.items():
            if name not in keep:
                measurement.release()

    def reset(self) -> None:
        """A cycle begins, or replicas were averaged ahead of time."""
        for name in self._engine.plan.measures:
            self._all[name].reset()

    def sample(self) -> None:
        """A step is done and counted."""
        position = self._engine.position
        for _, measurement in self._used():
            measurement.sample(position, position + self._engine.steps_left)

    def rows(
        self, as_replica: Callable[[int], AbstractContextManager[Any]], slots: int
    ) -> list[dict[str, torch.Tensor]]:
        """At the cycle's end, by local replica and measurement; ``as_replica(slot)`` is put around
        what is measured of a replica."""
        table: list[dict[str, torch.Tensor]] = [{} for _ in range(slots)]
        used = list(self._used())
        for slot in range(slots) if used else ():
            with self._guard("probe"), as_replica(slot):
                rows = {name: one.measure(self._engine.cycle, slot) for name, one in used}
            table[slot] = {name: row for name, row in rows.items() if row is not None}
        return table

    def split(self, rows: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, list[list[float]]]:
        """By name, [replica]: what its rows, added up over its ranks, say."""
        return {name: self._all[name].split(own) for name, own in rows.items()}

    # -- where the run is --------------------------------------------------------------------------

    def _used(self) -> Iterator[tuple[str, Measurement]]:
        """Those of a cycle from which the controller may learn. The same on every rank, because
        controllers run on equal inputs."""
        engine = self._engine
        names = engine.plan.measures
        if not names or not engine.clock.controls(engine.first):
            return iter(())
        return ((name, self._all[name]) for name in names)
