"""The weights of a run with the lowest held-out loss, as Keras and Lightning keep them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..core.validate import warn
from ..optim.snapshot import keeps_weights
from ..tensors.buffers import BufferCopies, keep, put
from .searched import Searched

__all__ = ["BestWeights"]

TIMES = 60
"""How often in a run the held-out loss is computed."""


class BestWeights:
    """Evaluates held-out data 60 times in a run and keeps a copy of the best weights and buffers.

    Args:
        val_batches: ``(loss_fn, batches)``: ``loss_fn(model, batch)`` -> losses; held-out
            mini-batches, the same on every rank or each rank's own.

    Attributes:
        loss: the lowest held-out loss so far.
        step: optimizer steps of the run when it was measured; 0: not yet.
        steps: those that were made.

    Raises:
        ValueError: another pair, no batch, or what can be read once only.
    """

    def __init__(self, val_batches: tuple[Callable[[nn.Module, Any], Any], Sequence[Any]]) -> None:
        pair = (
            val_batches if isinstance(val_batches, (tuple, list)) and len(val_batches) == 2 else ()
        )
        if not pair or not callable(pair[0]) or not hasattr(pair[1], "__len__") or not len(pair[1]):
            kinds = " and ".join(f"a {type(one).__name__}" for one in pair or [val_batches])
            raise ValueError(
                "val_batches must be (loss_fn, batches), with loss_fn(model, batch) -> losses and "
                f"a list of at least one batch, got {kinds}"
            )
        self.loss_fn, self.batches = pair
        self.loss, self.step = math.inf, 0
        self.steps = 0
        self._weights: list[Any] = []

    def attach(self, run: Searched, total_steps: int | None, place: str) -> None:
        """Raises ValueError for a run of unknown length, or of several models."""
        if total_steps is None:
            raise ValueError("val_batches needs a run of known length: pass total_steps")
        if run.owns_weights or not run.shares_gradients:
            raise ValueError(
                "val_batches keeps the weights of one model: leave it out with local gradients, "
                "and where the optimizer has parameters of its own (refresh=)"
            )
        if keeps_weights(run.optimizer):
            raise ValueError(
                f"val_batches keeps parameters alone, and {type(run.optimizer).__name__} has other "
                "weights beside them: leave it out, and measure after optimizer.eval()"
            )
        self._run, self._on_host = run, place == "host"
        self._every = max(1, total_steps // TIMES)
        self._buffers = BufferCopies(run.module, self._on_host)

    def after_step(self) -> None:
        """Evaluates, if it is time to."""
        self.steps += 1
        if self.steps % self._every:
            return
        loss = self._held_out_loss()
        if loss < self.loss:
            self.loss, self.step = loss, self.steps
            self._weights = keep(self._run.parameters, self._on_host, self._weights)
            self._buffers.take()

    def _held_out_loss(self) -> float:
        """Mean over batches, over the ranks that see a loss."""
        run = self._run
        run.forget_gathered()
        with run.keep_gradients():
            losses = [run.score(partial(self.loss_fn, run.module, each)) for each in self.batches]
        run.forget_gathered()
        seen = [loss.double().cpu() for loss in losses if loss is not None]
        row = torch.stack([torch.stack(seen).mean(), torch.ones(())]) if seen else torch.zeros(2)
        total, ranks = run.replicas.sum_rows(row, purpose="held-out losses").sum(0).tolist()
        return total / ranks if ranks else math.inf

    @torch.no_grad()
    def restore(self) -> float:
        """See `AutoLR.restore_best_weights`."""
        if not self.step:
            raise ValueError(f"no held-out loss yet: it is computed every {self._every} steps")
        put(self._run.parameters, self._weights)
        self._buffers.put_back()
        self._run.forget_gathered()
        return self.loss

    def state(self) -> list[float]:
        """The lowest loss so far (0: none), its step, and the steps of the run. Not the weights."""
        return [self.loss if self.step else 0.0, self.step, self.steps]

    def load_state(self, state: Sequence[float]) -> None:
        """Goes on to count. Warns of best weights that are lost."""
        loss, step, steps = state
        self.steps = int(steps)
        if step:
            warn(
                f"val_batches: the best weights so far (held-out loss {loss:.4g} at step {step:g}) "
                "are not in the checkpoint. restore_best_weights() gives the best ones after step "
                f"{steps:g}, and returns their loss, which may be higher"
            )

    def __str__(self) -> str:
        return f"best held-out loss: {self.loss:.4g} at step {self.step} of {self.steps}"
