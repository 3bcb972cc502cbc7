"""Everything an Ensemble refuses before it touches the optimizer."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    LRScheduler,
    ReduceLROnPlateau,
)

from ..converge.buckets import check_averageable
from ..converge.sync import Sync
from ..core.controller import Controller
from ..core.design import is_orthogonal_possible
from ..core.divergence import Divergence
from ..core.evidence import Run
from ..knobs import BoundKnob
from ..optim.snapshot import is_schedule_free, keeps_codes, keeps_weights
from ..replicas import Replicas
from ..replicas.layout import brief
from ..replicas.refusals import check_wrapper
from ..tensors.buffers import ReplicaTensors
from ..tensors.dtensor import local_parts
from ..trial.auto import AutoLR
from .moments import follows_gradients

__all__ = [
    "averaged_tensors",
    "check_arguments",
    "check_averaged",
    "check_controller",
    "checked_design",
]

_KINDS = {
    "replicas": (Replicas, "Replicas.from_group(group) or CoresidentReplicas(model, 4)"),
    "search": (AutoLR, "AutoLR(model)"),
    "controller": (Controller, "ProbeController(...); an AutoLR is passed as search"),
    "sync": (Sync, "Sync(50)"),
    "divergence": (Divergence, "Divergence(rollback='device')"),
}
"""By argument: its class, and an example."""


def check_arguments(
    optimizer: Any, scheduler: Any, knobs: Any, *, seed: Any, log: Any, **others: Any
) -> None:
    """Raises TypeError for an object of another kind, ValueError for a value that cannot be used;
    both name argument, value and remedy. ``others``: of `_KINDS`, None where there is none."""
    _check_optimizer(optimizer)
    if type(seed) is not int:
        raise ValueError(f"seed must be a whole number, got {seed!r}")
    if log is not None and not callable(log):
        raise TypeError(
            "log must be callable as log(record, step), such as hdet.logging.History(path), got "
            f"{type(log).__name__}"
        )
    _check_scheduler(scheduler, optimizer)
    if not isinstance(knobs, Sequence) or not all(
        hasattr(knob, "bind") and not isinstance(knob, type) for knob in knobs
    ):
        raise TypeError(
            f"knobs must be a list of knobs such as [hdet.LearningRate(spread=1/9)], got {knobs!r}"
        )
    for name, value in others.items():
        kind, example = _KINDS[name]
        if value is not None and not isinstance(value, kind):
            given = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
            raise TypeError(
                f"{name} must be an hdet.{kind.__name__}, such as hdet.{example}, got {given}"
            )
    replicas, sync = others["replicas"], others["sync"]
    if replicas is None:
        return
    replicas.check_optimizer(optimizer)
    if len(replicas.local) > 1 and (sync.gradients == "local" or sync.converge.needs_processes):
        raise ValueError(
            f"gradients is {sync.gradients!r} and converge {sync.converge!r}, but co-resident "
            "replicas share one gradient, and their optimizer averages them: leave both out"
        )


def _check_optimizer(optimizer: Any) -> None:
    check_wrapper(optimizer)  # some are no torch optimizers, and have a better message
    if not isinstance(optimizer, Optimizer):
        remedy = ""
        if isinstance(optimizer, nn.Module):
            remedy = ": pass torch.optim.AdamW(model.parameters())"
        elif isinstance(optimizer, LRScheduler):
            remedy = ": the optimizer comes first, then its scheduler"
        elif isinstance(getattr(optimizer, "optimizer", None), Optimizer):
            remedy = ": pass the one inside, its .optimizer"
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}{remedy}"
        )
    if getattr(optimizer, "_hdet_fan_out", None) is not None:
        raise ValueError(
            "this optimizer is already driven by an Ensemble or OneCycleAutoLR: use one, or "
            "close() the other first"
        )


def _check_scheduler(scheduler: Any, optimizer: Optimizer) -> None:
    if scheduler is None:
        return
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            "scheduler is ReduceLROnPlateau, whose step needs a metric: leave it out, and step it "
            "where the metric is known:\n"
            "    with ensemble.rescheduling():\n"
            "        scheduler.step(metric)"
        )
    if not callable(getattr(scheduler, "step", None)):
        raise TypeError(
            f"scheduler must be one of torch.optim.lr_scheduler, got {type(scheduler).__name__}"
        )
    needed = [
        p.name
        for p in inspect.signature(scheduler.step).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise ValueError(
            f"scheduler is {type(scheduler).__name__}, whose step needs {needed[0]!r} (timm's "
            "schedulers are given their step): leave scheduler out, pass "
            "total_steps, and call it inside `with ensemble.rescheduling():` (docs/loop.md)"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            "scheduler belongs to another optimizer: build it with the one given to the Ensemble"
        )


def averaged_tensors(
    optimizer: Optimizer, buffers: Iterable[torch.Tensor] | nn.Module
) -> ReplicaTensors:
    """The optimizer's parameters, then the buffers; of a module, all of its buffers that have an
    average, whichever those are by then.
    Raises ValueError if there are no parameters, TypeError for buffers of another kind."""
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    if not tensors:
        raise ValueError("optimizer has no parameters: there is nothing to train")
    if isinstance(buffers, nn.Module):
        _check_buffers_stay(buffers)
        return ReplicaTensors(tensors, model=buffers)
    listed = list(buffers)
    if not all(isinstance(buffer, torch.Tensor) for buffer in listed):
        raise TypeError(f"buffers must be a module or a list of tensors, got {listed!r}")
    return ReplicaTensors(tensors, listed)


def check_averaged(tensors: ReplicaTensors) -> None:
    """Raises ValueError, by name, for a tensor that has no average."""
    for name, group in (("parameter", tensors.parameters), ("buffer", tensors.buffers)):
        for i, tensor in enumerate(local_parts(group)):
            check_averageable(tensor, f"{name} {i}")


def _check_buffers_stay(model: nn.Module) -> None:
    """Warns of a DDP wrapper that copies rank 0's buffers to everybody before each forward: replica
    0's would be all there is."""
    for module in model.modules():
        if (
            isinstance(module, nn.parallel.DistributedDataParallel)
            and module.will_sync_module_buffers()
        ):
            warnings.warn(
                "DistributedDataParallel copies rank 0's buffers to all ranks before each forward, "
                "so running statistics (BatchNorm) follow one replica, whatever is averaged: wrap "
                "with broadcast_buffers=False (forward_sync_buffers=False in newer torch)",
                stacklevel=5,
            )


def checked_design(
    design: str | None,
    knobs: Sequence[BoundKnob],
    optimizer: Optimizer,
    replicas: Replicas,
    search: AutoLR | None,
    controller: Controller | None,
    sync: Sync,
) -> str:
    """Can these knobs be explored in this run, and moved by this controller? Returns the design
    that is used, and None's meaning.

    Raises ValueError if not, which names the knob, why not, and the way out.
    """
    explores = search is None and any(knob.spread > 0 for knob in knobs)
    _check_several(replicas, explores if controller is None else controller.needs_replicas)
    shared = sync.gradients == "shared"
    for knob in knobs:
        _check_acts(knob, replicas, shared)
        if controller is not None and not controller.may_move(knob.spec):
            raise ValueError(
                f"the training loss always prefers less of the knob {knob.name!r}, and the "
                f"controller {controller.name!r} learns from the training loss: use "
                "ProbeController(..., held_out=True), controller=None, or a controller of your own "
                "that learns from held-out data alone and whose may_move(knob) returns True"
            )
    if is_schedule_free(optimizer):
        _check_average_is_one(knobs, optimizer)
    _check_moments(knobs, optimizer, replicas, sync)
    found = _design_of(design, len(knobs), replicas.count)
    if sync.converge.needs_rates_only:
        _check_mean_is_base(knobs)
    return found


def _check_several(replicas: Replicas, explores: bool) -> None:
    if explores and replicas.count == 1 and replicas.members > 1:
        raise ValueError(
            f"ranks {brief(replicas.ranks[0])} are one replica, by what they share, so there is "
            "nothing to explore with. Start more ranks, share less (tp, cp, pp, ep, shards), or "
            "use hdet.AutoLR(model), which needs one replica only"
        )


def _design_of(design: str | None, knobs: int, replicas: int) -> str:
    is_possible = is_orthogonal_possible(replicas, knobs)
    if design not in (None, "permutation", "orthogonal"):
        raise ValueError(f"design must be 'permutation', 'orthogonal' or None, got {design!r}")
    if design == "orthogonal" and not is_possible:
        raise ValueError(
            f"design is 'orthogonal', but there are {replicas} replicas for {knobs} "
            f"knob{'s' * (knobs > 1)}: it needs a power of two, and more replicas than knobs. Or "
            "use design='permutation'"
        )
    return design or ("orthogonal" if knobs > 1 and is_possible else "permutation")


def _check_acts(knob: BoundKnob, replicas: Replicas, shared: bool) -> None:
    meaning = knob.meaning
    in_step = meaning.acts == "step" and knob.key != "lr"
    if len(replicas.local) > 1 and (in_step or meaning.on_gradients):
        raise ValueError(
            f"the knob {knob.name!r} acts inside optimizer.step() or on gradients, which "
            "co-resident replicas share: explore it with one process per replica"
        )
    needs_own = not (meaning.affects_eval_loss or meaning.on_gradients)
    if shared and meaning.acts == "forward" and needs_own:
        raise ValueError(
            f"the knob {knob.name!r} acts in the forward pass, but with gradients='shared' all "
            "replicas step with the same all-reduced gradient, so nothing would differ "
            "between them: pass gradients='local' and a choice of moments"
        )


def _check_moments(
    knobs: Sequence[BoundKnob], optimizer: Optimizer, replicas: Replicas, sync: Sync
) -> None:
    """What becomes of the optimizer's state, where replicas may have different ones."""
    moments, shared = sync.moments, sync.gradients == "shared"
    if moments == "average" and keeps_codes(optimizer):
        raise ValueError(
            "moments is 'average', but the optimizer keeps them in 8 bits, which have no mean: "
            "pass moments='keep' or 'reset', or construct the optimizer with another moment_dtype"
        )
    explored = [knob for knob in knobs if knob.spread > 0]
    if keeps_weights(optimizer) and not is_schedule_free(optimizer):
        # Another library's schedule-free optimizer evaluates at a mean of the parameters and
        # weights of its state, so both have to be averaged.
        if replicas.count > 1 and (explored or not shared) and moments != "average":
            raise ValueError(
                f"moments is {moments!r}, but {type(optimizer).__name__} keeps weights of its own "
                "beside the parameters, in which replicas would stay apart: pass moments='average'"
            )
        return
    if not shared:
        return
    can_part = any(knob.meaning.parts_moments for knob in knobs)
    if moments is not None and not can_part and follows_gradients(optimizer):
        raise ValueError(
            f"moments is {moments!r}, but with gradients='shared' they are equal on all replicas: "
            "leave it out"
        )
    parting = [repr(knob.name) for knob in explored if knob.meaning.parts_moments]
    if parting and moments not in ("average", "reset"):
        raise ValueError(
            f"moments is {moments!r}, but replicas that differ in {', '.join(parting)} differ in "
            "their moments, also with gradients='shared', where a checkpoint holds one state for "
            "all: pass moments='average' or 'reset' (docs/local.md)"
        )


def _check_average_is_one(knobs: Sequence[BoundKnob], optimizer: Optimizer) -> None:
    """Schedule-free: x is y and z mixed by beta1, and the mean of all z by their weights."""
    for knob in knobs:
        if knob.name.split("/")[0] in ("beta1", "warmup_steps", "r", "weight_lr_power"):
            raise ValueError(
                f"the knob {knob.name!r} says how {type(optimizer).__name__} averages its weights, "
                "which all replicas and steps must do alike: leave it out"
            )


def _check_mean_is_base(knobs: Sequence[BoundKnob]) -> None:
    """ExactLocal's mean is the trajectory at the base values, if rates alone differ. Multipliers of
    both designs add up to N."""
    for knob in knobs:
        if knob.key != "lr" or knob.scale.bounded:
            raise ValueError(
                "converge is ExactLocal(), whose mean is that of replicas that differ in nothing "
                f"but rates without bounds, but there is the knob {knob.name!r}: use Plain()"
            )


def check_controller(controller: Controller, run: Run) -> None:
    """Is this run one the controller, which has started, can work in? Raises ValueError if not;
    warns where it can, and next to nothing comes of it."""
    total, length = run.total_steps, run.sync_interval
    if total is not None and total < 2 * length:
        warnings.warn(
            f"the run has {total} steps, and cycles have T = {length} ({Sync().every} by default): "
            f"the controller {controller.name!r} decides where a cycle ends, so it will hardly do "
            f"anything. Make cycles shorter, such as sync=hdet.Sync({max(1, total // 20)})",
            stacklevel=5,
        )
    if not controller.needs_replicas:
        return
    knobs = [knob.name for knob in run.knobs]
    still = [knob.name for knob in run.knobs if knob.spread == 0]
    if run.replicas == 1:
        warnings.warn(
            "one replica explores nothing: the controller will never move a value", stacklevel=5
        )
    elif len(still) == len(knobs):
        warnings.warn(
            f"the controller {controller.name!r} compares replicas, and the spread of each knob is "
            "0, so they do not differ and nothing will move: pass LearningRate(spread=1/9), to "
            "OneCycleAutoLR ensemble_lr_spread_ratio=1/9",
            stacklevel=5,
        )
    elif controller.regresses and 0 < len(still) < len(knobs):
        raise ValueError(
            f"the knob {still[0]!r} has spread 0, so no regression over replicas can tell it from "
            "the others, and none would move: give it a spread, or leave it out"
        )
    elif controller.regresses and len(knobs) > run.replicas - 1:
        raise ValueError(
            f"{run.replicas} replicas can tell at most {run.replicas - 1} knobs apart, got "
            f"{len(knobs)} ({', '.join(knobs)}): use more replicas or fewer knobs, for rates "
            "LearningRate(groups=None)"
        )
