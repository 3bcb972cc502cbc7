"""Everything an Ensemble refuses before it touches the optimizer."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..converge.buckets import check_averageable
from ..core.controller import Controller
from ..core.design import columns
from ..core.divergence import Divergence
from ..core.evidence import Run
from ..knobs import Bound
from ..policies import Sync
from ..replicas import Replicas
from ..replicas.layout import brief
from ..replicas.refusals import check_wrapper
from ..tensors.buffers import ReplicaTensors
from ..tensors.dtensor import local_parts
from .moments import follows_gradients
from .snapshot import keeps_codes, keeps_weights

__all__ = [
    "averaged_tensors",
    "check_arguments",
    "check_controller",
    "check_knobs",
    "check_several",
    "design_of",
]


def check_arguments(
    optimizer: Any,
    *,
    scheduler: Any,
    knobs: Any,
    replicas: Any,
    controller: Any,
    sync: Any,
    divergence: Any,
    seed: Any,
    log: Any,
) -> None:
    """Raises TypeError for an object of another kind, ValueError for a value that cannot be used;
    both name argument, value and remedy."""
    check_wrapper(optimizer)  # some are no torch optimizers, and have a better message
    if not isinstance(optimizer, Optimizer):
        inside = (
            ": pass the one inside, its .optimizer"
            if isinstance(getattr(optimizer, "optimizer", None), Optimizer)
            else ""
        )
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}{inside}"
        )
    if getattr(optimizer, "_hdet_fan_out", None) is not None:
        raise ValueError(
            "this optimizer is already driven by an Ensemble or OneCycleAutoLR: use one, or "
            "close() the other first"
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            "scheduler is ReduceLROnPlateau, whose step needs a metric: use a schedule of steps; "
            "the controller reacts to losses"
        )
    if scheduler is not None and not all(
        callable(getattr(scheduler, name, None))
        for name in ("step", "state_dict", "load_state_dict")
    ):
        raise TypeError(
            "scheduler must have step, state_dict and load_state_dict like torch's, got "
            f"{type(scheduler).__name__}"
        )
    if scheduler is not None and (needed := _needed(scheduler.step)):
        raise ValueError(
            f"scheduler is {type(scheduler).__name__}, whose step needs {needed!r} (timm's "
            "schedulers are told where they are): leave scheduler out, pass "
            "total_steps, and call it inside `with ensemble.rescheduling():` (docs/loop.md)"
        )
    if scheduler is not None and getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            "scheduler belongs to another optimizer: build it with the one given to the Ensemble"
        )
    if (
        isinstance(knobs, (str, bytes))
        or not isinstance(knobs, Sequence)
        or not all(hasattr(knob, "bind") and not isinstance(knob, type) for knob in knobs)
    ):
        raise TypeError(
            f"knobs must be a list of knobs such as [hdet.LearningRate(spread=1/9)], got {knobs!r}"
        )
    if replicas is not None and not isinstance(replicas, Replicas):
        raise TypeError(
            "replicas must be an hdet.Replicas, e.g. Replicas.from_group(group), or an "
            f"hdet.CoresidentReplicas, got {type(replicas).__name__}"
        )
    if replicas is not None:
        replicas.check_optimizer(optimizer)
    if isinstance(controller, type) and issubclass(controller, Controller):
        raise TypeError(
            f"controller must be an object, got the class {controller.__name__}: write "
            f"{controller.__name__}(...)"
        )
    if controller is not None and not isinstance(controller, Controller):
        raise TypeError(
            f"controller must be an object of a class from hdet.Controller, got {controller!r}: "
            "pass hdet.AutoLR(model) or hdet.ProbeController(...)"
        )
    if not isinstance(sync, Sync):
        raise TypeError(f"sync must be an hdet.Sync, such as hdet.Sync(50), got {sync!r}")
    if sync.gradients == "local" and replicas is not None and len(replicas.local) > 1:
        raise ValueError(
            "gradients is 'local', but co-resident replicas step with one gradient and one set of "
            "moments: pass gradients='shared'"
        )
    if replicas is not None and len(replicas.local) > 1 and sync.converge.needs_processes:
        raise ValueError(
            f"converge is {sync.converge!r}, but co-resident replicas are averaged by their "
            "optimizer: leave it out"
        )
    if not isinstance(divergence, Divergence):
        raise TypeError(f"divergence must be an hdet.Divergence, got {divergence!r}")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"seed must be a whole number, got {seed!r}")
    if log is not None and not callable(log):
        raise TypeError(f"log must be callable as log(record, step), got {type(log).__name__}")


def _needed(step: Any) -> str | None:
    """An argument without which it cannot be called."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # written in C
        return None
    return next(
        (
            p.name
            for p in parameters
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ),
        None,
    )


def averaged_tensors(
    optimizer: Optimizer, buffers: Iterable[torch.Tensor] | nn.Module
) -> ReplicaTensors:
    """The optimizer's parameters, then the buffers; of a module, all of its buffers that have an
    average, whichever those are by then.
    Raises ValueError for nothing to average, or a tensor that cannot be, TypeError for buffers of
    another kind."""
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    if not tensors:
        raise ValueError("optimizer has no parameters: there is nothing to train")
    if isinstance(buffers, nn.Module):
        check_buffers_stay(buffers)
        found = ReplicaTensors(tensors, model=buffers)
    else:
        listed = isinstance(buffers, Iterable) and not isinstance(
            buffers, torch.Tensor
        )  # whose rows would be taken for buffers
        given: list[Any] = list(buffers) if listed else [buffers]
        if not listed or not all(isinstance(buffer, torch.Tensor) for buffer in given):
            raise TypeError(
                "buffers must be a module or a list of tensors, got "
                f"{given if listed else type(given[0]).__name__!r}"
            )
        found = ReplicaTensors(tensors, given)
    for name, group in (("parameter", tensors), ("buffer", found.buffers)):
        for i, tensor in enumerate(local_parts(group)):
            check_averageable(tensor, f"{name} {i}")
    return found


def check_buffers_stay(model: nn.Module) -> None:
    """Warns of a DDP wrapper that copies rank 0's buffers to everybody before each forward: replica
    0's would be all there is."""
    for module in model.modules():
        if (
            isinstance(module, nn.parallel.DistributedDataParallel)
            and module.will_sync_module_buffers()
        ):
            warnings.warn(
                "DistributedDataParallel copies rank 0's buffers to all ranks before each forward, "
                "so running statistics (BatchNorm) follow "
                "one replica, whatever is averaged: wrap with broadcast_buffers=False "
                "(forward_sync_buffers=False in newer torch)",
                stacklevel=5,
            )


def design_of(design: str | None, knobs: Sequence[Bound], replicas: Replicas) -> str:
    """The design that is used, and None's meaning.

    Raises ValueError for one that is unknown, or that has too few replicas.
    """
    if design not in (None, "permutation", "orthogonal"):
        raise ValueError(f"design must be 'permutation', 'orthogonal' or None, got {design!r}")
    enough = len(knobs) <= max(replicas.count - 1, 1)
    if design == "orthogonal" and not enough:
        raise ValueError(
            f"design is 'orthogonal', but {replicas.count} replicas can tell at most "
            f"{replicas.count - 1} knobs apart, got {len(knobs)}: "
            "use fewer knobs, more replicas, or design='permutation'"
        )
    return design or ("orthogonal" if len(knobs) > 1 and enough else "permutation")


def check_knobs(
    knobs: Sequence[Bound],
    optimizer: Optimizer,
    replicas: Replicas,
    controller: Controller | None,
    *,
    design: str,
    sync: Sync,
) -> None:
    """Can these knobs be explored in this run, and judged by this controller? If not, a ValueError
    names the knob, why not, and the way out."""
    moments, shared, together = sync.moments, sync.gradients == "shared", len(replicas.local) > 1
    for knob in knobs:
        if together and knob.acts == "step" and knob.key != "lr":
            raise ValueError(
                f"the knob {knob.name!r} acts inside optimizer.step(), which co-resident replicas "
                "share, at rates of their own only: explore it with one process per replica"
            )
        if shared and knob.acts == "forward" and not (knob.affects_eval_loss or knob.on_gradients):
            raise ValueError(
                f"the knob {knob.name!r} acts in the forward pass, but with gradients='shared' all "
                "replicas step with the same all-reduced gradient, so nothing would differ "
                "between them: pass gradients='local' and a choice of moments"
            )
        if together and knob.on_gradients:
            raise ValueError(
                f"the knob {knob.name!r} acts on gradients, of which co-resident replicas have "
                "one: explore it with one process per replica"
            )
        if (
            not knob.valid_on_train_loss
            and controller is not None
            and not controller.judges_held_out
        ):
            raise ValueError(
                f"the training loss is no honest judge of the knob {knob.name!r} (it always votes "
                f"for less), and the controller {controller.name!r} would let it judge: use "
                "ProbeController(..., held_out=True), with mini-batches that are not trained on "
                "and a loss_fn without regularisation; or controller=None. A controller of your "
                "own that learns from such mini-batches alone says judges_held_out = True"
            )
    if moments == "average" and keeps_codes(optimizer):
        raise ValueError(
            "moments is 'average', but the optimizer keeps them in 8 bits, which have no mean: "
            "pass moments='keep' or 'reset', or construct the optimizer with another moment_dtype"
        )
    if keeps_weights(optimizer):
        # A schedule-free optimizer evaluates at a mean of the parameters and weights of its state,
        # so both have to be averaged.
        if (
            replicas.count > 1
            and (not shared or any(knob.spread > 0 for knob in knobs))
            and moments != "average"
        ):
            raise ValueError(
                f"moments is {moments!r}, but {type(optimizer).__name__} keeps weights of its own "
                "beside the parameters, in which replicas would stay apart: pass moments='average'"
            )
    elif shared:
        _check_moments_of_shared(knobs, moments, follows_gradients(optimizer))
    if sync.converge.needs_rates_only:
        _check_mean_is_base(knobs, replicas.count, design)


def _check_moments_of_shared(knobs: Sequence[Bound], moments: str | None, equal: bool) -> None:
    if moments is not None and equal and not any(knob.moments_diverge for knob in knobs):
        raise ValueError(
            f"moments is {moments!r}, but with gradients='shared' they are equal on all replicas: "
            "leave it out"
        )
    parting = [knob.name for knob in knobs if knob.moments_diverge and knob.spread > 0]
    if parting and moments not in ("average", "reset"):
        raise ValueError(
            f"moments is {moments!r}, but replicas that differ in {', '.join(map(repr, parting))} "
            "differ in their moments, also with gradients='shared', where a checkpoint holds one "
            "state for all: pass moments='average' or 'reset' (docs/local.md)"
        )


def _check_mean_is_base(knobs: Sequence[Bound], replicas: int, design: str) -> None:
    """ExactLocal's mean is the trajectory at the base values, if rates alone differ, and their
    multipliers add up to N."""
    for knob in knobs:
        if knob.key != "lr" or knob.scale.bounded:
            raise ValueError(
                "converge is ExactLocal(), whose mean is that of replicas that differ in nothing "
                f"but rates without bounds, but there is the knob {knob.name!r}: use Plain()"
            )
    if design == "orthogonal" and replicas > 1 and any(map(sum, columns(replicas, len(knobs)))):
        raise ValueError(
            "converge is ExactLocal(), which needs multipliers that add up to the number of "
            f"replicas, but no orthogonal design of {replicas} replicas for {len(knobs)} knobs is "
            "balanced: use Plain(), design='permutation', or another number of replicas"
        )


def check_several(
    replicas: Replicas, knobs: Sequence[Bound], controller: Controller | None
) -> None:
    """Raises ValueError for one replica of several ranks where something is to be explored, or a
    controller needs more of them."""
    explores = (
        any(knob.spread > 0 for knob in knobs) if controller is None else controller.needs_replicas
    )
    if explores and replicas.count == 1 and replicas.members > 1:
        raise ValueError(
            f"ranks {brief(replicas.ranks[0])} are one replica, by what they share, so there is "
            "nothing to explore with. Start more ranks, make tp, cp, "
            "pp, ep or the shards smaller, or give the mesh a dimension over which parameters are "
            "replicated. hdet.AutoLR(model) needs one replica only"
        )


def check_controller(controller: Controller, run: Run) -> None:
    """Is this run one the controller, which has started, can work in? Raises ValueError if not;
    warns where it can, and next to nothing comes of it."""
    total, length = run.total_steps, run.sync_interval
    decides_at_ends = controller.search is None or controller.needs_replicas
    if total is not None and total < 2 * length and decides_at_ends:
        warnings.warn(
            f"the run has {total} steps, and cycles have T = {length} ({Sync().every} by default): "
            f"the controller {controller.name!r} decides where "
            "a cycle ends, so it will hardly do anything. Make cycles shorter, such as "
            f"sync=hdet.Sync({max(1, total // 20)})",
            stacklevel=3,
        )
    if not controller.needs_replicas:
        return
    knobs = len(run.knobs)
    still = [knob.name for knob in run.knobs if knob.spread == 0]
    if run.replicas == 1:
        warnings.warn(
            "one replica explores nothing: the controller will never move a value", stacklevel=4
        )
    elif controller.regresses and 0 < len(still) < knobs:
        raise ValueError(
            f"the knob {still[0]!r} has spread 0, so no regression over replicas can tell it from "
            "the others, and none would move: give it a spread, or leave it out"
        )
    elif controller.regresses and knobs > run.replicas - 1:
        raise ValueError(
            f"{run.replicas} replicas can tell at most {run.replicas - 1} knobs apart, got {knobs} "
            f"({', '.join(knob.name for knob in run.knobs)}): use more replicas or fewer knobs, "
            "for rates LearningRate(groups=None)"
        )
