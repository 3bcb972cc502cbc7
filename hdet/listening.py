"""What a controller measures by itself during a run: a sensor through each cycle, the line at an interval's end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .core.controllers import Controller, Decision
from .core.divergence import Verdict
from .core.engine import Engine
from .knobs import Bound
from .line import Closure, LineController, follower, sensor_of
from .replicas import Replicas
from .sensor import Run
from .shards import local_parts
from .slots import Slot, masters_of

__all__ = ["Listening"]


class Listening:
    """One call for each moment of a run, whatever there is to measure, if anything.

    Args:
        engine: whose controller it is; its counters say where the run is.
        step: steps of the schedule done, the clock of the line's rule.
        gradients: "shared" or "local".
        multipliers: [local replica][knob]: rho of the running cycle.
        during: put, with a name, around what communicates: `rows`, and whatever is done with a `line`.
        copied: the optimizer has copies of the model's parameters.
    """

    def __init__(
        self,
        engine: Engine,
        step: Callable[[], int],
        optimizer: Optimizer,
        replicas: Replicas,
        knobs: Sequence[Bound],
        gradients: str,
        multipliers: Callable[[], Sequence[Sequence[float]]],
        during: Callable[[str], AbstractContextManager[None]],
        copied: bool = False,
    ) -> None:
        self._engine, self._step, self._replicas, self._during = engine, step, replicas, during
        controller, clock = engine.controller, engine.clock
        self.controllers: list[Controller | None] = [controller, follower(controller)]
        self.sensor = sensor_of(controller)
        if self.sensor is not None:
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            sets = replicas.sets(trained)
            masters = [masters_of(optimizer, trained, place) for place in range(len(sets))]
            self.sensor.watch(*sets, masters=masters, knobs=knobs, run=Run(clock, replicas, gradients, multipliers))
        self._line = controller if isinstance(controller, LineController) else None
        if self._line is not None:
            self._line.follow_run(optimizer, lambda tensors: masters_of(optimizer, tensors, 0), knobs, clock, copied)
            self._device = local_parts(optimizer.param_groups[0]["params"][:1])[0].device
            if engine.step:
                self._line.begin_anew(step())

    @property
    def has_line(self) -> bool:
        """Is there one, now or later?"""
        return self._line is not None

    @property
    def sweeping(self) -> bool:
        """Are the weights those of a sweep, which will be taken back?"""
        return self._line is not None and self._line.sweeping

    @property
    def modules(self) -> list[nn.Module]:
        """The models that are scored."""
        return [model for c in self.controllers if isinstance(model := getattr(c, "model", None), nn.Module)]

    # -- a cycle, in this order --------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """The window begins anew: a cycle has begun, or replicas were averaged ahead of time."""
        if self.sensor is not None:
            self.sensor.forget()

    def depart(self) -> None:
        """Before the first optimizer step after an average."""
        if self._line is not None:
            self._line.depart(self._step())
        if self.sensor is not None and self._measures(self._engine.step + self._steps_left):
            self.sensor.depart(self._engine.step)

    def check_closure(self, closure: Closure | None) -> None:
        """While the line has something to read, raises TypeError for a step without one, and in the first step ValueError for one that returns
        no losses, which is then called once."""
        if self._line is not None and self._line.check_closure(closure):
            with self._during("line"):
                self._line.try_closure(closure, self._replicas)

    def sample(self) -> None:
        """A step is done and counted."""
        engine = self._engine
        if self._line is not None:
            self._line.sample(self._step())
        if self.sensor is not None and self._measures(engine.step + self._steps_left):
            self.sensor.sample(engine.position, engine.position + self._steps_left)

    def rows(self, as_replica: Callable[[int], AbstractContextManager[Any]]) -> list[torch.Tensor] | None:
        """At the cycle's end, what the sensor has for each local replica, ``as_replica(place)`` being it; None if nothing is measured."""
        if self.sensor is None or not self._measures(self._engine.step):
            return None
        rows = []
        with self._during("probe"):
            for place in range(len(self._replicas.local)):
                with as_replica(place):
                    rows.append(self.sensor.measure(self._engine.cycle, place))
        return rows

    def heard(self, rows: Sequence[torch.Tensor] | None, slots: Sequence[Slot]) -> dict[str, list[list[float]]]:
        """What has come back of such ``rows`` from all replicas, [replica], under its name in `Engine.close`."""
        if self.sensor is None or rows is None:
            return {}
        scores = self.sensor.split([slot.probe for slot in slots])
        return {} if scores is None else {self.sensor.measures: scores}

    def verdict(self, slots: Sequence[Slot]) -> tuple[Verdict, list[float | None]] | None:
        """In a sweep, where what breaks is taken back and nobody is left out: that, and the losses that its rule is given; else None.

        Raises:
            ValueError: there are none.
        """
        if not self.sweeping:
            return None
        if all(slot.finite and slot.raw_loss is None for slot in slots):
            raise ValueError("a LineController reads the training losses too: call step(loss, closure=...), or observe(loss)")
        all_vote = all(slot.votes for slot in slots)
        # One replica that broke has broken the average of all: its loss may not be left out.
        losses = [slot.loss if all_vote else None for slot in slots]
        return Verdict(list(range(len(slots))), roll_back=False, level=None, notes=[]), losses

    @contextmanager
    def line(self, closure: Closure | None, took_back: Callable[[], object]) -> Iterator[Any]:
        """The line of the interval that ends with this cycle, to be read inside; None if none does.

        Raises:
            ValueError: in a sweep, another optimizer moves parameters of the model. They, and everything else, have been taken back then, and
                ``took_back`` been called.
        """
        due = self._line is not None and self._engine.controls(self._engine.step) and self._line.is_due(self._step())
        if self._line is None or not due:
            yield None
            return
        assert closure is not None  # or check_closure has refused
        with self._during("line"):
            self._check_alone(self._line, took_back)
            with self._line.scores(closure, self._replicas) as line:
                yield line

    def _check_alone(self, line: LineController, took_back: Callable[[], object]) -> None:
        """On all ranks alike: a shard may have moved on one of them only."""
        name = line.moved()
        if not self._replicas.sum_rows(torch.full((1,), float(name is not None), dtype=torch.float64, device=self._device)).any():
            return
        line.take_back()
        took_back()
        which = (
            "a parameter of the LineController's model on another rank"
            if name is None
            else f"the LineController's model has {name!r}, which"
        )
        raise ValueError(
            f"{which} is not this Ensemble's optimizer's, and has moved in the sweep: a second optimizer over the same model would be swept with it, "
            "and its state not be taken back. Put all parameters into one optimizer, as groups; or step the other one only when "
            "ensemble.sweeping is False. (Everything is as it was at the first step again, but for the other optimizer's state.)"
        )

    @property
    def unread(self) -> bool:
        """Was the line left out that would have been read last?"""
        return self._line is not None and self._line.unread > 0

    def settle(self, decisions: Sequence[Decision]) -> bool:
        """After what a line has led to. Returns whether weights were taken back; other replicas of this process are not."""
        return self._line is not None and self._line.settle(self._step(), decisions)

    def begin_anew(self) -> None:
        """Parameters were loaded, or a cycle was taken back: what is under way is worth nothing."""
        if self.sensor is not None:
            self.sensor.begin_anew()
        if self._line is not None:
            self._line.begin_anew(self._step())

    def close(self) -> None:
        """The Ensemble is given up: let go of the optimizer, and of the memory."""
        if self.sensor is not None:
            self.sensor.close()
        if self._line is not None:
            self._line.close()

    def _measures(self, cycle_end: int) -> bool:
        """Is a measurement at the end of the cycle of any use? The same answer on every rank, because rules run on equal inputs."""
        waits = self._line is not None and not self._line.handed_over
        return self.sensor is not None and not self.sensor.idle and not waits and self._engine.controls(cycle_end)

    @property
    def _steps_left(self) -> int:
        """Steps to the end of the running cycle, which the end of the run may cut short."""
        clock = self._engine.clock
        left = self._engine.cycle_length - self._engine.position
        return left if clock.total_steps is None else min(left, max(0, clock.total_steps - self._engine.step))
