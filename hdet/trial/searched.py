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

from ..optim.snapshot import Snapshot, masters_of
from ..replicas import Replicas
from ..tensors.dtensor import reshard
from ..tensors.eval_mode import eval_mode

__all__ = ["Closure", "Searched", "losses_by", "mean_of"]

Closure = Callable[[], Any]
"""Computes the losses of the current batch again: shape (examples,), or one number, with a graph.
Or it calls backward itself, and returns them without one. None: this rank sees no loss."""


@dataclass
class Searched:
    """A run whose rate is searched."""

    model: nn.Module  # as the loop calls it, with its DistributedDataParallel if it has one
    optimizer: Optimizer
    replicas: Replicas
    peaks: Callable[[], Sequence[tuple[int, float]]]  # (group, its peak) of those that are searched
    shares_gradients: bool = True  # are gradients averaged over the replicas?
    aside: Callable[[], AbstractContextManager[None]] = nullcontext  # steps in it are not counted
    owns_weights: bool = False  # has the optimizer parameters that the model's follow?
    find_doubt: Callable[[], str] = str  # why these may not be the peaks; "": nothing says so

    def __post_init__(self) -> None:
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.module, self.leaves_gradients = self.model, False
        if isinstance(self.model, DistributedDataParallel):
            self.module = self.model.module
            # it remembers which parameters were used
            self.leaves_gradients = not self.model.find_unused_parameters
        self._needs_graph = False

    # -- weights -----------------------------------------------------------------------------------

    @property
    def rate(self) -> float:
        """The peak of the first group that has one; 0 if all stand still."""
        return next((peak for _, peak in self.peaks() if peak > 0), 0.0)

    @cached_property
    def _names(self) -> list[str | None]:
        """By parameter, the same for the whole search; None where nothing is searched: another
        group's, or a frozen one."""
        peaks, names = self.peaks(), {id(p): name for name, p in self.module.named_parameters()}
        chosen = {number for number, peak in peaks if peak > 0} or {number for number, _ in peaks}
        found: list[str | None] = []
        for number, group in enumerate(self.optimizer.param_groups):
            for p in group["params"]:
                name = names.get(id(p), f"parameter {len(found)}")
                is_trained = p.requires_grad or self.owns_weights
                found.append(name if number in chosen and is_trained else None)
        return found

    def rate_in_force(self, group: int) -> Any:
        """Of the step that was done; a schedule-free optimizer has a warm-up of its own."""
        own = self.optimizer.param_groups[group]
        return own.get("scheduled_lr", own["lr"])

    def weights(self) -> dict[str, torch.Tensor]:
        """Of what is searched, by name in the model: as they are stepped, masters where there are
        any."""
        masters = masters_of(self.optimizer, self.parameters, 0)()
        # A split master is the parameter's further bits: not a number by itself.
        return {name: master if master is not None and master.is_floating_point() else _real(p)
                for name, p, master in zip(self._names, self.parameters, masters, strict=True)
                if name is not None}  # fmt: skip

    def take_snapshot(self, place: str) -> Snapshot:
        """Of all that is trained. ``place``: "device" or "host"."""
        snapshot = Snapshot(self.parameters, self.optimizer, place, self.module)
        snapshot.take()
        return snapshot

    def restore(self, snapshot: Snapshot) -> None:
        """Puts it in the place of the weights. Buffers that were made since stay."""
        snapshot.restore(keep_new_buffers=True)
        self.forget_gathered()

    def forget_gathered(self) -> None:
        """Weights were written: neither gathered shards nor cast copies of others may be left."""
        reshard(self.module)
        torch.clear_autocast_cache()

    # -- gradients and losses ----------------------------------------------------------------------

    def clear_gradients(self) -> None:
        for parameter in (*self.parameters, *self.module.parameters()):
            parameter.grad = None

    @contextmanager
    def keep_gradients(self) -> Iterator[None]:
        """Inside there are none, to which a closure would add; afterwards those that were there."""
        # DDP's gradients may be views of its buckets, into which others are written too.
        shared = getattr(self.model, "gradient_as_bucket_view", False)
        held = [(p, p.grad, p.grad.clone() if shared and p.grad is not None else None)
                for p in (*self.parameters, *self.module.parameters())]  # fmt: skip
        self.clear_gradients()
        try:
            yield
        finally:
            for parameter, gradient, values in held:
                parameter.grad = gradient
                if gradient is not None and values is not None:
                    gradient.copy_(values)

    def score(self, closure: Closure) -> torch.Tensor | None:
        """The mean loss of the weights that are in place, in eval mode and without gradients where
        that can be: 0-d; None where this rank sees none."""
        with eval_mode(self.module):
            if not self._needs_graph:
                try:
                    return mean_of(losses_by(closure))
                except RuntimeError as error:
                    if "does not require grad" not in str(error):
                        raise
                    self._needs_graph = True  # a closure that differentiates by itself
            self.forget_gathered()
            with torch.enable_grad():
                losses = losses_by(closure)
            self.clear_gradients()
            return mean_of(losses)

    # -- is it such a run? -------------------------------------------------------------------------

    def can_spread(self, scaler: Any) -> bool:
        """Can replicas train arms of their own? Nothing in a step may communicate then."""
        syncs = any(isinstance(module, nn.SyncBatchNorm) for module in self.module.modules())
        leaves = self.leaves_gradients or not self.shares_gradients
        return leaves and scaler is None and not syncs

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


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as real and imaginary parts, side by side."""
    return torch.view_as_real(tensor).flatten(-2) if tensor.is_complex() else tensor


def losses_by(closure: Closure) -> torch.Tensor | None:
    """What it returns, as a tensor. Raises TypeError for anything else, RuntimeError for a closure
    that takes batches of its own until there are none."""
    try:
        losses = closure()
    except StopIteration as error:
        raise RuntimeError(
            "the closure ran to the end of an iterator: it computes the losses of the step's own "
            "batch again, so take the batch in the loop"
        ) from error
    if losses is None:
        return None
    if isinstance(losses, (int, float)):
        return torch.tensor(float(losses))
    if not isinstance(losses, torch.Tensor):
        raise TypeError(
            f"the closure returned a {type(losses).__name__}: return a tensor of losses, one "
            "for each example, one number, or None where no loss is seen"
        )
    if not losses.is_floating_point():
        raise TypeError(f"the closure returned {losses.dtype} numbers: return the losses")
    return losses if losses.numel() else None


def mean_of(losses: torch.Tensor | None) -> torch.Tensor | None:
    """0-d, float64 but for devices that have none, without a graph."""
    if losses is None:
        return None
    detached = losses.detach()
    return (detached if detached.device.type == "mps" else detached.double()).mean()
