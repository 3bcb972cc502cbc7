"""The probe: every replica scores the same mini-batches, and a `ProbeRule` decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..core.evidence import Evidence, Run
from ..core.plan import Decision
from ..core.validate import whole
from .batch_losses import BatchLosses
from .probe_rule import PROBE, ProbeRule

__all__ = ["ProbeController"]

FEW, INTERVALS = 40, 20
"""Runs of more cycles than a few have so many intervals. The later half of each is averaged, 1/40
of the run: over less, the weights' noise stays, and votes for a lower rate."""


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
        interval: cycles from one probe to the next. Of one, each replica is scored at the average
            of its own weights. Several need shared gradients and rates as the only knobs: all
            replicas are then scored on one weight line, each at the multiplier of the last cycle.
            None: one in a run of 40 cycles or fewer, else 5 % of the run where that is possible.
        average_every, place: see `BatchLosses`.
        held_out: you say that ``batches`` are not trained on, and that ``loss_fn`` is the objective
            that counts, without smoothing, decay or augmentation. Without it no knob may be
            explored of which training losses are no honest judge (dropout, weight decay ...).
        rule: settings of the rule (``step``, ``dead``, ``bound``, ``freeze_after``), see
            `ProbeRule`.

    A replica whose probe is not finite is left out of the decision. A checkpoint holds what has
    been learned; an interval that was under way begins again.

    Raises:
        TypeError, ValueError: an argument that cannot be used.

    Example::

        probe = hdet.ProbeController(loss_fn, held_out_batches, model=model, held_out=True)
        ensemble = hdet.Ensemble(optimizer, scheduler, controller=probe, sync=hdet.Sync(100))
    """

    def __init__(
        self,
        loss_fn: Callable[[nn.Module, Any], torch.Tensor],
        batches: Sequence[Any] | Callable[[int], Sequence[Any]],
        chunks: int = 8,
        *,
        model: nn.Module,
        interval: int | None = None,
        average_every: int = 5,
        place: str = "device",
        held_out: bool = False,
        **rule: Any,
    ) -> None:
        super().__init__(**rule)
        if not isinstance(held_out, bool):  # the mini-batches were passed here
            raise ValueError(f"held_out must be True or False, got {type(held_out).__name__}")
        if interval is not None:
            whole(interval, "interval", of="cycles", why="None chooses one")
        self.losses = BatchLosses(loss_fn, batches, chunks, model, average_every, place)
        self.measurements = {PROBE: self.losses}
        self.interval, self.judges_held_out = interval, held_out

    def start(self, run: Run) -> None:
        """Raises ValueError for an interval that this run cannot have."""
        super().start(run)
        self.losses.cycles = self._cycles_between_probes(run)

    def report(self) -> str:
        """How often it probes, and what its rule says."""
        rule, cycles = super().report(), self.losses.cycles
        if self.idle:
            return rule
        every = "cycle" if cycles == 1 else f"{cycles} cycles"
        return f"all replicas score {self.losses.chunks} mini-batches once in every {every}; {rule}"

    def learn(self, evidence: Evidence) -> list[Decision]:
        """As the rule, to which an interval is a cycle. Between two probes nothing moves."""
        cycles = self.losses.cycles
        if cycles > 1:
            evidence = replace(evidence, sync_interval=cycles * evidence.sync_interval)
            if PROBE not in evidence.measured and not self.idle:
                self.observe(evidence)
                if not self.idle:
                    return [Decision() for _ in evidence.knobs]
        return super().learn(evidence)

    def _cycles_between_probes(self, run: Run) -> int:
        """Raises ValueError for an interval that this run cannot have."""
        other = [knob.name for knob in run.knobs if not knob.rate or knob.scale.bounded]
        why = ""
        if run.local:
            why = "with gradients='local' replicas do not lie on one line"
        elif other:
            names = ", ".join(map(repr, other))
            why = (
                f"{names} is no learning rate without bounds, and displacements scale with no other"
            )
        total, length = run.total_steps, run.sync_interval
        if self.interval is None:
            cycles = 0 if total is None else total // length
            return 1 if why or cycles <= FEW else math.ceil(cycles / INTERVALS)
        if self.interval == 1:
            return 1
        if not why and total is not None and self.interval * length > max(total, length):
            why = f"the run has {total // length}: there would be no probe"
        if why:
            raise ValueError(
                f"interval is {self.interval} cycles, but {why}: pass interval=1, or leave it out"
            )
        return self.interval
