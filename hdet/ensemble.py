"""The engine on real tensors: fan out, observe, converge, control (method.md, section 1)."""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .converge import BucketedAverage, all_finite, digest
from .converge.average import DEFAULT_BUCKET_BYTES, check_averageable
from .core.clock import Clock
from .core.controllers import Controller
from .core.controllers.softmax import softmax_weights
from .core.engine import STATE_VERSION, CycleOutcome, Engine, KnobSpec
from .fan_out import FanOut
from .knobs import LearningRate, check_not_shared
from .probe import ProbeController
from .replicas import Replicas
from .window import LossWindow

__all__ = ["Ensemble", "ReplicasDiverged", "Scheduler"]

_FINITE, _LOSS, _WEIGHT, _DIGEST, _PROBE = 0, 1, 2, slice(3, 5), 5
"""Slots of one replica in the cycle's collective: parameters finite, weighted loss sum, weight, digest, then the probe's row."""


class ReplicasDiverged(RuntimeError):
    """No replica holds finite parameters any more: there is nothing left to average. Raised on every rank alike."""


class Scheduler(Protocol):
    """What an Ensemble asks of a scheduler: any of torch's."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Ensemble:
    """Drives one replica of N: call ``ensemble.step(loss)`` where ``scheduler.step()`` was, after ``optimizer.step()``.

    Args:
        optimizer: any torch optimizer; its parameters are what is averaged. Gradients must be all-reduced over the replicas (DDP).
        scheduler: a torch scheduler of this optimizer; the Ensemble steps it and its values stay the base. None: constant values.
        knobs: what to explore; default ``[LearningRate(spread=1/9)]``.
        replicas: who takes part; default the world if torch.distributed is initialised, else a single replica.
        sync_interval: T, optimizer steps between averages, >= 1.
        warmup_steps: S_warm, steps before the controller may act; spread and averages run from the start.
        controller: None, `SoftmaxController`, `ProbeController`, or anything with the protocol of hdet.core.controllers.
        gradients: ``"shared"``: all replicas step with the same all-reduced gradient.
        average: ``"mean"``, or ``"softmax"``: weights of Eq. 4 from the cycle's training losses (sigma 0.1).
        seed: key of the assignments of multipliers; must be equal on all ranks.
        log: called as ``log(record, step)`` once per cycle, with plain data; give it on the rank that writes.
        total_steps: length of the run; default the scheduler's ``total_steps`` if it has one. The last step ends a cycle.
        bucket_bytes: extra memory of the average, in bytes.
        buffers: further floating-point tensors to average (running statistics of BatchNorm).

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
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError(
                "scheduler is ReduceLROnPlateau, whose step needs a metric: use a schedule of steps; the controller is what reacts to losses"
            )
        if gradients != "shared":
            raise ValueError(
                f"gradients must be 'shared' (all-reduced every step, as under DDP), got {gradients!r}: other modes do not exist yet"
            )
        if average not in ("mean", "softmax"):
            raise ValueError(f"average must be 'mean' or 'softmax', got {average!r}")
        if not isinstance(seed, int):
            raise ValueError(f"seed must be a whole number, got {seed!r}")
        self.optimizer, self.scheduler, self.average, self.log = optimizer, scheduler, average, log
        self.replicas = Replicas.default() if replicas is None else replicas
        self.parameters = _averaged_tensors(optimizer, buffers)
        total_steps = getattr(scheduler, "total_steps", None) if total_steps is None else total_steps
        clock = Clock(sync_interval, warmup_steps, total_steps)
        self.knobs = [bound for knob in ([LearningRate()] if knobs is None else knobs) for bound in knob.bind(optimizer)]
        self.engine = Engine([KnobSpec(k.name, k.spread) for k in self.knobs], self.replicas.count, clock, controller, seed)
        self.engine.step = max(0, int(getattr(scheduler, "last_epoch", 0)))
        self._probe = controller if isinstance(controller, ProbeController) else None
        _check_controller(controller, self.replicas.count, len(self.knobs))
        if controller is not None and hasattr(controller, "check_run"):
            controller.check_run(total_steps, [knob.bounds()[1] for knob in self.knobs])
        if self.engine.explores or controller is not None:
            check_not_shared(self.knobs)
        self._average = BucketedAverage(self.parameters, self.replicas, bucket_bytes)

        device = self.parameters[0].device
        self._window = LossWindow(device)
        self._agreed = False
        self._converged = True
        self._lockstep = self.replicas.count == 1
        self.history: dict[str, Any] | None = None
        if self._probe is not None:
            self._probe.watch([p for group in optimizer.param_groups for p in group["params"]])
        self._fan_out = FanOut(optimizer, self.knobs)
        self._begin_cycle()

    # -- the loop --------------------------------------------------------------------------------------------------------

    def observe(self, loss: torch.Tensor | float, weight: torch.Tensor | float = 1.0) -> None:
        """Add a loss of this replica to the running cycle (per micro-batch, with its weight, e.g. its tokens). Never synchronises.

        Raises:
            ValueError: not a scalar, or a negative weight.
        """
        self._window.add(loss, weight)

    def step(self, loss: torch.Tensor | float | None = None) -> None:
        """After optimizer.step(): step the scheduler and count; at the end of a cycle average the replicas and let the controller act.

        Several calls for one optimizer step (accelerate steps a prepared scheduler once per process) advance the schedule,
        as they do in torch, but count one step of the cycle; a call without an optimizer step counts none. The run's length is
        then the scheduler's total_steps divided by the calls: pass it as ``total_steps``, or do not prepare the scheduler.

        Raises:
            ReplicasDiverged: at the end of a cycle no replica has finite parameters.
        """
        if loss is not None:
            self.observe(loss)
        if not self._agreed:
            self._require_agreement()
        self._advance_schedule()
        if self._fan_out.take_stepped():
            self._converged = self._lockstep
            ends = self.engine.tick()
            if self._probe is not None and self._will_probe(self.engine.step + self._steps_left()):
                self._probe.sample(self.engine.position, self.engine.position + self._steps_left())
            if ends:
                self._end_cycle()
        self._write_values()

    def converge(self) -> None:
        """Average the replicas now, e.g. before saving or evaluating; every rank must call it. The cycle goes on, its window starts anew."""
        if not self.converged:
            slots = self._gather(None)
            self._average_replicas(slots, [])
            self._forget_window()

    @property
    def converged(self) -> bool:
        """Are the replicas' parameters equal right now (as far as HDET moved them apart)?"""
        return self._converged and (self._lockstep or not self._fan_out.stepped)

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
        """rho of this replica in the running cycle, by knob."""
        return {knob.name: rho for knob, rho in zip(self.knobs, self._fan_out.multipliers, strict=True)}

    def values(self) -> dict[str, float]:
        """Corrected base value by knob: what param_groups hold at rest."""
        return {knob.name: self.engine.value(k, knob.scheduled_value()) for k, knob in enumerate(self.knobs)}

    # -- a cycle ---------------------------------------------------------------------------------------------------------

    def _begin_cycle(self) -> None:
        self._forget_window()
        self._fan_out.assign([row[self.replicas.index] for row in self.engine.multipliers()])

    def _forget_window(self) -> None:
        self._window.reset()
        if self._probe is not None:
            self._probe.forget()

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

    def _end_cycle(self) -> None:
        started = self._now()
        probe = self._probe.measure(self.engine.cycle) if self._probe is not None and self._will_probe(self.engine.step) else None
        probed = self._now()
        slots = self._gather(probe)
        losses = [_mean_loss(slot) for slot in slots]
        scores = self._probe.split([slot[_PROBE:] for slot in slots]) if probe is not None and self._probe is not None else None
        notes = self._average_replicas(slots, losses)
        averaged = self._now()
        peaks, floors = zip(*(knob.bounds() for knob in self.knobs), strict=True)
        outcome = self.engine.close(
            losses, scores if scores is None else [row if slot[_FINITE] else None for row, slot in zip(scores, slots, strict=True)],
            scheduled=[knob.scheduled_value() for knob in self.knobs], peak=peaks, floor=floors,
            schedule_step=getattr(self.scheduler, "last_epoch", None),
        )  # fmt: skip
        self._record(outcome, losses, scores, notes, 1e3 * (probed - started), 1e3 * (averaged - probed))
        self._begin_cycle()

    def _gather(self, probe: torch.Tensor | None) -> list[list[float]]:
        """One row of slots per replica, the same on every rank. The one place of a cycle that waits for the device."""
        finite = all_finite(self.parameters)
        marks = finite.new_zeros(2) if self.engine.explores else digest(self.parameters)
        row = torch.cat(
            [finite.reshape(1), self._window.slots().to(finite.device), marks, *([] if probe is None else [probe.to(finite.device)])]
        )
        return self.replicas.gather_rows(row).tolist()

    def _average_replicas(self, slots: list[list[float]], losses: Sequence[float | None]) -> list[str]:
        """Eq. 3 over the healthy replicas. Returns notes for the record."""
        healthy = [r for r, slot in enumerate(slots) if slot[_FINITE]]
        if not healthy:
            raise ReplicasDiverged(
                f"cycle {self.engine.cycle} (step {self.engine.step}): no replica has finite parameters left. "
                "Resume from the last checkpoint with a lower rate or spread, or clip gradients"
            )
        # Equal replicas are left alone: N times x / N is not always x in floating point, and spread 0 is to be DDP bit for bit.
        if self.engine.explores or len({tuple(slot[_DIGEST]) for slot in slots}) > 1:
            self._average(self._weights(healthy, losses)[self.replicas.index])
        self._converged, self._lockstep = True, not self.engine.explores
        return [f"replica {r} left out of the average: parameters not finite" for r in range(len(slots)) if r not in healthy]

    def _weights(self, healthy: list[int], losses: Sequence[float | None]) -> list[float]:
        weights = [1 / len(healthy) if r in healthy else 0.0 for r in range(self.replicas.count)]
        if self.average == "softmax" and losses and all(losses[r] is not None for r in healthy):
            for r, w in zip(healthy, softmax_weights([losses[r] or 0.0 for r in healthy], 0.1), strict=True):
                weights[r] = w
        return weights

    def _record(
        self, outcome: CycleOutcome, losses: Sequence[float | None], scores: list[list[float]] | None,
        notes: list[str], probe_ms: float, converge_ms: float,
    ) -> None:  # fmt: skip
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
            "losses": list(losses),
            "probe": None if scores is None else [sum(row) / len(row) for row in scores],
            "left_out": outcome.left_out,
            "converge_ms": converge_ms,
            "probe_ms": probe_ms,
            "notes": notes + outcome.notes,
        }
        if self.log is not None:
            self.log(self.history, self.engine.step)

    def _now(self) -> float:
        """Seconds; once the device is done if somebody will read the difference (a log is given)."""
        if self.log is not None and self.parameters[0].is_cuda:
            torch.cuda.synchronize(self.parameters[0].device)
        return time.perf_counter()

    def _require_agreement(self) -> None:
        """Once, at the first step: the ranks must be in the same run, or their averages would be nonsense."""
        shapes = hashlib.sha256(str([(tuple(p.shape), str(p.dtype)) for p in self.parameters]).encode()).digest()
        knobs = hashlib.sha256(str([(k.name, k.spread) for k in self.knobs]).encode()).digest()
        self.replicas.require_agreement(
            {
                "the version of the state": STATE_VERSION,
                "the number of replicas": self.replicas.count,
                "seed": self.engine.seed % (1 << 52),
                "sync_interval": self.engine.clock.sync_interval,
                "the parameters' shapes and dtypes (digest)": int.from_bytes(shapes[:6], "big"),
                "the knobs (digest)": int.from_bytes(knobs[:6], "big"),
                "the cycle": self.engine.cycle,
                "the step": self.engine.step,
            },
            self.parameters[0].device,
        )
        self._agreed = True

    # -- checkpoint ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts; no communication; the same on every rank; loads with another N.

        Save when `converged`: in the middle of a cycle each replica has its own parameters, and the window of the running
        cycle is not part of the state (a warning says so).
        """
        if not self.converged and self.engine.explores:
            warnings.warn(
                "saving in the middle of a cycle: this replica's parameters are not the average; call converge() on all ranks first",
                stacklevel=2,
            )
        return {
            **self.engine.state_dict(),
            "scheduled": {knob.name: [float(x) for x in knob.scheduled] for knob in self.knobs},
            "scheduler": None if self.scheduler is None else _plain(self.scheduler.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a run. Load parameters and optimizer too, in any order; N may differ from the saved run's.

        Raises:
            ValueError: another version, missing keys, other knobs or another controller; nothing is changed then.
        """
        self.engine.check_state(state)
        absent = [key for key in ("scheduled", "scheduler") if key not in state]
        if absent or (state["scheduler"] is None) != (self.scheduler is None):
            raise ValueError(
                f"the ensemble's state {f'lacks {absent}' if absent else 'and this run differ in having a scheduler'}: construct it as the saved run did"
            )
        self.engine.load_state_dict(state)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        for knob in self.knobs:
            knob.scheduled = list(state["scheduled"][knob.name])
        self._write_values()
        self._begin_cycle()

    def close(self) -> None:
        """Take the multiplier off the optimizer for good. Parameters stay as they are: converge() first."""
        self._fan_out.close()


def _mean_loss(slot: Sequence[float]) -> float | None:
    """Mean training loss of one replica's cycle; None if it has none, or one that must not count."""
    usable = slot[_WEIGHT] > 0 and slot[_FINITE] and math.isfinite(slot[_LOSS])
    return slot[_LOSS] / slot[_WEIGHT] if usable else None


def _averaged_tensors(optimizer: Optimizer, buffers: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    for i, tensor in enumerate(tensors):
        check_averageable(tensor, f"parameter {i}")
    if not tensors:
        raise ValueError("optimizer has no parameters: there is nothing to train")
    for i, buffer in enumerate(buffers):
        check_averageable(buffer, f"buffer {i}")
        tensors.append(buffer)
    return tensors


def _check_controller(controller: Controller | None, replicas: int, knobs: int) -> None:
    if controller is None:
        return
    if not isinstance(controller, Controller):
        raise TypeError(f"controller must have name, needs_probe, update, state_dict and load_state_dict, got {type(controller).__name__}")
    if replicas == 1:
        warnings.warn("one replica explores nothing: the controller will never move a value", stacklevel=3)
    elif controller.needs_probe and knobs > replicas - 1:
        raise ValueError(
            f"{replicas} replicas can tell at most {replicas - 1} knobs apart, got {knobs}: use LearningRate(groups=None) for one common knob, or more replicas"
        )


def _plain(value: Any) -> Any:
    """Tensors as numbers, so that a state loads with weights_only and holds no device."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
