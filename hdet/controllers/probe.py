"""The probe: every replica scores the same mini-batches, and a `ProbeRule` decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..core.controller import Controller, Learning, RuledController, rule_or_own
from ..core.evidence import Evidence, Run
from ..core.plan import Moment, Plan
from ..core.rules import PROBE, ProbeRule
from ..core.validate import whole
from ..measure.batch_losses import BatchLosses

__all__ = ["ProbeController"]


class ProbeController(RuledController):
    """Scores replicas on common mini-batches and lets a `ProbeRule` decide. Recommended for knobs that are no learning rates.

    Args:
        loss_fn: ``loss_fn(model, batch)`` -> scalar tensor (nats, or any unit: the rule is scale-free); see `BatchLosses`.
        batches: a list of mini-batches, of which each cycle takes the next ``chunks``; or ``batches(cycle)`` -> at least ``chunks``
            of them. They must be the SAME on every replica (checked each cycle) and should not be validation data.
        chunks: mini-batches per cycle, >= 2; the error of the slope comes from their scatter.
        model: the module whose parameters the optimizer trains.
        rule: turns scores into decisions; see `ProbeRule` for its settings.
        interval: cycles from one probe to the next. Of one, each replica is scored at the average of its own weights. Several need shared
            gradients and rates as the only knobs: all replicas are then scored on one weight line, each at the multiplier of the last cycle.
            None: one in a run of 40 cycles or fewer, else 5 % of the run where that is possible.
        average_every, average_from, place, dtype: see `BatchLosses`. (With an interval of one cycle ``dtype`` stays None.)
        freeze_after: see `Controller`; of a rule of your own it is the rule's.
        held_out: you say that ``batches`` are not trained on, and that ``loss_fn`` is the objective that counts, without smoothing, decay
            or augmentation. Without it no knob may be explored of which training losses are no honest judge (dropout, weight decay ...).

    A replica whose probe is NaN or infinite is left out of the decision. A checkpoint holds what has been learned; an interval that was under
    way begins anew.
    """

    def __init__(
        self,
        loss_fn: Callable[[nn.Module, Any], torch.Tensor],
        batches: Sequence[Any] | Callable[[int], Sequence[Any]],
        chunks: int = 8,
        *,
        model: nn.Module,
        rule: Controller | None = None,
        interval: int | None = None,
        average_every: int = 5,
        average_from: float | None = None,
        place: str = "device",
        dtype: torch.dtype | None = None,
        freeze_after: float | None = None,
        held_out: bool = False,
    ) -> None:
        if not isinstance(held_out, bool):
            raise ValueError(f"held_out must be True or False, got {held_out!r}: pass the held-out mini-batches as batches")
        rule = rule_or_own(rule, ProbeRule, freeze_after)
        if interval is not None:
            whole(interval, "interval", of="cycles", why="None chooses one")
        if interval == 1 and dtype is not None:
            raise ValueError(
                f"dtype is {dtype}, but interval is 1, whose average has no beginning to be counted from: in 16 bits it would stand still. "
                "Leave dtype out, or pass place='host'"
            )
        self.losses = BatchLosses(loss_fn, batches, chunks, model, average_every, average_from, place, dtype)
        super().__init__(rule, {PROBE: self.losses})
        self.name = "probe"
        self.interval, self.held_out = interval, held_out
        self.judges_held_out = held_out and self.rule.judges_held_out
        self.cycles = 1
        """The interval's, as soon as the run is known."""

    def start(self, run: Run) -> None:
        """Raises ValueError for an interval that this run cannot have."""
        super().start(run)
        self.cycles = self._cycles(run)

    def report(self) -> str:
        """How often it probes, and what its rule says."""
        said = self.rule.report()
        if self.idle:
            return said
        every = "cycle" if self.cycles == 1 else f"{self.cycles} cycles"
        return "; ".join(filter(None, (f"all replicas score {self.losses.chunks} mini-batches once in every {every}", said)))

    def plan(self, now: Moment) -> Plan:
        return self.rule.plan(now) if self.idle else replace(self.rule.plan(now), measure={PROBE: {"cycles": self.cycles}})

    def learn(self, evidence: Evidence) -> Learning:
        """What the rule learns. Between two probes nothing moves."""
        if self.cycles > 1:
            evidence = replace(evidence, sync_interval=self.cycles * evidence.sync_interval)
            if PROBE not in evidence.measured and not self.idle:
                self.observe(evidence)
                if not self.idle:
                    return self._nothing(evidence)
        return super().learn(evidence)

    def _cycles(self, run: Run) -> int:
        """From one probe to the next."""
        other = [knob.name for knob in run.knobs if not knob.rate or knob.scale.bounded]
        if self.interval is None:
            alone, several = (1 - self.losses.left_out(s) for s in (False, True))
            return 1 if other or run.local else run.clock.control_interval(alone, several)
        for wrong, why in (
            (run.local, "with gradients='local' replicas do not lie on one line"),
            (bool(other), f"{', '.join(map(repr, other))} is no learning rate without bounds, and displacements scale with no other"),
        ):
            if wrong and self.interval > 1:
                raise ValueError(f"interval is {self.interval} cycles, but {why}: pass interval=1, or leave it out")
        total, length = run.total_steps, run.sync_interval
        if total is not None and self.interval * length > max(total, length):
            raise ValueError(f"interval is {self.interval} cycles, but the run has {total // length}: there would be no probe")
        return self.interval
