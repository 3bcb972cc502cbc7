"""Trials: copies of the run that train beside it for some steps, each at a rate of its own that falls to zero, and are scored then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..core.plan import SnapshotOf
from ..core.rules.trial_rule import BROKEN
from ..core.validate import whole
from ..profiling import ranged
from ..tensors.dtensor import local_parts, reshard
from ..tensors.eval_mode import eval_mode, random_states_kept
from .measurement import Closure, Measurement, Watched, settings_of

__all__ = ["RUN", "Judge", "Trials", "arm"]

RUN = "run"
"""The snapshot in which the run itself waits."""
RISE = 0.2
"""The part of a trial in which its rate rises from the run's to its own."""
LOOKS = 8
"""How often it is looked whether an arm has broken, which waits for the device."""

Judge = tuple[Callable[[nn.Module, Any], torch.Tensor], Sequence[Any]]
"""(loss_fn, batches): ``loss_fn(model, batch)`` -> scalar tensor, and held-out mini-batches, the same on every replica."""


def arm(number: int) -> str:
    """The name of the snapshot that a trial's arm lives in."""
    return f"arm {number}"


class Trials(Measurement):
    """[replica][arm * scores + score]: losses of each arm after its trial.

    An arm begins as the run is then, or as a snapshot is. In each of the first ``steps`` steps it trains on the batch that the run has just trained
    on: the closure is called on its weights, with gradients, and the optimizer steps it. Its rate rises from the run's to ``multiple`` times the
    reference over the first fifth, then falls to zero in a straight line. In the ``scores`` steps that follow, nothing of the arms moves, and
    the closure computes the losses of batches that no arm has seen (in eval mode, without gradients); or those of the judge, at the cycle's end.

    Args:
        model: whose losses the closure computes, as it is called there: wrapped in DistributedDataParallel where the loop has it so.
        judge: held-out mini-batches and a loss function, to score by instead.
        before_step: called between an arm's backward pass and its step, for what the loop does there (clipping).
        place: "device" or "host": where the arms live.

    Settings in a plan: ``trial``, its number: with another one a new trial begins, with the same one it goes on from cycle to cycle; ``multiples``, one for each arm; ``origin``, a snapshot with which they begin (none: the run); ``of``, "peak" (of the base value in the run) or "base" (the one in force when it begins);
    ``steps``; ``scores``. The plan names `snapshots` too. Losses are told at the end of the cycle in which it has lasted ``steps + scores`` steps.

    Each arm costs a step of the run's compute in each of its steps, and memory for all that is trained: parameters, masters, moments, buffers. The run is
    left bit for bit as it was, random states included. A closure whose losses have no graph has done the backward pass itself; it returns None
    on a rank that sees no loss. Gradients that still differ between replicas are averaged.
    """

    needs_closure = True

    def __init__(
        self, model: nn.Module, judge: Judge | None = None, before_step: Callable[[], object] | None = None, place: str = "device"
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if judge is not None and not (isinstance(judge, (tuple, list)) and len(judge) == 2 and callable(judge[0])):
            raise TypeError(f"judge must be (loss_fn, batches), with loss_fn(model, batch) -> a scalar tensor, got {judge!r}")
        if judge is not None:
            whole(len(judge[1]), "judge's mini-batches", 2, why="the error of a difference comes from their scatter")
        if before_step is not None and not callable(before_step):
            raise TypeError(f"before_step must be callable without arguments, got {before_step!r}")
        if place not in ("device", "host"):
            raise ValueError(f"place must be 'device' or 'host', got {place!r}")
        self.model, self.judge, self.before_step, self.place = model, judge, before_step, place
        self._bare = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self._settings: dict[str, Any] = {}
        self._begin()

    @property
    def modules(self) -> Sequence[nn.Module]:
        return [self._bare]

    def snapshots(self, arms: int, origin: str = "") -> dict[str, SnapshotOf]:
        """What a plan with so many arms has to keep."""
        return {name: SnapshotOf(place=self.place) for name in [RUN, *map(arm, range(arms)), *filter(None, [origin])]}

    def watch(self, watched: Watched) -> None:
        """Raises ValueError if none of the optimizer's parameters is the model's, or where one process holds several replicas."""
        own = {id(p) for p in self._bare.parameters()}
        if not watched.copied and not any(id(p) in own for p in watched.sets[0]):
            raise ValueError("the AutoLR's model has no parameter of this optimizer: pass the module that it trains")
        if len(watched.sets) > 1:
            raise ValueError(
                "AutoLR trains copies of the run beside it, for which replicas in one process are of no use: leave replicas out, or choose another "
                "controller for them (docs/choosing.md)"
            )
        self._watched, self._rates = watched, [(k, knob) for k, knob in enumerate(watched.knobs) if knob.key == "lr"]
        self._parameters = watched.sets[0]
        self._device = local_parts(watched.sets[0][:1])[0].device

    def on_cycle_start(self, settings: Any) -> None:
        settings = settings_of(settings, trial=0, multiples=[], of="peak", origin="", steps=1, scores=2)
        if settings == self._settings:  # it goes on
            return
        self._settings = settings
        self._begin()
        snapshots, origin = self._watched.snapshots, self._settings["origin"]
        if origin:
            snapshots.take(RUN)
            snapshots.restore(origin)
        for number in range(len(self._settings["multiples"])):
            snapshots.take(arm(number))
        if origin:
            snapshots.restore(RUN)

    def _begin(self) -> None:
        self._position = 0
        self._losses: list[torch.Tensor | None] = []
        self._broken: set[int] = set()
        self._averages: bool | None = None
        self._references: list[tuple[Any, float, float]] = []

    def release(self) -> None:
        self._settings = {}
        self._begin()

    restart = release

    # -- beside the run ------------------------------------------------------------------------------------------------------

    @ranged("hdet.trials")
    def beside(self, closure: Closure, position: int) -> None:
        if not self._settings:  # parameters were loaded after the cycle's beginning
            return
        self._position += 1
        position, steps, arms = self._position, self._settings["steps"], range(len(self._settings["multiples"]))
        training, scoring = position <= steps, steps < position <= steps + self._settings["scores"]
        if not training and (not scoring or self.judge is not None):
            return
        if position == 1:
            now = self._watched.peaks() if self._settings["of"] == "peak" else [knob.value() for knob in self._watched.knobs]
            self._references = [(knob, knob.value(), now[k]) for k, knob in self._rates]
        snapshots, gradients = self._watched.snapshots, [p.grad for p in self._parameters]
        snapshots.take(RUN)
        looks = position % max(1, steps // LOOKS) == 0 or position == steps
        lost = []
        try:
            for number in arms:
                if training and number in self._broken:
                    continue
                snapshots.restore(arm(number))
                if training:
                    lost.append((number, self._train(closure, number, position)))
                    snapshots.take(arm(number))
                else:
                    self._score(closure)
        finally:
            snapshots.restore(RUN)
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
        if looks and training:
            self._look(lost)

    def _train(self, closure: Closure, number: int, position: int) -> torch.Tensor | None:
        with random_states_kept(self._bare):
            self._clear()
            reshard(self._bare)
            with torch.enable_grad():
                losses = closure()
                if isinstance(losses, torch.Tensor) and losses.requires_grad:
                    losses.mean().backward()
        if all(p.grad is None for p in self._parameters):
            raise ValueError(
                "the closure gave losses without a graph, and left no gradients: compute the batch's losses anew inside it, without no_grad or detach, "
                "or call backward inside"
            )
        self._average_gradients()
        if self.before_step is not None:
            self.before_step()
        part = self._part(position)
        with ExitStack() as stack:
            for knob, at_first, reference in self._references:
                top = self._settings["multiples"][number] * reference
                stack.enter_context(knob.held_at(at_first + (top - at_first) * part if position <= self._rise else top * part))
            stack.enter_context(self._watched.aside())
            self._watched.optimizer.step()
        self._clear()
        return losses.detach().double().mean() if isinstance(losses, torch.Tensor) else None

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @property
    def _rise(self) -> int:
        return max(1, round(RISE * self._settings["steps"]))

    def _part(self, position: int) -> float:
        """Of the way from the run's rate to the arm's own, in the rise; of the arm's own, after it."""
        steps, rise = self._settings["steps"], self._rise
        return position / rise if position <= rise else (steps - position + 1) / (steps - rise + 1)

    def _average_gradients(self) -> None:
        """Those of a loop that all-reduces them by hand are still this rank's own."""
        replicas, group = self._watched.replicas, self._watched.replicas.peer_group
        if replicas.count == 1 or group is None or self._watched.local:
            return
        own = [g for p in self._parameters if p.grad is not None for g in local_parts([p.grad])]
        if self._averages is None:
            square = sum(
                (g.double().square().sum().to(self._device) for g in own), torch.zeros((), dtype=torch.float64, device=self._device)
            )
            sums = replicas.sum_rows(square.reshape(1)).flatten().tolist()
            self._averages = max(sums) > 1.002 * min(sums)
        if self._averages:
            for gradient in own:
                dist.all_reduce(gradient, group=group)
                gradient.div_(replicas.count)

    def _look(self, losses: Sequence[tuple[int, torch.Tensor | None]]) -> None:
        """All ranks leave an arm together: in it they may communicate."""
        row = torch.stack([torch.zeros(()) if loss is None else (~torch.isfinite(loss)).cpu() for _, loss in losses]) if losses else None
        if row is not None:
            broken = self._watched.replicas.sum_rows(row.double().to(self._device)).sum(0).tolist()
            self._broken |= {number for (number, _), count in zip(losses, broken, strict=True) if count}

    def _score(self, closure: Closure) -> None:
        with eval_mode(self._bare):
            reshard(self._bare)
            losses = closure()
        self._losses.append(losses.detach().double().mean() if isinstance(losses, torch.Tensor) and losses.numel() else None)

    # -- at the end ------------------------------------------------------------------------------------------------------------

    def measure(self, cycle: int, place: int = 0) -> torch.Tensor | None:
        """(1 + arms * scores,) float64: 1 and the losses; zeros where this rank sees none."""
        if self._position < self._settings["steps"] + self._settings["scores"] * (self.judge is None):
            return None
        arms = len(self._settings["multiples"])
        table = self._judged(arms) if self.judge is not None else self._by_arm(arms)
        seen = [loss for row in table for loss in row if loss is not None]
        width = sum(map(len, table))
        if len(seen) < width:
            return torch.zeros(1 + width, dtype=torch.float64, device=self._device)
        for number in self._broken:
            table[number] = [torch.full((), BROKEN, dtype=torch.float64)] * len(table[number])
        row = torch.stack([loss.to(self._device) for row in table for loss in row if loss is not None])
        row = torch.nan_to_num(row, nan=BROKEN, posinf=BROKEN, neginf=BROKEN).clamp(max=BROKEN)
        return torch.cat([torch.ones_like(row[:1]), row])

    def _by_arm(self, arms: int) -> list[list[torch.Tensor | None]]:
        """[arm][score], from what stands in the order of steps."""
        scores = self._settings["scores"]
        return [[self._losses[score * arms + number] for score in range(scores)] for number in range(arms)]

    def _judged(self, arms: int) -> list[list[torch.Tensor | None]]:
        assert self.judge is not None
        loss_fn, batches = self.judge
        snapshots = self._watched.snapshots
        snapshots.take(RUN)
        table: list[list[torch.Tensor | None]] = []
        try:
            for number in range(arms):
                snapshots.restore(arm(number))
                with eval_mode(self._bare):
                    reshard(self._bare)
                    table.append([loss_fn(self._bare, batch) for batch in batches])
        finally:
            snapshots.restore(RUN)
        return [[None if loss is None else loss.detach().double().reshape(()) for loss in row] for row in table]

    def split(self, rows: Sequence[Sequence[float]]) -> list[list[float]]:
        """Means over the ranks of a replica that have seen losses.

        Raises:
            ValueError: no rank of a replica has.
        """
        if not all(row[0] for row in rows):
            raise ValueError(
                "the closure (or the judge's loss function) gave no losses on any rank of a replica: return them where they are seen"
            )
        return [[min(x / row[0], BROKEN) for x in row[1:]] for row in rows]
