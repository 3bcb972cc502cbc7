"""What an Ensemble refuses before it touches the optimizer, and what it warns of: functions of a
`Setup` that yield each sentence that is true of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..converge.buckets import check_averageable
from ..converge.sync import Sync
from ..core.controller import Controller
from ..core.design import is_orthogonal_possible
from ..core.divergence import Divergence
from ..core.validate import refuse
from ..optim.snapshot import inner_optimizer, is_schedule_free, keeps_codes, keeps_weights
from ..replicas import Replicas
from ..replicas.layout import brief
from ..replicas.refusals import wrong_wrapper
from ..tensors.buffers import ReplicaTensors
from ..tensors.dtensor import local_parts
from ..trial.auto import AutoLR
from .moments import follows_gradients
from .setup import Setup

__all__ = [
    "averaged_tensors",
    "check_arguments",
    "check_averaged",
    "choose_design",
    "doubts",
    "wrong_for_controller",
    "wrong_grids",
    "wrong_settings",
]


# -- arguments -------------------------------------------------------------------------------------

_KINDS = {
    "replicas": (Replicas, "Replicas.from_group(group) or CoresidentReplicas(model, 4)"),
    "search": (AutoLR, "AutoLR(model)"),
    "controller": (Controller, "ProbeController(...); an AutoLR is passed as search"),
    "sync": (Sync, "Sync(50)"),
    "divergence": (Divergence, "Divergence(rollback='device')"),
}
"""By argument: its class, and an example."""


def check_arguments(given: Setup) -> None:
    """Raises TypeError for an object of another kind, ValueError for a value that cannot be used;
    both name argument, value and remedy."""
    refuse(wrong_wrapper(given.optimizer))  # some are no torch optimizers: a better message
    refuse(_wrong_kinds(given), TypeError)
    refuse(_wrong_values(given))
    if given.replicas is not None:
        given.replicas.check_optimizer(given.optimizer)


def _wrong_kinds(run: Setup) -> Iterator[str]:
    optimizer, scheduler, knobs = run.optimizer, run.scheduler, run.knobs
    if not isinstance(optimizer, Optimizer):
        remedy = ""
        if isinstance(optimizer, nn.Module):
            remedy = ": pass torch.optim.AdamW(model.parameters())"
        elif isinstance(optimizer, LRScheduler):
            remedy = ": the optimizer comes first, then its scheduler"
        elif isinstance(getattr(optimizer, "optimizer", None), Optimizer):
            remedy = ": pass the one inside, its .optimizer"
        kind = type(optimizer).__name__
        yield f"optimizer must be a torch.optim.Optimizer, got {kind}{remedy}"
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        yield f"scheduler must be one of torch.optim.lr_scheduler, got {type(scheduler).__name__}"
    if not isinstance(knobs, Sequence) or not all(
        hasattr(knob, "bind") and not isinstance(knob, type) for knob in knobs
    ):
        example = "[hdet.LearningRate(spread=1/9)]"
        yield f"knobs must be a list of knobs such as {example}, got {knobs!r}"
    if run.log is not None and not callable(run.log):
        yield (
            "log must be callable as log(record, step), such as hdet.logging.History(path), got "
            f"{type(run.log).__name__}"
        )
    for name, (kind, example) in _KINDS.items():
        value = getattr(run, name)
        if value is not None and not isinstance(value, kind):
            given = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
            yield f"{name} must be an hdet.{kind.__name__}, such as hdet.{example}, got {given}"


def _wrong_values(run: Setup) -> Iterator[str]:
    optimizer, scheduler = run.optimizer, run.scheduler
    if getattr(optimizer, "_hdet_fan_out", None) is not None:
        yield (
            "this optimizer is already driven by an Ensemble or OneCycleAutoLR: use one, or "
            "close() the other first"
        )
    if getattr(inner_optimizer(optimizer), "release", None) is not None:
        yield (
            "this optimizer releases gradients: its steps are taken in loss.backward(), where no "
            "replica can differ; leave release_gradients() out"
        )
    if not any(group["params"] for group in optimizer.param_groups):
        yield "optimizer has no parameters: there is nothing to train"
    if type(run.seed) is not int:
        yield f"seed must be a whole number, got {run.seed!r}"
    if isinstance(scheduler, ReduceLROnPlateau):
        yield (
            "scheduler is ReduceLROnPlateau, whose step needs a metric: leave it out, and step it "
            "where the metric is known:\n"
            "    with ensemble.rescheduling():\n"
            "        scheduler.step(metric)"
        )
    signature = None if scheduler is None else inspect.signature(scheduler.step)
    for p in () if signature is None else signature.parameters.values():
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            yield (
                f"scheduler is {type(scheduler).__name__}, whose step needs {p.name!r} (timm's "
                "schedulers are given their step): leave scheduler out, pass total_steps, and "
                "call it inside `with ensemble.rescheduling():` (docs/loop.md)"
            )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        yield "scheduler belongs to another optimizer: build it with the one given to the Ensemble"


def averaged_tensors(run: Setup) -> ReplicaTensors:
    """The optimizer's parameters, then the buffers; of a module, all of its buffers that have an
    average, whichever those are by then. Raises TypeError for buffers of another kind."""
    if isinstance(run.sync.buffers, nn.Module):
        return ReplicaTensors(run.trained, model=run.sync.buffers)
    listed = list(run.sync.buffers)
    if not all(isinstance(buffer, torch.Tensor) for buffer in listed):
        raise TypeError(f"buffers must be a module or a list of tensors, got {listed!r}")
    return ReplicaTensors(run.trained, listed)


def check_averaged(tensors: ReplicaTensors) -> None:
    """Raises ValueError, by name, for a tensor that has no average."""
    for name, group in (("parameter", tensors.parameters), ("buffer", tensors.buffers)):
        for i, tensor in enumerate(local_parts(group)):
            check_averageable(tensor, f"{name} {i}")


# -- settings --------------------------------------------------------------------------------------


def wrong_settings(run: Setup) -> Iterator[str]:
    """Can these knobs be explored in this run, and moved by this controller?"""
    replicas, sync, controller = run.replicas, run.sync, run.controller
    shares, is_coresident = sync.gradients == "shared", len(replicas.local) > 1
    if is_coresident and (not shares or sync.converge.needs_processes):
        yield (
            f"gradients is {sync.gradients!r} and converge {sync.converge!r}, but co-resident "
            "replicas share one gradient, and their optimizer averages them: leave both out"
        )
    explores = run.search is None and bool(run.explored)
    if controller is not None:
        explores = controller.needs_replicas
    if explores and replicas.count == 1 < replicas.members:
        yield (
            f"ranks {brief(replicas.ranks[0])} are one replica, by what they share, so there is "
            "nothing to explore with. Start more ranks, share less (tp, cp, pp, ep, shards), or "
            "explore nothing: search=hdet.AutoLR(model), or knobs=[hdet.LearningRate(spread=0)]"
        )
    if run.search is not None and is_coresident:
        yield (
            "AutoLR trains copies of the run, for which several replicas in one process are of no "
            "use: leave replicas out"
        )
    if sync.begin and replicas.members > 1 < replicas.count:
        yield (
            f"begin is {sync.begin!r}, until which DistributedDataParallel averages gradients over "
            f"all replicas, but each is {replicas.members} ranks, which share theirs for good: "
            "leave begin out"
        )
    if sync.begin and run.search is not None and run.search.best_weights is not None:
        yield "val_batches keeps the weights of one model: leave it out with begin"
    for knob in run.knobs:
        meaning = knob.meaning
        acts_inside = (meaning.acts == "step" and knob.key != "lr") or meaning.on_gradients
        acts_outside = meaning.affects_eval_loss or meaning.on_gradients
        if is_coresident and acts_inside:
            yield (
                f"the knob {knob.name!r} acts inside optimizer.step() or on gradients, which "
                "co-resident replicas share: explore it with one process per replica"
            )
        if shares and meaning.acts == "forward" and not acts_outside:
            yield (
                f"the knob {knob.name!r} acts in the forward pass, but with gradients='shared' all "
                "replicas step with the same all-reduced gradient, so nothing would differ "
                "between them: pass gradients='local' and a choice of moments"
            )
        if controller is not None and not controller.may_move(knob.spec):
            yield (
                f"the training loss always prefers less of the knob {knob.name!r}, and the "
                f"controller {controller.name!r} learns from the training loss: use "
                "ProbeController(..., held_out=True), controller=None, or a controller of your own "
                "that learns from held-out data alone and whose may_move(knob) returns True"
            )
        # ExactLocal's mean is the trajectory at the base values, if rates alone differ: multipliers
        # of both designs add up to N.
        if sync.converge.needs_rates_only and (knob.key != "lr" or knob.scale.bounded):
            yield (
                "converge is ExactLocal(), whose mean is that of replicas that differ in nothing "
                f"but rates without bounds, but there is the knob {knob.name!r}: use Plain()"
            )
    yield from _wrong_moments(run)
    if run.design not in (None, "permutation", "orthogonal"):
        yield f"design must be 'permutation', 'orthogonal' or None, got {run.design!r}"
    count = len(run.knobs)
    if run.design == "orthogonal" and not is_orthogonal_possible(replicas.count, count):
        yield (
            f"design is 'orthogonal', but there are {replicas.count} replicas for {count} "
            f"knob{'s' * (count > 1)}: it needs a power of two, and more replicas than knobs. Or "
            "use design='permutation'"
        )


def wrong_grids(run: Setup) -> Iterator[str]:
    """Can each knob have the multipliers that it asks for? Peaks are known as well as they will
    be."""
    count = run.replicas.count
    for knob in run.knobs:
        grid, name, listed = knob.grid, repr(knob.name), list(knob.grid.listed)
        if grid.spread > 0 or not grid.explores:
            continue
        if run.design == "orthogonal":
            yield f"design is 'orthogonal', which knows spreads only: give {name} a spread"
        # The mean of the replicas is the trajectory at the base values where multipliers add up
        # to N only.
        if run.sync.converge.needs_rates_only:
            yield f"converge is ExactLocal(), for which {name} needs a spread: or use Plain()"
        if listed and count % len(listed):
            yield (
                f"{name} has {len(listed)} values or multipliers for {count} "
                f"replica{'s' * (count > 1)}: each is for an equal part of them, so give a divisor "
                f"of {count}, or start a multiple of {len(listed)} replicas"
            )
        if grid.values is None:
            continue
        peaks = sorted({f"{peak:g}" for peak in knob.peaks()})
        if len(peaks) > 1:
            yield (
                f"{name} has values, and stands at {', '.join(peaks)} in different places: give "
                "multiples of these by multipliers=, or explore each by itself (groups='each')"
            )
        if run.search is not None:
            yield (
                f"{name} has values, and a search will move its base value, and with it what "
                "replicas try: give multiples by multipliers=, or leave the search out"
            )
        wrong = [
            value
            for value, rho in zip(listed, knob.points(len(listed)), strict=True)
            if not rho > 0 or knob.scale.hold(value) != value
        ]
        if wrong:
            yield (
                f"{name} has the values {listed}, and {wrong[0]!r} cannot be reached from its base "
                f"value {peaks[0]}: values are above 0 and within bounds (on a linear scale less "
                "than a unit below the base value)"
            )


def _wrong_moments(run: Setup) -> Iterator[str]:
    """What becomes of the optimizer's state, where replicas may have different ones."""
    optimizer, moments, shares = run.optimizer, run.sync.moments, run.sync.gradients == "shared"
    kind, is_ours = type(optimizer).__name__, is_schedule_free(optimizer)
    for knob in run.knobs if is_ours else ():
        # x is y and z mixed by beta1, and the mean of all z by their weights
        if knob.name.split("/")[0] in ("beta1", "warmup_steps", "r", "weight_lr_power"):
            yield (
                f"the knob {knob.name!r} says how {kind} averages its weights, which all replicas "
                "and steps must do alike: leave it out"
            )
    if moments == "average" and keeps_codes(optimizer):
        yield (
            "moments is 'average', but the optimizer keeps them in 8 bits, which have no mean: "
            "pass moments='keep' or 'reset', or construct the optimizer with another moment_dtype"
        )
    if keeps_weights(optimizer) and not is_ours:
        # Another library's schedule-free optimizer evaluates at a mean of the parameters and
        # weights of its state, so both have to be averaged.
        if run.replicas.count > 1 and (run.explored or not shares) and moments != "average":
            yield (
                f"moments is {moments!r}, but {kind} keeps weights of its own beside the "
                "parameters, in which replicas would stay apart: pass moments='average'"
            )
        return
    if not shares:
        return
    can_differ = any(knob.meaning.parts_moments for knob in run.knobs)
    are_equal = moments is not None and follows_gradients(optimizer)
    if not can_differ and (are_equal or moments == "keep"):
        yield (
            f"moments is {moments!r}, but with gradients='shared' they are equal on all replicas, "
            "or averaged where they are not: leave it out"
        )
    parting = [repr(knob.name) for knob in run.explored if knob.meaning.parts_moments]
    if parting and moments not in ("average", "reset"):
        yield (
            f"moments is {moments!r}, but replicas that differ in {', '.join(parting)} differ in "
            "their moments, also with gradients='shared', where a checkpoint holds one state for "
            "all: pass moments='average' or 'reset' (docs/local.md)"
        )


def choose_design(run: Setup) -> str:
    """The one that is used, and None's meaning."""
    knobs = len(run.knobs)
    has_spreads = all(knob.grid.spread or not knob.grid.explores for knob in run.knobs)
    tells_apart = knobs > 1 and has_spreads and is_orthogonal_possible(run.replicas.count, knobs)
    return run.design or ("orthogonal" if tells_apart else "permutation")


# -- once the controller has started ---------------------------------------------------------------


def wrong_for_controller(run: Setup) -> Iterator[str]:
    """Is this run one that the controller can work in?"""
    count, names = run.replicas.count, [knob.name for knob in run.knobs]
    if run.controller is None or not run.controller.regresses or count == 1 or not run.explored:
        return
    for knob in run.knobs:
        if not knob.grid.explores:
            yield (
                f"the knob {knob.name!r} has spread 0, so no regression over replicas can tell it "
                "from the others, and none would move: give it a spread, or leave it out"
            )
        if knob.grid.listed:
            yield (
                f"the knob {knob.name!r} has values or multipliers of its own, and the controller "
                f"{run.controller.name!r} takes the slope of a line through all replicas, which "
                "says nothing about the base value there: use BestValueController(), or a spread"
            )
    if len(names) > count - 1:
        yield (
            f"{count} replicas can tell at most {count - 1} knobs apart, got {len(names)} "
            f"({', '.join(names)}): use more replicas or fewer knobs, for rates "
            "LearningRate(groups=None)"
        )


def doubts(run: Setup) -> Iterator[str]:
    """Warned of: next to nothing comes of such a run."""
    scheduler, buffers, controller = run.scheduler, run.sync.buffers, run.controller
    rates = [peak for knob in run.knobs if knob.key == "lr" for peak in knob.peaks()]
    if isinstance(buffers, nn.Module) and any(
        isinstance(module, DistributedDataParallel) and module.will_sync_module_buffers()
        for module in buffers.modules()
    ):
        yield (
            "DistributedDataParallel copies rank 0's buffers to all ranks before each forward, "
            "so running statistics (BatchNorm) follow one replica, whatever is averaged: wrap "
            "with broadcast_buffers=False (forward_sync_buffers=False in newer torch)"
        )
    if not any(p.requires_grad or keeps_weights(run.optimizer) for p in run.trained):
        yield "each parameter of the optimizer is frozen (requires_grad=False): nothing is trained"
    if scheduler is not None and rates and not any(rates):
        yield "the learning rate is 0, and its schedule multiplies it: nothing is trained"
    for name in ("T_max", "total_steps"):
        own = getattr(scheduler, name, run.total_steps)
        if run.total_steps is not None and own != run.total_steps:
            yield (
                f"total_steps is {run.total_steps}, but {name} of the {type(scheduler).__name__} "
                f"is {own}: write one number for both, of optimizer steps, not epochs"
            )
    if controller is None:
        return
    name, total, length = controller.name, run.schedule.total_steps, run.sync.shortest
    if total is not None and total < 2 * length:
        yield (
            f"the run has {total} steps, and cycles have T = {length} ({Sync().every} by default): "
            f"the controller {name!r} decides where a cycle ends, so it will hardly do anything. "
            f"Make cycles shorter, such as sync=hdet.Sync({max(1, total // 20)})"
        )
    if controller.needs_replicas and run.replicas.count == 1:
        yield (
            "one replica explores nothing: the controller will never move a value. Start more "
            "processes, pass CoresidentReplicas, or use search=hdet.AutoLR(model)"
        )
    elif controller.needs_replicas and not run.explored:
        yield (
            f"the controller {name!r} compares replicas, and the spread of each knob is 0, so they "
            "do not differ and nothing will move: pass LearningRate(spread=1/9), to OneCycleAutoLR "
            "ensemble_lr_spread_ratio=1/9"
        )
