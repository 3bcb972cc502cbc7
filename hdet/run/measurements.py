"""All measurements of a run's controller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..core.engine import Engine
from ..core.plan import Question
from ..measure.measurement import Measurement, Watched
from .cycle_stats import CycleStats

__all__ = ["Panel"]


class Panel:
    """The measurements that the running cycle's plan names. ``schedule_step``: gives the steps of the schedule done; ``during``: is put, with a name,
    around what communicates."""

    def __init__(self, engine: Engine, schedule_step: Callable[[], int], during: Callable[[str], AbstractContextManager[None]]) -> None:
        self._engine, self._schedule_step, self._during = engine, schedule_step, during
        self._all: Mapping[str, Measurement] = {} if engine.controller is None else engine.controller.measurements
        self._widths: list[tuple[str, int]] = []

    def watch(self, watched: Watched) -> None:
        """Once, before the first step. Raises ValueError for a run in which something cannot be measured."""
        self._check_plan()
        for measurement in self._all.values():
            measurement.watch(watched)

    @property
    def modules(self) -> list[nn.Module]:
        """The models that are run."""
        return [module for measurement in self._all.values() for module in measurement.modules]

    # -- a cycle, in this order --------------------------------------------------------------------------------------------

    def begin_cycle(self) -> None:
        """Releases what the plan does not name any more. Raises ValueError for a name that no measurement has."""
        self._check_plan()
        for name, measurement in self._all.items():
            if name not in self._engine.plan.measure:
                measurement.release()
        self.reset()

    def reset(self) -> None:
        """A cycle begins, or replicas were averaged ahead of time."""
        for _, measurement in self._named():
            measurement.reset()

    def on_cycle_start(self) -> None:
        """Before the first optimizer step after an average."""
        for name, measurement in self._used(self._engine.step + self._steps_left):
            measurement.on_cycle_start(self._engine.plan.measure[name])

    def sample(self) -> None:
        """A step is done and counted."""
        if not self._engine.plan.measure:
            return
        position, left = self._engine.position, self._steps_left
        for _, measurement in self._used(self._engine.step + left):
            measurement.sample(position, position + left, self._schedule_step())

    def rows(self, as_replica: Callable[[int], AbstractContextManager[Any]], places: int) -> list[torch.Tensor] | None:
        """At the cycle's end, what has been measured of each local replica, ``as_replica(place)`` being it; None if nothing has."""
        used = [(name, m) for name, m in self._used(self._engine.step) if type(m).measure is not Measurement.measure]
        if not used:
            return None
        table = []
        for place in range(places):
            with self._during("probe"), as_replica(place):
                found = [(name, row) for name, m in used if (row := m.measure(self._engine.cycle, place)) is not None]
            for name, row in found:
                if not isinstance(row, torch.Tensor) or row.dim() != 1:
                    raise TypeError(
                        f"{type(self._all[name]).__name__}.measure gave {getattr(row, 'shape', row)!r}: a row is a tensor of one dimension, such as loss.reshape(1)"
                    )
            self._widths = [(name, len(row)) for name, row in found]
            table.append(torch.cat([row.to(found[0][1].device) for _, row in found]) if found else torch.zeros(0, dtype=torch.float64))
        return table

    def measured(self, rows: Sequence[torch.Tensor] | None, stats: Sequence[CycleStats]) -> dict[str, list[list[float]]]:
        """What has come back of such ``rows`` from all replicas, by name, [replica]."""
        if rows is None:
            return {}
        found, at = {}, 0
        for name, width in self._widths:
            found[name] = self._all[name].split([stat.probe[at : at + width] for stat in stats])
            at += width
        return found

    @contextmanager
    def answering(self) -> Iterator[Callable[[Question], Any]]:
        """While the controller learns: a function that has its questions answered."""
        with ExitStack() as stack:
            ready: dict[str, Callable[[Question], Any]] = {}

            def answer(question: Question) -> Any:
                if question.measurement not in self._engine.plan.measure:
                    raise ValueError(f"the controller {self._engine.controller_name!r} asks {question!r}, which its plan does not measure")
                if question.measurement not in ready:
                    stack.enter_context(self._during(question.measurement))
                    ready[question.measurement] = stack.enter_context(self._all[question.measurement].answering())
                return ready[question.measurement](question)

            yield answer

    def restart(self) -> None:
        """Parameters were loaded or restored."""
        for measurement in self._all.values():
            measurement.restart()

    def release(self) -> None:
        """The Ensemble is closed."""
        for measurement in self._all.values():
            measurement.release()

    def _check_plan(self) -> None:
        missing = sorted(self._engine.plan.measure.keys() - self._all.keys())
        if missing:
            raise ValueError(
                f"the controller {self._engine.controller_name!r} measures {missing[0]!r}, and has no measurement of that name: put one into its "
                "`measurements`; a rule is given to the controller that brings what it needs, as in ProbeController(rule=...)"
            )

    # -- where the run is --------------------------------------------------------------------------------------------------

    def _named(self) -> Iterator[tuple[str, Measurement]]:
        return ((name, self._all[name]) for name in self._engine.plan.measure)

    def _used(self, cycle_end: int) -> Iterator[tuple[str, Measurement]]:
        """Those of a cycle from which the controller may learn. The same on every rank, because controllers run on equal inputs."""
        return self._named() if self._engine.controls(cycle_end) else iter(())

    @property
    def _steps_left(self) -> int:
        """Steps to the end of the running cycle, which the end of the run may cut short."""
        clock = self._engine.clock
        left = self._engine.cycle_length - self._engine.position
        return left if clock.total_steps is None else min(left, max(0, clock.total_steps - self._engine.step))
