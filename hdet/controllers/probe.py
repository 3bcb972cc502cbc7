"""The probe: every replica scores the same mini-batches, and a `ProbeRule` decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..core.evidence import KnobSpec
from .batch_losses import BatchLosses
from .probe_rule import PROBE, ProbeRule

__all__ = ["ProbeController"]


class ProbeController(ProbeRule):
    """Scores replicas on common mini-batches, and moves values by what that says. Recommended for
    knobs that are no learning rates.

    Args:
        loss_fn: ``loss_fn(model, batch)`` -> scalar tensor (nats, or any unit); see `BatchLosses`.
        batches: a list of mini-batches, of which each cycle takes the next ``chunks``; or
            ``batches(cycle)`` -> at least ``chunks`` of them. They must be the SAME on every
            replica (checked each cycle) and should not be validation data.
        chunks: mini-batches per cycle, >= 2; the slope's error comes from their scatter.
        model: the module whose parameters the optimizer trains.
        average_every, place: see `BatchLosses`.
        held_out: you say that ``batches`` are not trained on, and that ``loss_fn`` is the objective
            that counts, without smoothing, decay or augmentation. Without it no knob may be
            explored of which training losses are not to be trusted (dropout, weight decay ...).
        rule: settings of the rule (``step``, ``dead``, ``bound``, ``freeze_after``), see
            `ProbeRule`.

    A replica whose probe is not finite is left out of the decision.

    Raises:
        TypeError, ValueError: an argument that cannot be used.

    Example::

        probe = hdet.ProbeController(
            loss_fn, held_out_batches, model=model, held_out=True
        )
        ensemble = hdet.Ensemble(
            optimizer, scheduler, controller=probe, sync=hdet.Sync(100)
        )
    """

    def __init__(
        self,
        loss_fn: Callable[[nn.Module, Any], torch.Tensor],
        batches: Sequence[Any] | Callable[[int], Sequence[Any]],
        chunks: int = 8,
        *,
        model: nn.Module,
        average_every: int = 5,
        place: str = "device",
        held_out: bool = False,
        **rule: Any,
    ) -> None:
        super().__init__(**rule)
        if not isinstance(held_out, bool):  # the mini-batches were passed here
            raise ValueError(f"held_out must be True or False, got {type(held_out).__name__}")
        self.losses = BatchLosses(loss_fn, batches, chunks, model, average_every, place)
        self.measurements = {PROBE: self.losses}
        self.held_out = held_out

    def may_move(self, knob: KnobSpec) -> bool:
        return self.held_out or knob.valid_on_train_loss

    def report(self) -> str:
        """What it measures, and what its rule says."""
        rule = super().report()
        if self.idle:
            return rule
        return f"all replicas score {self.losses.chunks} mini-batches in every cycle; {rule}"
