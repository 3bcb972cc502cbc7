"""Arms: copies of a run that train for some steps at other rates, and are scored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..profiling import ranged
from ..replicas import Replicas
from ..run.snapshot import Snapshot
from ..tensors.dtensor import gradient_norm, local_parts, reshard
from ..tensors.eval_mode import eval_mode, modes_kept, random_states_kept
from .copies import InPlace
from .displacement import Displacement

__all__ = ["Arms", "Closure", "Searched", "mean_loss"]

Closure = Callable[[], Any]
"""Computes the losses of the current batch again: shape (examples,), or one number, with a graph.
Or it calls backward itself, and returns them without one. None: this rank sees no loss."""


@dataclass(frozen=True)
class Searched:
    """A run whose rate is searched."""

    model: nn.Module
    """As the loop calls it, with its DistributedDataParallel if it has one."""
    optimizer: Optimizer
    parameters: Sequence[torch.Tensor]
    """Those that the optimizer steps, in the order of its groups."""
    masters: Callable[[], Sequence[torch.Tensor | None]]
    """What the optimizer keeps beside each of them in more bits."""
    peaks: Callable[[], Sequence[tuple[int, float]]]
    """(parameter group, its peak rate) of the groups whose rates are searched."""
    replicas: Replicas
    shares_gradients: bool = True
    """Are gradients averaged over the replicas?"""
    aside: Callable[[], AbstractContextManager[None]] = nullcontext
    """Inside it ``optimizer.step()`` is the optimizer's own, which nobody counts."""
    has_copies: bool = False
    """Has the optimizer parameters of its own, which the model's follow?"""

    @property
    def module(self) -> nn.Module:
        """Without a DistributedDataParallel."""
        model = self.model
        return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model

    @property
    def leaves_gradients(self) -> bool:
        """Can a backward pass leave gradients unreduced?"""
        model = self.model
        ddp = isinstance(model, nn.parallel.DistributedDataParallel)
        return ddp and not model.find_unused_parameters

    @property
    def rate(self) -> float:
        """The peak of the first group that has one; 0 if all stand still."""
        return next((peak for _, peak in self.peaks() if peak > 0), 0.0)

    @property
    def device(self) -> torch.device:
        return local_parts(self.parameters[:1])[0].device

    def weights(self) -> list[torch.Tensor]:
        """Of the groups that are searched, as they are stepped; without what is frozen."""
        triples = zip(self.parameters, self.masters(), self._searched, strict=True)
        # A split master is the parameter's further bits: not a number by itself.
        return [master if master is not None and master.is_floating_point() else p
                for p, master, searched in triples if searched]  # fmt: skip

    def snapshot(self, place: str) -> Snapshot:
        """Of all that is trained, not taken yet. ``place``: "device" or "host"."""
        return Snapshot(self.parameters, self.optimizer, place, self.module)

    def names(self) -> list[str]:
        """Of `weights`, in the model."""
        by_id = {id(p): name for name, p in self.module.named_parameters()}
        names = [by_id.get(id(p), f"parameter {i}") for i, p in enumerate(self.parameters)]
        return [name for name, searched in zip(names, self._searched, strict=True) if searched]

    @cached_property
    def _searched(self) -> list[bool]:
        """By parameter; the same for the whole search."""
        peaks = self.peaks()
        numbers = {number for number, peak in peaks if peak > 0} or {number for number, _ in peaks}
        pairs = [
            (n, p) for n, group in enumerate(self.optimizer.param_groups) for p in group["params"]
        ]
        return [number in numbers and (p.requires_grad or self.has_copies) for number, p in pairs]

    def clear_gradients(self) -> None:
        for parameter in (*self.parameters, *self.module.parameters()):
            parameter.grad = None

    def forget_gathered(self) -> None:
        """Weights were written: neither gathered shards nor cast copies of others may be left."""
        reshard(self.module)
        torch.clear_autocast_cache()

    def check(self) -> None:
        """Raises ValueError for a run whose arms could not be trained, or not without a trace."""
        reshard(self.module)  # an evaluation may have left gathered parameters
        own, trained = set(map(id, self.module.parameters())), set(map(id, self.parameters))
        if not self.has_copies and not trained <= own:
            raise ValueError(
                "AutoLR(model): this model has no parameter of the optimizer, or not all of them. "
                "Pass the module that the optimizer trains, such as "
                "nn.ModuleList([encoder, decoder])"
            )
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS evaluates the loss inside its step, which copies cannot follow")
        others = [p for p in self.module.parameters() if id(p) not in trained]
        if not self.has_copies and any(
            getattr(p, "_post_accumulate_grad_hooks", None) for p in others
        ):
            raise ValueError(
                "a parameter of the model is not this optimizer's and has a hook that runs after "
                "its gradient (an optimizer inside the backward pass?), which a trial would "
                "trigger: put all parameters into one optimizer"
            )


class Scorer:
    """Losses of the weights that are in place."""

    def __init__(self, run: Searched) -> None:
        self._run, self._needs_graph = run, False

    def loss(self, closure: Closure) -> torch.Tensor | None:
        """The mean loss, in eval mode and without gradients where that can be: 0-d float64; None
        where this rank sees none."""
        with eval_mode(self._run.module):
            if not self._needs_graph:
                try:
                    return mean_loss(self.losses(closure))
                except RuntimeError as error:
                    if "does not require grad" not in str(error):
                        raise
                    self._needs_graph = True  # a closure that differentiates by itself
            with torch.enable_grad():
                losses = self.losses(closure)
            self._run.clear_gradients()
            return mean_loss(losses)

    def losses(self, closure: Closure) -> torch.Tensor | None:
        """What the closure returns, as a tensor. Raises TypeError for anything else."""
        self._run.forget_gathered()
        losses = closure()
        if isinstance(losses, (int, float)):
            return torch.tensor(float(losses), device=self._run.device)
        if losses is not None and not isinstance(losses, torch.Tensor):
            raise TypeError(
                f"the closure returned a {type(losses).__name__}: return a tensor of losses, one "
                "for each example, one number, or None where no loss is seen"
            )
        return losses if losses is not None and losses.numel() else None


class Arms:
    """Trains and scores copies of a run.

    A copy holds all that is trained: parameters, masters, the optimizer's state and the model's
    buffers. Each call leaves run, gradients, modes and random states bitwise as they were.

    Args:
        run: what is copied.
        first: its first weights, with which arms begin.
        before_step: called between an arm's backward pass and its step.
        scaler: the run's GradScaler; it is asked for its scale, and not changed.
        place: "device" or "host", where copies live.
        averages: are gradients averaged over the replicas? None: as the run does.
    """

    def __init__(
        self,
        run: Searched,
        first: Snapshot,
        *,
        before_step: Callable[[], object] | None = None,
        scaler: Any = None,
        place: str = "device",
        averages: bool | None = None,
    ) -> None:
        self.run, self.first = run, first
        self._before_step, self._scaler, self._place = before_step, scaler, place
        self.in_place = InPlace(run.module, run.optimizer)
        self._now = run.snapshot(place)
        self._scorer = Scorer(run)
        self._averages = averages

    def begin(self) -> Snapshot:
        """A new arm. It has the first weights."""
        with self.run_kept():
            self.first.restore(keep_new_buffers=True)
            arm = self.run.snapshot(self._place)
            arm.take()
            return arm

    @contextmanager
    def run_kept(self) -> Iterator[None]:
        """Around arms: afterwards the run is in its place again, with its gradients."""
        run = self.run
        # DDP's gradients may be views of its buckets, into which the arms' are written too.
        shared = getattr(run.model, "gradient_as_bucket_view", False)
        held = [*run.parameters, *run.module.parameters()]
        gradients = [
            (p, p.grad, p.grad.clone() if shared and p.grad is not None else None) for p in held
        ]
        run.clear_gradients()  # a closure adds to those that are there
        with self.in_place(), self._without_reduction():
            self._now.take()
            try:
                with modes_kept(run.module):
                    yield
            finally:
                self._now.restore()
                self.run.forget_gathered()
                for parameter, gradient, values in gradients:
                    parameter.grad = gradient
                    if gradient is not None and values is not None:
                        gradient.copy_(values)

    # -- inside run_kept -----------------------------------------------------------------------

    @ranged("hdet.trial.train")
    def train(
        self, arm: Snapshot, closure: Closure, factor: float, may_skip: bool = False
    ) -> torch.Tensor | None:
        """One step of an arm on the current batch, at ``factor`` times the peak of each group.
        Returns its loss before the step, 0-d float64; None where this rank sees none. ``may_skip``:
        without a loss and gradients there is no step, as in a loop that leaves a batch out."""
        run = self.run
        arm.restore(keep_new_buffers=True)
        with random_states_kept(run.module):
            run.clear_gradients()
            with torch.enable_grad():
                losses = self._scorer.losses(closure)
                left = any(p.grad is not None for p in run.parameters)  # it called backward
                if losses is not None and losses.requires_grad and not left:
                    self._backward(losses.mean())
            gradients = [p.grad for p in run.parameters if p.grad is not None]
            if not gradients and not (may_skip and losses is None):
                raise ValueError(
                    "the closure gave losses without a graph, and left no gradients: compute the "
                    "losses of the batch again inside it, without no_grad or detach, or call "
                    "backward inside"
                    + (" (it returned None: is a return missing?)" if losses is None else "")
                )
            self._average(gradients)
            if self._unscale(gradients) and gradients:
                if self._before_step is not None:
                    self._before_step()
                rates = [(group, peak * factor) for group, peak in run.peaks()]
                with _rates(run.optimizer, rates), run.aside():
                    run.optimizer.step()
        run.clear_gradients()
        arm.take()
        return mean_loss(losses)

    @ranged("hdet.trial.score")
    def score(self, arm: Snapshot, closure: Closure) -> torch.Tensor | None:
        """`Scorer.loss` of an arm on the current batch."""
        arm.restore(keep_new_buffers=True)
        return self._scorer.loss(closure)

    def ratios(self, arm: Snapshot, displacement: Displacement) -> list[torch.Tensor]:
        """`Displacement.ratios` of an arm."""
        arm.restore(keep_new_buffers=True)
        return displacement.ratios()

    def share(self, arm: Snapshot | None, owner: int) -> Snapshot:
        """The arm of one replica, on every replica: its weights and buffers, to be scored."""
        run = self.run
        if arm is not None:
            arm.restore(keep_new_buffers=True)
        for tensor in local_parts([*run.parameters, *run.module.buffers()]):
            dist.broadcast(tensor, group_src=owner, group=run.replicas.peer_group)
        shared = run.snapshot(self._place) if arm is None else arm
        shared.take()
        return shared

    def close(self) -> None:
        """Takes its hooks off model and optimizer."""
        self.in_place.close()

    # -- a step --------------------------------------------------------------------------------

    def _backward(self, loss: torch.Tensor) -> None:
        try:
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            raise ValueError(
                "the closure returned the loop's own losses, whose graph is gone: compute the "
                "losses of the batch again inside it"
            ) from error

    @contextmanager
    def _without_reduction(self) -> Iterator[None]:
        """DDP reduces nothing in an arm's backward pass (`_average` does), so that neither its
        buckets nor the memory of a communication hook see it; and sends no buffers. With
        find_unused_parameters it has to: it remembers which ones were used."""
        model = self.run.model
        if not self.run.leaves_gradients:
            yield
            return
        assert isinstance(model, nn.parallel.DistributedDataParallel)
        before = model.require_forward_param_sync
        try:
            model.require_forward_param_sync = False
            with model.no_sync():
                yield
        finally:
            model.require_forward_param_sync = before

    def _average(self, gradients: Sequence[torch.Tensor]) -> None:
        """Gradients that are this rank's own: under DDP, and where the loop reduces them itself."""
        run, group = self.run, self.run.replicas.peer_group
        if run.replicas.count == 1 or group is None or not run.shares_gradients:
            return
        if self._averages is None:
            self._averages = run.leaves_gradients
            if not self._averages and not isinstance(
                run.model, nn.parallel.DistributedDataParallel
            ):
                own = gradient_norm(run.parameters).square().reshape(1).to(run.device)
                squares = run.replicas.sum_rows(own).flatten().tolist()
                self._averages = max(squares) > 1.002 * min(squares)
        for gradient in local_parts(gradients) if self._averages else ():
            dist.all_reduce(gradient, group=group)
            gradient.div_(run.replicas.count)

    def _unscale(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Divides by the GradScaler's scale. Returns whether all gradients are finite, on every
        rank alike: a step that overflows is skipped."""
        if self._scaler is None or not self._scaler.is_enabled():
            return True
        bad = torch.zeros(1, dtype=torch.float64)
        for part in local_parts(gradients):
            part.div_(self._scaler.scale(torch.ones((), device=part.device)))
            bad += float(not part.isfinite().all())
        return not self.run.replicas.sum_rows(bad).sum().item()


@contextmanager
def _rates(optimizer: Optimizer, rates: Sequence[tuple[int, float]]) -> Iterator[None]:
    """Inside, groups have these; a tensor is written to, so that a captured step sees it."""
    before: list[tuple[dict[str, Any], Any]] = []
    for number, rate in rates:
        group = optimizer.param_groups[number]
        held = group["lr"]
        if isinstance(held, torch.Tensor):
            before.append((group, held.clone()))
            held.fill_(rate)
        else:
            before.append((group, held))
            group["lr"] = rate
    try:
        yield
    finally:
        for group, held in before:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].copy_(held)
            else:
                group["lr"] = held


def mean_loss(losses: torch.Tensor | None) -> torch.Tensor | None:
    """0-d float64 on the CPU's or the losses' device, without a graph."""
    if losses is None:
        return None
    detached = losses.detach()
    return (detached if detached.device.type == "mps" else detached.double()).mean()
