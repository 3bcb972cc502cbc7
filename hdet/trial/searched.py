"""What a search needs of a run: its parts, and the losses of the weights that are in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..replicas import Replicas
from ..run.snapshot import Snapshot
from ..tensors.dtensor import reshard
from ..tensors.eval_mode import eval_mode

__all__ = ["Closure", "Scorer", "Searched", "keep_gradients", "mean_of"]

Closure = Callable[[], Any]
"""Computes the losses of the current batch again: shape (examples,), or one number, with a graph.
Or it calls backward itself, and returns them without one. None: this rank sees no loss."""


@dataclass(frozen=True)
class Searched:
    """A run whose rate is searched.

    Attributes:
        model: as the loop calls it, with its DistributedDataParallel if it has one.
        parameters: those that the optimizer steps, in the order of its groups.
        masters: gives what the optimizer keeps beside each of them in more bits.
        peaks: gives (parameter group, its peak rate) of the groups whose rates are searched.
        shares_gradients: are gradients averaged over the replicas?
        aside: inside it ``optimizer.step()`` is the optimizer's own, which nobody counts.
        owns_weights: has the optimizer parameters of its own, which the model's follow?
    """

    model: nn.Module
    optimizer: Optimizer
    parameters: Sequence[torch.Tensor]
    masters: Callable[[], Sequence[torch.Tensor | None]]
    peaks: Callable[[], Sequence[tuple[int, float]]]
    replicas: Replicas
    shares_gradients: bool = True
    aside: Callable[[], AbstractContextManager[None]] = nullcontext
    owns_weights: bool = False

    @property
    def module(self) -> nn.Module:
        """Without a DistributedDataParallel."""
        model = self.model
        return model.module if isinstance(model, DistributedDataParallel) else model

    @property
    def leaves_gradients(self) -> bool:
        """Can a backward pass leave gradients unreduced?"""
        model = self.model
        return isinstance(model, DistributedDataParallel) and not model.find_unused_parameters

    @property
    def rate(self) -> float:
        """The peak of the first group that has one; 0 if all stand still."""
        return next((peak for _, peak in self.peaks() if peak > 0), 0.0)

    def weights(self) -> list[torch.Tensor]:
        """Of the groups that are searched, as they are stepped; without what is frozen."""
        triples = zip(self.parameters, self.masters(), self._is_searched, strict=True)
        # A split master is the parameter's further bits: not a number by itself.
        return [master if master is not None and master.is_floating_point() else p
                for p, master, searched in triples if searched]  # fmt: skip

    def names(self) -> list[str]:
        """Of `weights`, in the model."""
        by_id = {id(p): name for name, p in self.module.named_parameters()}
        names = [by_id.get(id(p), f"parameter {i}") for i, p in enumerate(self.parameters)]
        pairs = zip(names, self._is_searched, strict=True)
        return [name for name, searched in pairs if searched]

    @cached_property
    def _is_searched(self) -> list[bool]:
        """By parameter; the same for the whole search."""
        peaks = self.peaks()
        chosen = {number for number, peak in peaks if peak > 0} or {number for number, _ in peaks}
        groups = enumerate(self.optimizer.param_groups)
        pairs = [(number, p) for number, group in groups for p in group["params"]]
        return [number in chosen and (p.requires_grad or self.owns_weights) for number, p in pairs]

    def take_snapshot(self, place: str) -> Snapshot:
        """Of all that is trained. ``place``: "device" or "host"."""
        snapshot = Snapshot(self.parameters, self.optimizer, place, self.module)
        snapshot.take()
        return snapshot

    def restore(self, snapshot: Snapshot) -> None:
        """Puts it in the place of the weights. Buffers that were made since stay."""
        snapshot.restore(keep_new_buffers=True)
        self.forget_gathered()

    def clear_gradients(self) -> None:
        for parameter in (*self.parameters, *self.module.parameters()):
            parameter.grad = None

    def forget_gathered(self) -> None:
        """Weights were written: neither gathered shards nor cast copies of others may be left."""
        reshard(self.module)
        torch.clear_autocast_cache()

    def can_spread(self, scaler: Any) -> bool:
        """Can replicas train arms of their own? They train different numbers of them, so nothing
        in a step may communicate."""
        leaves = self.leaves_gradients or not self.shares_gradients
        modules = self.module.modules()
        syncs = scaler is not None or any(isinstance(m, nn.SyncBatchNorm) for m in modules)
        return leaves and not syncs

    def check(self) -> None:
        """Raises ValueError for a run whose arms could not be trained, or not without a trace."""
        reshard(self.module)  # an evaluation may have left gathered parameters
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS evaluates the loss inside its step, which copies cannot follow")
        own, trained = set(self.module.parameters()), set(self.parameters)
        if self.owns_weights:
            return
        if not trained <= own:
            raise ValueError(
                "AutoLR(model): this model has no parameter of the optimizer, or not all of them. "
                "Pass the module that the optimizer trains, such as "
                "nn.ModuleList([encoder, decoder])"
            )
        if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in own - trained):
            raise ValueError(
                "a parameter of the model is not this optimizer's and has a hook that runs after "
                "its gradient (an optimizer inside the backward pass?), which a trial would "
                "trigger: put all parameters into one optimizer"
            )


@contextmanager
def keep_gradients(run: Searched) -> Iterator[None]:
    """Inside there are none, to which a closure would add; afterwards there are those of before."""
    # DDP's gradients may be views of its buckets, into which others are written too.
    shared = getattr(run.model, "gradient_as_bucket_view", False)
    held = [(p, p.grad, p.grad.clone() if shared and p.grad is not None else None)
            for p in (*run.parameters, *run.module.parameters())]  # fmt: skip
    run.clear_gradients()
    try:
        yield
    finally:
        for parameter, gradient, values in held:
            parameter.grad = gradient
            if gradient is not None and values is not None:
                gradient.copy_(values)


class Scorer:
    """Computes losses of the weights that are in place."""

    def __init__(self, run: Searched) -> None:
        self._run, self._needs_graph = run, False

    def loss(self, closure: Closure) -> torch.Tensor | None:
        """The mean loss, in eval mode and without gradients where that can be: 0-d float64; None
        where this rank sees none."""
        with eval_mode(self._run.module):
            if not self._needs_graph:
                try:
                    return mean_of(self.losses(closure))
                except RuntimeError as error:
                    if "does not require grad" not in str(error):
                        raise
                    self._needs_graph = True  # a closure that differentiates by itself
            self._run.forget_gathered()
            with torch.enable_grad():
                losses = self.losses(closure)
            self._run.clear_gradients()
            return mean_of(losses)

    def losses(self, closure: Closure) -> torch.Tensor | None:
        """What the closure returns, as a tensor. Raises TypeError for anything else."""
        losses = closure()
        if isinstance(losses, (int, float)):
            return torch.tensor(float(losses))
        if losses is not None and not isinstance(losses, torch.Tensor):
            raise TypeError(
                f"the closure returned a {type(losses).__name__}: return a tensor of losses, one "
                "for each example, one number, or None where no loss is seen"
            )
        return losses if losses is not None and losses.numel() else None


def mean_of(losses: torch.Tensor | None) -> torch.Tensor | None:
    """0-d, float64 but for devices that have none, without a graph."""
    if losses is None:
        return None
    detached = losses.detach()
    return (detached if detached.device.type == "mps" else detached.double()).mean()
