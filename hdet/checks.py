"""Everything an Ensemble refuses, before it touches the optimizer; and what all ranks must agree on."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .converge.average import check_averageable
from .core.controllers import Controller
from .core.controllers.protocol import require_keys
from .core.engine import STATE_VERSION, Engine
from .knobs import GroupKnob
from .replicas import Replicas

__all__ = ["agreement", "averaged_tensors", "check_arguments", "check_controller", "check_dense_gradients", "scheduled_values"]


def check_arguments(
    optimizer: Any, scheduler: Any, knobs: Any, replicas: Any, controller: Any, gradients: Any, average: Any, seed: Any, log: Any
) -> None:
    """Raises TypeError for an object of another kind, ValueError for a value that cannot be used; both name argument, value and remedy."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            "scheduler is ReduceLROnPlateau, whose step needs a metric: use a schedule of steps; the controller reacts to losses"
        )
    if scheduler is not None and not all(callable(getattr(scheduler, name, None)) for name in ("step", "state_dict", "load_state_dict")):
        raise TypeError(f"scheduler must have step, state_dict and load_state_dict like torch's, got {type(scheduler).__name__}")
    if scheduler is not None and getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError("scheduler belongs to another optimizer: build it with the one given to the Ensemble")
    if isinstance(knobs, (str, bytes)) or not isinstance(knobs, Sequence) or not all(hasattr(knob, "bind") for knob in knobs):
        raise TypeError(f"knobs must be a list of knobs such as [hdet.LearningRate(spread=1/9)], got {knobs!r}")
    if replicas is not None and not isinstance(replicas, Replicas):
        raise TypeError(
            f"replicas must be an hdet.Replicas, e.g. Replicas.from_group(group), or an hdet.CoresidentReplicas, got {type(replicas).__name__}"
        )
    if replicas is not None:
        replicas.check_optimizer(optimizer)
    if isinstance(controller, type) or (controller is not None and not isinstance(controller, Controller)):
        raise TypeError(
            f"controller must be an object with name, needs_probe, update, state_dict and load_state_dict, got {controller!r}: "
            "pass hdet.SoftmaxController() or hdet.ProbeController(...)"
        )
    if getattr(controller, "needs_probe", False):
        missing = [name for name in ("watch", "sample", "measure", "split", "forget") if not hasattr(controller, name)]
        if missing:
            raise TypeError(
                f"controller {type(controller).__name__} needs a probe but lacks {', '.join(missing)}: give its rule to ProbeController(rule=...)"
            )
    if gradients != "shared":
        raise ValueError(
            f"gradients must be 'shared' (all-reduced every step, as under DDP), got {gradients!r}: other modes do not exist yet"
        )
    if average not in ("mean", "softmax"):
        raise ValueError(f"average must be 'mean' or 'softmax', got {average!r}")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"seed must be a whole number, got {seed!r}")
    if log is not None and not callable(log):
        raise TypeError(f"log must be callable as log(record, step), got {type(log).__name__}")


def averaged_tensors(optimizer: Optimizer, buffers: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The optimizer's parameters, then the buffers.

    Raises:
        ValueError: nothing to average, or a tensor that cannot be.
    """
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    if not tensors:
        raise ValueError("optimizer has no parameters: there is nothing to train")
    buffers = list(buffers)
    for name, group in (("parameter", tensors), ("buffer", buffers)):
        for i, tensor in enumerate(group):
            check_averageable(tensor, f"{name} {i}")
    return tensors + buffers


def check_controller(controller: Controller | None, engine: Engine, floor: Sequence[float]) -> None:
    """Is this run one the controller can work in? ``floor``: lowest value of each knob's schedule. Raises ValueError if not."""
    if controller is None:
        return
    if hasattr(controller, "check_run"):
        controller.check_run(engine.clock.total_steps, floor)
    replicas, knobs = engine.replicas, len(engine.knobs)
    if replicas == 1:
        warnings.warn("one replica explores nothing: the controller will never move a value", stacklevel=4)
    elif controller.needs_probe and knobs > replicas - 1:
        raise ValueError(
            f"{replicas} replicas can tell at most {replicas - 1} knobs apart, got {knobs}: "
            "use LearningRate(groups=None) for one common knob, or more replicas"
        )


def check_dense_gradients(optimizer: Optimizer) -> None:
    """Raises ValueError for a sparse gradient: replicas' steps along it would differ in which rows they touch."""
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if p.grad is not None and p.grad.layout is not torch.strided:
                raise ValueError(
                    f"the gradient of parameter {i} in group {g} is {p.grad.layout}: use dense gradients (Embedding(sparse=False))"
                )


def agreement(engine: Engine, parameters: Sequence[torch.Tensor], average: str, bucket_bytes: int) -> dict[str, int]:
    """What must be the same on all ranks, as whole numbers below 2^53 with names that users know."""
    clock, controller = engine.clock, engine.controller
    return {
        "the version of the state": STATE_VERSION,
        "the number of replicas": engine.replicas,
        "seed": engine.seed % (1 << 52),
        "sync_interval": clock.sync_interval,
        "warmup_steps": clock.warmup_steps,
        "total_steps": -1 if clock.total_steps is None else clock.total_steps,
        "bucket_bytes": bucket_bytes,
        "average (digest)": _digest(average),
        "the parameters' shapes and dtypes (digest)": _digest([(tuple(p.shape), str(p.dtype)) for p in parameters]),
        "the knobs (digest)": _digest([(knob.name, knob.spread) for knob in engine.knobs]),
        "the controller and its settings (digest)": _digest(None if controller is None else (controller.name, _settings(controller))),
        "the state (digest)": _digest(engine.state_dict()),
    }


def scheduled_values(state: Mapping[str, Any], knobs: Sequence[GroupKnob], scheduler: Any) -> dict[str, list[float]]:
    """The schedule's own values by knob, out of an ensemble's state. Raises ValueError for a state of another run, or a damaged one."""
    require_keys(state, ("scheduled", "scheduler"), "ensemble's")
    if (state["scheduler"] is None) != (scheduler is None):
        raise ValueError("the ensemble's state and this run differ in having a scheduler: construct it as the saved run did")
    if scheduler is not None and not isinstance(state["scheduler"], Mapping):
        raise ValueError(
            f"the ensemble's state has a {type(state['scheduler']).__name__} where the scheduler's state should be: it is damaged"
        )
    total = (state["scheduler"] or {}).get("total_steps")
    if total is not None and total != getattr(scheduler, "total_steps", total):
        raise ValueError(
            f"the saved run has total_steps {total!r}, this one {getattr(scheduler, 'total_steps', None)!r}: build the scheduler as the saved run did"
        )
    try:
        scheduled = {knob.name: [float(x) for x in state["scheduled"][knob.name]] for knob in knobs}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the ensemble's state has unusable scheduled values ({error}): it is damaged") from error
    for knob in knobs:
        if len(scheduled[knob.name]) != len(knob.indices):
            raise ValueError(
                f"the ensemble's state has {len(scheduled[knob.name])} scheduled values for {knob.name!r}, this run {len(knob.indices)} groups"
            )
    return scheduled


def _settings(controller: Any) -> list[tuple[str, Any]]:
    """The plain attributes of a controller and of its rule."""
    plain = [(name, value) for name, value in sorted(vars(controller).items()) if isinstance(value, (int, float, str, type(None)))]
    return plain + (_settings(controller.rule) if hasattr(controller, "rule") else [])


def _digest(value: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:6], "big")
