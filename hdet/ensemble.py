"""The engine on real tensors: fan out, observe, converge, control (docs/method.md)."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from .checks import agreement, averaged_tensors, check_arguments, check_controller, scheduled_values
from .converge import BucketedAverage
from .converge.average import DEFAULT_BUCKET_BYTES
from .core.clock import Clock
from .core.controllers import Controller
from .core.controllers.softmax import softmax_weights
from .core.engine import CycleOutcome, Engine, KnobSpec
from .fan_out import FanOut
from .knobs import LearningRate, check_disjoint
from .probe import ProbeController
from .ranges import ranged
from .replicas import Replicas
from .slots import Slot, gather_slots, local_replicas, masters_of

__all__ = ["Ensemble", "ReplicasDiverged", "Scheduler", "plain"]


class ReplicasDiverged(RuntimeError):
    """No replica holds finite parameters any more: there is nothing left to average. Raised on every rank alike."""


class Scheduler(Protocol):
    """What an Ensemble asks of a scheduler: any of torch's."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Ensemble:
    """Drives the replicas: call ``ensemble.step(loss)`` where ``scheduler.step()`` was, after ``optimizer.step()``.

    Each process holds one of N, or one process all of them (`CoresidentReplicas`): then every replica's loss is observed inside
    its ``with replicas.use(k)``, and ``ensemble.step()`` follows the one optimizer step.

    Args:
        optimizer: any torch optimizer; its parameters are what is averaged. Gradients must be all-reduced over the replicas (DDP).
            Co-resident replicas need one of hdet's fused optimizers. Groups are added before, or after close().
        scheduler: a torch scheduler of this optimizer; the Ensemble steps it and its values stay the base. None: constant values.
        knobs: what to explore; default ``[LearningRate(spread=1/9)]``.
        replicas: who takes part; default the world if torch.distributed is initialised, else a single replica; or a `CoresidentReplicas`.
        sync_interval: T, optimizer steps between averages, >= 1.
        warmup_steps: S_warm, steps before the controller may act; spread and averages run from the start.
        controller: None, `SoftmaxController`, `ProbeController`, or anything with the protocol of hdet.core.controllers.
        gradients: ``"shared"``: all replicas step with the same all-reduced gradient.
        average: ``"mean"``, or ``"softmax"``: weights of Eq. 4 from the cycle's training losses (sigma 0.1).
        seed: key of the assignments of multipliers; must be equal on all ranks.
        log: called as ``log(record, step)`` once per cycle, with plain data; give it on the rank that writes.
        total_steps: length of the run; default the scheduler's ``total_steps`` if it has one. The last step ends a cycle.
        bucket_bytes: extra memory of the average, in bytes.
        buffers: further floating-point tensors to average (running statistics of BatchNorm); co-resident replicas share theirs.

    Guarantees: at rest param_groups hold base values, the same on all ranks. Only the end of a cycle communicates (one
    collective of a few numbers per replica, then the average) and waits for the device. Replicas that cannot differ
    (spread 0) and are found bitwise equal are not touched: spread 0 is data-parallel training bit for bit.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scheduler: Scheduler | None = None,
        *,
        knobs: Sequence[LearningRate] | None = None,
        replicas: Replicas | None = None,
        sync_interval: int = 1000,
        warmup_steps: int = 0,
        controller: Controller | None = None,
        gradients: str = "shared",
        average: str = "mean",
        seed: int = 0,
        log: Callable[[dict[str, Any], int], object] | None = None,
        total_steps: int | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        buffers: Iterable[torch.Tensor] = (),
    ) -> None:
        # Everything is validated before the optimizer is touched.
        knobs = [LearningRate()] if knobs is None else knobs
        check_arguments(optimizer, scheduler, knobs, replicas, controller, gradients, average, seed, log)
        self.optimizer, self.scheduler, self.average, self.log = optimizer, scheduler, average, log
        self.replicas = Replicas.default() if replicas is None else replicas
        self.parameters = averaged_tensors(optimizer, buffers)
        total_steps = getattr(scheduler, "total_steps", None) if total_steps is None else total_steps
        self.knobs = [bound for knob in knobs for bound in knob.bind(optimizer)]
        specs = [KnobSpec(knob.name, knob.spread) for knob in self.knobs]
        self.engine = Engine(specs, self.replicas.count, Clock(sync_interval, warmup_steps, total_steps), controller, seed)
        self.engine.step = max(0, int(getattr(scheduler, "last_epoch", 0)))
        check_controller(controller, self.engine, [knob.bounds()[1] for knob in self.knobs])
        check_disjoint(self.knobs, tensors=self.engine.explores or controller is not None)
        self._bucket_bytes = bucket_bytes
        self._members = local_replicas(self.replicas, optimizer, self.parameters)
        self._average: Callable[[Sequence[float]], None] = (  # Eq. 3, in place: across processes, or by the optimizer that has all sets
            BucketedAverage(self.parameters, self.replicas, bucket_bytes, self._members[0].masters)
            if len(self._members) == 1
            else optimizer.average_replicas  # type: ignore[attr-defined]
        )
        self._probe = controller if isinstance(controller, ProbeController) else None
        if self._probe is not None:
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            sets = self.replicas.sets(trained)
            self._probe.watch(*sets, masters=[masters_of(optimizer, trained, place) for place in range(len(sets))])

        self._agreed = False
        self._lockstep = self.replicas.count == 1  # replicas are known to be equal and cannot part in this cycle
        self._notes: list[str] = []
        self.history: dict[str, Any] | None = None
        """The last cycle's record, as `log` gets it; None before the first. Keys: event ("cycle"), cycle (from 0), step (optimizer steps);
        by knob: values (base value in force from now on), scheduled (the untouched schedule's), corrections, slopes, errors (nats
        per unit of ln rho; None without a probe), t, multipliers ([N], of the cycle that ended); by replica: losses (mean training
        loss, None if it must not count), probe (mean probe loss; None without one); left_out (replicas without a vote), converge_ms,
        probe_ms (milliseconds on this rank), notes (text)."""
        self._fan_out = FanOut(optimizer, self.knobs, self.replicas.local[0])
        self.replicas.attach(optimizer)
        self._begin_cycle()

    # -- the loop --------------------------------------------------------------------------------------------------------

    def observe(self, loss: torch.Tensor | float, weight: torch.Tensor | float = 1.0, replica: int | None = None) -> None:
        """Add a loss of this replica to the running cycle (per micro-batch, with its weight, e.g. its tokens). Never synchronises.

        Among co-resident replicas it is the one in ``use``, or ``replica``.

        Raises:
            ValueError: not a scalar, or a negative weight; or nothing says which replica's it is.
        """
        self._members[self.replicas.place(replica)].window.add(loss, weight)

    def step(self, loss: torch.Tensor | float | None = None) -> None:
        """After optimizer.step(): step the scheduler and count; at the end of a cycle average the replicas and let the controller act.

        Several calls for one optimizer step (accelerate steps a prepared scheduler once per process) advance the schedule,
        as they do in torch, but count one step of the cycle; a call without an optimizer step counts none. The end of the
        schedule ends the last cycle in either case.

        Raises:
            ReplicasDiverged: at the end of a cycle no replica has finite parameters.
        """
        self._check_outside_use("step", "call it once per optimizer step, after all of them")
        if loss is not None:
            self.observe(loss)
        if not self._agreed:
            # Once: ranks that are not in the same run would average nonsense.
            settings = agreement(self.engine, self.parameters, self.average, self._bucket_bytes)
            self.replicas.require_agreement(settings, self.parameters[0].device)
            self._agreed = True
        try:
            self._advance_schedule()
            ends = False
            if self._fan_out.take_stepped():
                ends = self.engine.tick()
                if self._probe is not None and self._will_probe(self.engine.step + self._steps_left()):
                    self._probe.sample(self.engine.position, self.engine.position + self._steps_left())
            if ends or (self._schedule_is_over() and self.engine.position > 0):
                self._end_cycle()
        finally:  # also when the schedule is past its end, or the user's loss or log raises: at rest there is the base value
            self._write_values()

    def converge(self) -> None:
        """Average the replicas now, e.g. before saving or evaluating; every rank must call it. The cycle goes on, its window starts anew.

        A replica that is left out because its parameters are not finite is noted in the next record and warned of.
        """
        self._check_outside_use("converge", "it is of all replicas, call it after")
        if self.replicas.count == 1:
            return
        slots = gather_slots(self.replicas, self._members, None, compare=True)
        notes = self._average_replicas(slots, compared=True)
        for note in notes:
            warnings.warn(f"converge: {note}", stacklevel=2)
        self._notes += notes
        self._forget_window()

    @property
    def converged(self) -> bool:
        """Are the replicas' parameters equal right now, as known from the last average and the steps since?"""
        return self._lockstep or not self._fan_out.moved

    # -- what is known ---------------------------------------------------------------------------------------------------

    @property
    def cycle(self) -> int:
        """Cycles completed."""
        return self.engine.cycle

    @property
    def corrections(self) -> dict[str, float]:
        return {knob.name: c for knob, c in zip(self.knobs, self.engine.corrections, strict=True)}

    @property
    def multipliers(self) -> dict[str, float]:
        """rho of this replica (of co-resident ones the one in ``use``) in the running cycle, by knob."""
        own = self._fan_out.multipliers[self.replicas.local.index(self.replicas.index)]
        return {knob.name: rho for knob, rho in zip(self.knobs, own, strict=True)}

    def values(self) -> dict[str, float]:
        """Corrected base value by knob: what param_groups hold at rest."""
        return {knob.name: self.engine.value(k, knob.scheduled_value()) for k, knob in enumerate(self.knobs)}

    def _check_outside_use(self, name: str, remedy: str) -> None:
        if self.replicas.in_use:
            raise ValueError(f"ensemble.{name}() was called inside `with replicas.use(k):`; {remedy}")

    # -- a cycle ---------------------------------------------------------------------------------------------------------

    def _begin_cycle(self) -> None:
        self._forget_window()
        table = self.engine.multipliers()
        self._fan_out.assign(*([row[r] for row in table] for r in self.replicas.local))

    def _forget_window(self) -> None:
        for member in self._members:
            member.window.reset()
        if self._probe is not None:
            self._probe.forget()

    def _schedule_is_over(self) -> bool:
        """Where a scheduler is stepped several times per optimizer step, its end is the run's."""
        total = getattr(self.scheduler, "total_steps", None)
        return total is not None and getattr(self.scheduler, "last_epoch", None) == total

    def _will_probe(self, cycle_end: int) -> bool:
        """Is a probe at the end of the cycle of any use? The same answer on every rank, because rules run on equal inputs."""
        return self._probe is not None and not self._probe.idle and self.engine.clock.controls(cycle_end)

    def _steps_left(self) -> int:
        """Steps to the end of the running cycle, which the end of the run may cut short."""
        clock = self.engine.clock
        left = clock.sync_interval - self.engine.position
        return left if clock.total_steps is None else min(left, max(0, clock.total_steps - self.engine.step))

    def _advance_schedule(self) -> None:
        for knob in self.knobs:
            knob.show_schedule()
        if self.scheduler is not None:
            self.scheduler.step()
        for knob in self.knobs:
            knob.take_schedule()

    def _write_values(self) -> None:
        for k, knob in enumerate(self.knobs):
            knob.write(self.engine.corrections[k], self.engine.bases[k])

    @ranged("hdet.cycle")
    def _end_cycle(self) -> None:
        started = self._now()
        compare = not self.engine.explores
        rows = self._measure() if self._will_probe(self.engine.step) else None
        probed = self._now()
        slots = gather_slots(self.replicas, self._members, rows, compare=compare)
        scores = None if rows is None or self._probe is None else self._probe.split([slot.probe for slot in slots])
        self._notes += self._average_replicas(slots, compared=compare)
        averaged = self._now()
        peaks, floors = zip(*(knob.bounds() for knob in self.knobs), strict=True)
        losses = [slot.loss for slot in slots]
        outcome = self.engine.close(
            losses,
            scores if scores is None else [row if slot.votes else None for row, slot in zip(scores, slots, strict=True)],
            scheduled=[knob.scheduled_value() for knob in self.knobs],
            peak=peaks,
            floor=floors,
            schedule_step=getattr(self.scheduler, "last_epoch", None),
        )
        self._lockstep = not self.engine.explores  # equal now; do they part in the next cycle?
        self._keep_record(outcome, losses, scores, 1e3 * (probed - started), 1e3 * (averaged - probed))
        self._begin_cycle()
        if self.log is not None and self.history is not None:
            self.log(self.history, self.engine.step)

    def _measure(self) -> list[torch.Tensor]:
        """The probe's row of each local replica, at its own cycle average."""
        assert self._probe is not None
        rows = []
        for place, r in enumerate(self.replicas.local):
            with self.replicas.use(r):
                rows.append(self._probe.measure(self.engine.cycle, place))
        return rows

    @ranged("hdet.converge")
    def _average_replicas(self, slots: Sequence[Slot], *, compared: bool) -> list[str]:
        """Eq. 3 over the healthy replicas. Returns notes for the record."""
        healthy = [r for r, slot in enumerate(slots) if slot.finite]
        if not healthy:
            raise ReplicasDiverged(
                f"cycle {self.engine.cycle} (step {self.engine.step}): no replica has finite parameters left. "
                "Resume from the last checkpoint with a lower rate or spread, or clip gradients"
            )
        # Equal replicas are left alone: N times x / N is not always x in floating point, and spread 0 is to be DDP bit for bit.
        if not (compared and len({slot.digest for slot in slots}) == 1):
            self._average(self._weights(slots, healthy))
        self._lockstep = not self.engine.explores
        self._fan_out.moved = False
        return [f"replica {r} left out of the average: parameters not finite" for r in range(len(slots)) if r not in healthy]

    def _weights(self, slots: Sequence[Slot], healthy: list[int]) -> list[float]:
        """w_r: uniform over the healthy replicas, or Eq. 4 (uniform again where a healthy one has no loss)."""
        weights = [1 / len(healthy) if r in healthy else 0.0 for r in range(len(slots))]
        losses = [loss for loss in (slots[r].loss for r in healthy) if loss is not None]
        if self.average == "softmax" and len(losses) == len(healthy):
            for r, w in zip(healthy, softmax_weights(losses, 0.1), strict=True):
                weights[r] = w
        return weights

    def _keep_record(
        self, outcome: CycleOutcome, losses: list[float | None], scores: list[list[float]] | None, probe_ms: float, converge_ms: float
    ) -> None:
        def by_knob(values: Iterable[Any]) -> dict[str, Any]:
            return dict(zip((knob.name for knob in self.knobs), values, strict=True))

        self.history = {
            "event": "cycle",
            "cycle": outcome.cycle,
            "step": self.engine.step,
            "values": self.values(),
            "scheduled": by_knob(knob.scheduled_value() for knob in self.knobs),
            "corrections": self.corrections,
            "slopes": by_knob(d.slope for d in outcome.decisions),
            "errors": by_knob(d.error for d in outcome.decisions),
            "t": by_knob(d.t for d in outcome.decisions),
            "multipliers": by_knob(outcome.multipliers),
            "losses": losses,
            "probe": None if scores is None else [_finite_mean(row) for row in scores],
            "left_out": outcome.left_out,
            "converge_ms": converge_ms,
            "probe_ms": probe_ms,
            "notes": self._notes + outcome.notes,
        }
        self._notes = []

    def _now(self) -> float:
        """Seconds; once the device is done if somebody will read the difference (a log is given)."""
        if self.log is not None and self.parameters[0].is_cuda:
            torch.cuda.synchronize(self.parameters[0].device)
        return time.perf_counter()

    # -- checkpoint ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts; no communication; the same on every rank; loads with another N.

        Save when `converged`: in the middle of a cycle each replica has its own parameters, and the window of the running
        cycle is not part of the state (a warning says so).
        """
        if not self.converged and self.engine.explores and (self.engine.position or self._fan_out.stepped):
            warnings.warn(
                "saving in the middle of a cycle: this replica's parameters are not the average; call converge() on all ranks first",
                stacklevel=2,
            )
        return {
            **self.engine.state_dict(),
            "scheduled": {knob.name: [float(x) for x in knob.scheduled] for knob in self.knobs},
            "scheduler": None if self.scheduler is None else plain(self.scheduler.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a run. Load parameters and optimizer too, in any order; N may differ from the saved run's.

        Raises:
            ValueError: another version, missing keys, other knobs or another controller; nothing is changed then.
        """
        self.engine.check_state(state)
        scheduled = scheduled_values(state, self.knobs, self.scheduler)
        self.engine.load_state_dict(state)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        for knob in self.knobs:
            knob.scheduled = scheduled[knob.name]
        self._write_values()
        # What other ranks have loaded is not known here: the next step compares, and the next average makes equal.
        self._agreed, self._lockstep = False, self.replicas.count == 1
        self._begin_cycle()

    def close(self) -> None:
        """Take the multiplier off the optimizer for good. Parameters stay as they are: converge() first."""
        self._fan_out.close()
        self.replicas.detach()


def _finite_mean(values: Sequence[float]) -> float | None:
    mean = sum(values) / len(values)
    return mean if math.isfinite(mean) else None


def plain(value: Any) -> Any:
    """Tensors as numbers, so that a state loads with weights_only and holds no device."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
