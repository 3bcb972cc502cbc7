"""Losses of the weights that a model has now: of the current batch, as the loop computes them, or of a judge's held-out mini-batches."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..core.rules.trial.protocol import BROKEN
from ..core.validate import whole
from ..tensors.dtensor import reshard
from ..tensors.eval_mode import eval_mode
from .measurement import Closure

__all__ = ["NO_LOSSES", "Judge", "Scorer", "finite", "mean_loss"]

Judge = tuple[Callable[[nn.Module, Any], torch.Tensor], Sequence[Any]]
"""(loss_fn, batches): ``loss_fn(model, batch)`` -> scalar tensor, and held-out mini-batches, the same on every replica."""
NO_LOSSES = "the closure (or the judge's loss function) gave no losses on any rank of a replica: return them where they are seen"


class Scorer:
    """Scores a model, in eval mode and without gradients where that can be.

    Args:
        model: without a DistributedDataParallel around it.
        judge: None, or whose losses `judged` gives. Raises TypeError for one that is no pair of a function of two arguments and a list, ValueError for
            one of fewer than two mini-batches.
    """

    def __init__(self, model: nn.Module, judge: Judge | None) -> None:
        if judge is not None:
            _check(judge)
        self.model, self.judge = model, judge
        self.parameters: Sequence[torch.Tensor] = ()
        """Whose gradients scoring leaves None."""
        self.device = torch.device("cpu")
        self._needs_graph = False
        """Do scores need gradients to be on? Found out by the first one."""

    def losses(self, closure: Closure) -> torch.Tensor | None:
        """The closure's, of the weights that are there now, of which neither a gathered shard nor a cast copy may be left from before; None: it sees none.
        Raises TypeError where it gives something else."""
        reshard(self.model)
        torch.clear_autocast_cache()
        losses = closure()
        if losses is not None and not isinstance(losses, (torch.Tensor, int, float)):
            raise TypeError(
                f"the closure (or the judge's loss function) gave a {type(losses).__name__}: return a tensor of losses, one for each example, one "
                "number, or None where no loss is seen"
            )
        if isinstance(losses, (int, float)):
            return torch.tensor(float(losses), device=self.device)
        return losses if isinstance(losses, torch.Tensor) and losses.numel() else None

    def score(self, closure: Closure) -> torch.Tensor | None:
        """Their mean, 0-d float64. A closure that differentiates by itself (an equation's residual, a penalty on gradients) has a graph."""
        with eval_mode(self.model):
            return self._scored(closure)

    def judged(self, number: int | None = None) -> list[torch.Tensor | None]:
        """By mini-batch of the judge, the mean loss; of so many of them, evenly spaced in its list. None: of all."""
        assert self.judge is not None, "there is a judge"
        loss_fn, batches = self.judge
        count = len(batches) if number is None else number
        with eval_mode(self.model):
            return [self._scored(partial(loss_fn, self.model, batches[i * len(batches) // count])) for i in range(count)]

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _scored(self, closure: Closure) -> torch.Tensor | None:
        if not self._needs_graph:
            try:
                return mean_loss(self.losses(closure))
            except RuntimeError as error:
                if "does not require grad" not in str(error):
                    raise
                self._needs_graph = True
        with torch.enable_grad():
            losses = self.losses(closure)
        self.clear()
        return mean_loss(losses)


def mean_loss(losses: torch.Tensor | None) -> torch.Tensor | None:
    """0-d float64, without a graph."""
    return None if losses is None else losses.detach().double().mean()


def finite(row: torch.Tensor) -> torch.Tensor:
    """What is not, or is too large, is `BROKEN`."""
    return torch.nan_to_num(row, nan=BROKEN, posinf=BROKEN, neginf=BROKEN).clamp(max=BROKEN)


def _check(judge: Any) -> None:
    if not (isinstance(judge, (tuple, list)) and len(judge) == 2 and callable(judge[0])):
        raise TypeError(f"judge must be (loss_fn, batches), with loss_fn(model, batch) -> a tensor of losses, got {reprlib.repr(judge)}")
    if not (hasattr(judge[1], "__len__") and hasattr(judge[1], "__getitem__")):
        raise TypeError(f"the judge's batches must be a list of mini-batches, got {type(judge[1]).__name__}: list(...) it first")
    whole(len(judge[1]), "judge's mini-batches", 2, why="the error of a difference comes from their scatter. Split one into several")
    try:
        signature = inspect.signature(judge[0])
    except ValueError:  # one of C++ does not say
        return
    try:
        signature.bind("model", "batch")
    except TypeError as error:  # now, instead of hundreds of steps later
        raise TypeError(f"the judge's loss_fn is called as loss_fn(model, batch), and takes {signature}: {error}") from None
