"""The probe: every replica scores the same mini-batches at its cycle-averaged weights (docs/method.md).

Averaging a replica's weights over the cycle takes away the noise that makes a smaller rate look better for the moment;
scoring all replicas on the same mini-batches takes away the noise of the data. What remains is the direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import truediv
from typing import Any

import torch
from torch import nn

from .converge import Masters, digest
from .core.controllers import Decision, Evidence, ProbeRule
from .core.controllers.base import RuledController
from .points import CyclePoints, LinePoints
from .ranges import ranged
from .sensor import Run
from .shards import local_parts, reshard
from .undisturbed import undisturbed
from .way import check_room

__all__ = ["ProbeController"]

LATER = 0.5
"""The part of an interval of several cycles that is left out of the average: all of it lags half the way behind, and votes for a higher rate."""


class ProbeController(RuledController):
    """Scores replicas on common mini-batches and lets a `ProbeRule` decide. Recommended for knobs that are no learning rates.

    Args:
        loss_fn: ``loss_fn(model, batch)`` -> scalar tensor (nats, or any unit: the rule is scale-free). Called in eval mode,
            without gradients, on the bare module (a DistributedDataParallel wrapper is taken off: its collectives have no place here).
            All ranks of a replica call it together, so a model that is split over them runs as it does in training; a rank that
            does not see the loss (a pipeline stage before the last) returns None.
        batches: a list of mini-batches, of which each cycle takes the next ``chunks``; or ``batches(cycle)`` -> at least ``chunks``
            of them. They must be the SAME on every replica (checked each cycle) and should not be validation data.
        chunks: mini-batches per cycle, >= 2; the error of the slope comes from their scatter.
        model: the module whose parameters the optimizer trains.
        rule: turns scores into decisions; see `ProbeRule` for its settings.
        interval: cycles from one probe to the next. Of one, each replica is scored at the average of its own weights. With shared gradients
            and rates as knobs alone it may be several: all are then scored on the line from where the interval began through the average
            of the mean weights over its later part, each at the multiplier of the last cycle. None: as long as averages over a
            fortieth of the run ask for, where it may be several: one of a run of 40 cycles or fewer, else 5 % of the run.
        average_every: sample the average every so many steps.
        average_from: part of the interval, in [0, 1), that is left out of the average at its beginning; None: 0 of one cycle, half of several.
        place: "device" or "host": where averages (and the interval's beginning) live. On the host they cost two copies over the bus a sample.
        dtype: of average and beginning in intervals of several cycles; None: float32, or the parameters' own if that is wider.
            torch.bfloat16 halves them. (A single cycle's average has no beginning to be counted from, and stays float32.)
        freeze_after: see `BaseController`; of a rule of your own it is the rule's.
        held_out: you say that ``batches`` are not trained on, and that ``loss_fn`` is the objective that counts, without smoothing, decay
            or augmentation. Without it no knob may be explored of which training losses are no honest judge (dropout, weight decay ...).

    Costs ``chunks`` forward passes per replica and interval, and no gradient; one copy of the parameters, of an interval of several cycles
    two, and two averages of the parameters over replicas at its end. A replica whose probe is NaN or infinite is left out of the decision.
    A checkpoint holds what has been learned; an interval that was under way begins anew.
    """

    name = "probe"
    needs_probe = True
    measures = "probes"

    def __init__(
        self,
        loss_fn: Callable[[nn.Module, Any], torch.Tensor],
        batches: Sequence[Any] | Callable[[int], Sequence[Any]],
        chunks: int = 8,
        *,
        model: nn.Module,
        rule: ProbeRule | None = None,
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
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be callable as loss_fn(model, batch), got {type(loss_fn).__name__}")
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not callable(batches) and not (hasattr(batches, "__len__") and hasattr(batches, "__getitem__")):
            raise TypeError(
                f"batches must be a list of mini-batches or a function of the cycle, got {type(batches).__name__}: list(...) it first"
            )
        if rule is not None and not hasattr(rule, "update"):
            raise TypeError(f"rule must be a ProbeRule, got {type(rule).__name__}")
        if rule is not None and freeze_after is not None:
            raise ValueError(f"freeze_after is {freeze_after!r}, but a rule is given: pass it to the rule, ProbeRule(freeze_after=...)")
        if not isinstance(chunks, int) or chunks < 2:
            raise ValueError(
                f"chunks must be a whole number >= 2, got {chunks!r}: the slope's error comes from the scatter over mini-batches"
            )
        if not isinstance(average_every, int) or average_every < 1:
            raise ValueError(f"average_every must be a whole number of steps >= 1, got {average_every!r}")
        if average_from is not None and (not isinstance(average_from, (int, float)) or not 0 <= average_from < 1):
            raise ValueError(f"average_from must lie in [0, 1) or be None, got {average_from!r}")
        if interval is not None and (not isinstance(interval, int) or isinstance(interval, bool) or interval < 1):
            raise ValueError(f"interval must be a whole number of cycles >= 1 or None, got {interval!r}")
        check_room(place, dtype)
        if interval == 1 and dtype is not None:
            raise ValueError(
                f"dtype is {dtype}, but interval is 1, whose average has no beginning to be counted from: in 16 bits it would stand still. "
                "Leave dtype out, or pass place='host'"
            )
        if not callable(batches) and len(batches) < chunks:
            raise ValueError(f"batches holds {len(batches)} mini-batches, chunks asks for {chunks} per cycle: pass more, or lower chunks")
        self.loss_fn, self.batches, self.chunks = loss_fn, batches, chunks
        self.model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        super().__init__(ProbeRule(freeze_after=freeze_after) if rule is None else rule)
        self.interval, self.average_every, self.average_from, self.held_out = interval, average_every, average_from, held_out
        self.place, self.dtype = place, dtype
        self.cycles = 1
        """The interval's, as soon as the run is known."""
        self._points: CyclePoints | LinePoints = CyclePoints((), (), average_every, 0.0, place)
        self._device = torch.device("cpu")

    # -- called by the Ensemble ------------------------------------------------------------------------------------------

    @property
    def row_width(self) -> int:
        """Numbers per replica in the slots: how many ranks have seen losses, their sums by chunk, and the mini-batches' digest."""
        return self.chunks + 2

    def watch(
        self, *replicas: Sequence[torch.Tensor], masters: Sequence[Masters] | None = None, knobs: Sequence[Any] = (), run: Run | None = None
    ) -> None:
        """The parameters to average over the interval: those the optimizer trains, of each replica in this process; and their masters.

        Raises:
            ValueError: none of them is the model's, so the probe would score the same weights for ever; or the interval is not one that
                this run can have.
        """
        own = {id(p) for p in self.model.parameters()}
        if not any(id(p) in own for p in replicas[0]):
            raise ValueError("the ProbeController's model has no parameter of this optimizer: pass the module that it trains")
        whole, later = (0.0, LATER) if self.average_from is None else 2 * (self.average_from,)
        self.cycles = 1 if run is None else _cycles(self.interval, run, knobs, run.clock.control_interval(1 - whole, 1 - later))
        self._device = local_parts(replicas[0][:1])[0].device
        held = [None] * len(replicas) if masters is None else masters
        if run is None or self.cycles == 1:
            self._points = CyclePoints(replicas, held, self.average_every, whole, self.place)
            return
        self._points = LinePoints(replicas, held, _owners(knobs), run, self.cycles, self.average_every, later, self.place, self.dtype)

    def begin_anew(self) -> None:
        self._points.begin_anew()

    def close(self) -> None:
        self._points.rest()

    def depart(self, step: int) -> None:
        self._points.depart()

    def forget(self) -> None:
        self._points.forget()

    def sample(self, position: int, length: int) -> None:
        """After step ``position`` (1 .. ``length``) of a cycle of ``length`` steps; its last step is always a sample."""
        self._points.sample(position, length)

    @ranged("hdet.probe")
    def measure(self, cycle: int, place: int = 0) -> torch.Tensor:
        """(row_width,) float64: 1 and the chunk losses at this replica's point (zeros where this rank sees none), then the mini-batches'
        digest; empty while an interval goes on.

        ``place``: which of the watched replicas; the model must have its weights now.
        """
        if not self._points.due:
            return torch.zeros(0, dtype=torch.float64)
        with undisturbed(self.model):
            chosen = self._choose(cycle)
            try:
                with self._points.at(place):
                    reshard(self.model)
                    losses = [self.loss_fn(self.model, batch) for batch in chosen]
            finally:
                reshard(self.model)
        marks = digest(list(_tensors_in(chosen)))[1:]
        if all(loss is None for loss in losses):
            return torch.cat([torch.zeros(1 + self.chunks, dtype=torch.float64, device=self._device), marks.to(self._device)])
        row = torch.stack([_scalar(loss) for loss in losses])
        return torch.cat([torch.ones_like(row[:1]), row, marks.to(row.device)])

    def split(self, rows: Sequence[Sequence[float]]) -> list[list[float]] | None:
        """Added-up rows -> chunk losses per replica; None of empty rows.

        Raises:
            ValueError: no rank of a replica has seen a loss.
            RuntimeError: replicas scored different mini-batches, so their losses cannot be compared.
        """
        if not rows[0]:
            return None
        seen, *chunks, marks = zip(*rows, strict=True)  # columns: of a thousand rows each number by itself would cost too much
        if len(set(marks)) > 1:
            raise RuntimeError(
                "the replicas were given different probe batches: make `batches` a function of the cycle alone (not of the rank or a shared generator)"
            )
        if not all(seen):
            raise ValueError(
                f"loss_fn returned None on every rank of replica {seen.index(0)}: the rank that sees the loss must return it as a tensor"
            )
        return list(map(list, zip(*(map(truediv, chunk, seen) for chunk in chunks), strict=True)))

    def update(self, evidence: Evidence) -> list[Decision]:
        """Of the rule, whose cycles are intervals; while one goes on nothing moves, and the rule only sees where the schedule is."""
        if self.cycles > 1:
            if evidence.probes is None and not self.idle:
                self.see(evidence)
                if not self.idle:
                    return [Decision()] * len(evidence.knobs)
            evidence = replace(evidence, sync_interval=self.cycles * evidence.sync_interval)
        decisions = super().update(evidence)
        if self.idle:
            self._points.rest()
        return decisions

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.begin_anew()

    def _choose(self, cycle: int) -> list[Any]:
        if callable(self.batches):
            chosen = list(self.batches(cycle))[: self.chunks]
            if len(chosen) < self.chunks:
                raise ValueError(f"batches({cycle}) returned {len(chosen)} mini-batches, chunks asks for {self.chunks}")
            return chosen
        return [self.batches[(cycle * self.chunks + i) % len(self.batches)] for i in range(self.chunks)]


def _cycles(interval: int | None, run: Run, knobs: Sequence[Any], default: int) -> int:
    """From one probe to the next; ``default`` where it may be several. Raises ValueError for an interval that this run cannot have."""
    other = [knob.name for knob in knobs if knob.key != "lr" or knob.scale.bounded]
    if interval is None:
        return 1 if other or run.gradients == "local" else default
    for wrong, why in (
        (run.gradients == "local", "with gradients='local' replicas do not lie on one line"),
        (bool(other), f"{', '.join(map(repr, other))} is no learning rate without bounds, and displacements scale with no other"),
    ):
        if wrong and interval > 1:
            raise ValueError(f"interval is {interval} cycles, but {why}: pass interval=1, or leave it out")
    total = run.clock.total_steps
    if total is not None and interval * run.clock.sync_interval > max(total, run.clock.sync_interval):
        raise ValueError(f"interval is {interval} cycles, but the run has {total // run.clock.sync_interval}: there would be no probe")
    return interval


def _owners(knobs: Sequence[Any]) -> list[int | None]:
    """The number of the knob of each parameter of the optimizer, in the order of its groups."""
    owners = {index: k for k, knob in enumerate(knobs) for index in knob.indices}
    groups = knobs[0].optimizer.param_groups
    return [owners.get(g) for g, group in enumerate(groups) for _ in group["params"]]


def _scalar(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn must return one number as a tensor, got {shape}: return the mean over the batch")
    return loss.detach().double().reshape(())


def _tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors_in(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors_in(value)
