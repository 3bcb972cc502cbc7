"""The stats of a cycle: one row of numbers per replica, added up over its ranks, the same on every rank of all replicas.

A row is (loss sum, weight, a mark of the schedule's values), and only where more is to be compared more: 3N numbers a cycle for every layout.
All ranks of a replica add to its row: micro-batches, context-parallel ranks and pipeline stages add up (a stage without a loss adds nothing), and
ranks that see the same loss (tensor parallel) cancel in the ratio. A parameter that is not finite makes the weight NaN, which no loss can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from ..converge import Masters, all_finite, digest
from ..profiling import ranged
from ..replicas import Replicas
from ..tensors.dtensor import local_parts
from .loss_meter import LossMeter

__all__ = ["CycleStats", "LocalReplica", "gather_stats", "local_replicas", "masters_of", "parse"]


@dataclass(frozen=True)
class LocalReplica:
    """A replica of this process, or this process's part of one, in the running cycle."""

    ask: Callable[[], Sequence[torch.Tensor]]
    """Gives its parameters and buffers, which may be others by now."""
    masters: Masters
    """Gives what the optimizer keeps beside each of them: float32, or the lower half of the split form, or None."""
    loss_meter: LossMeter

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        return self.ask()


def local_replicas(replicas: Replicas, optimizer: Optimizer, tensors: Sequence[torch.Tensor]) -> list[LocalReplica]:
    """The replicas that this process holds, each with its own of ``tensors``."""
    device = local_parts(tensors[:1])[0].device
    return [
        LocalReplica(lambda place=place: replicas.sets(tensors)[place], masters_of(optimizer, tensors, place), LossMeter(device))  # type: ignore[misc]
        for place in range(len(replicas.local))
    ]


def masters_of(optimizer: Optimizer, tensors: Sequence[torch.Tensor], place: int) -> Masters:
    """For the local replica at that place. Only a fused optimizer's are known: what others call a master is not read."""
    ask = getattr(optimizer, "masters", None)
    return (lambda: ask(tensors, place)) if callable(ask) else (lambda: [None] * len(tensors))


class CycleStats(NamedTuple):
    """What one replica contributes at the end of a cycle, and what follows from it. (Made by `parse`, a thousand at a time.)"""

    loss_sum: float
    weight: float
    digest: tuple[float, ...]
    """Of its parameters, where replicas are to be compared; else empty."""
    marks: tuple[float, ...]
    """Of what else must be alike on all replicas."""
    probe: tuple[float, ...]
    """The probe's row, added up over the replica's ranks; empty if there was none."""
    finite: bool
    """Are all its parameters finite?"""
    raw_loss: float | None
    """Mean training loss over the cycle, whatever it is; None if it has none."""
    loss: float | None
    """Mean training loss over the cycle; None if it has none, or one that must not count."""
    votes: bool
    """May its probe count? Not with broken parameters, nor with a training loss that was NaN or infinite."""


@ranged("hdet.cycle_stats")
def gather_stats(
    replicas: Replicas,
    members: Sequence[LocalReplica],
    probes: Sequence[torch.Tensor] | None,
    *,
    compare: bool,
    marks: Sequence[float] = (),
) -> list[CycleStats]:
    """One small all_reduce, then one read by the host: the only place where a cycle waits for the device.

    ``members``: this process's replicas; ``probes``: the probe's row of each. ``compare`` adds a digest of the parameters, by
    which replicas that should be equal are recognised; ``marks`` are whole numbers below 2^40 that are to be compared.
    """
    replicas.write_back()
    local = [_row(member, None if probes is None else probes[k], compare, marks) for k, member in enumerate(members)]
    return parse(replicas.sum_rows(*local), compare=compare, marks=len(marks))


def _row(member: LocalReplica, probe: torch.Tensor | None, compare: bool, marks: Sequence[float]) -> torch.Tensor:
    """float64 on the parameters' device."""
    parameters = local_parts(member.parameters)
    row = member.loss_meter.stats()
    row[1] += torch.where(all_finite(parameters).to(row.device) == 1, 0.0, math.nan)
    pieces = [row]
    if compare:
        # Masters may differ where their rounded copies do not.
        pieces.append(digest([*parameters, *local_parts([m for m in member.masters() if m is not None])]))
    pieces.append(row.new_tensor(marks))
    if probe is not None:
        pieces.append(probe)
    return torch.cat([piece.to(row.device) for piece in pieces])


def parse(table: torch.Tensor, *, compare: bool, marks: int) -> list[CycleStats]:
    """The inverse of `_row`, of the sums over each replica's ranks: (N, w) float64, on any device. Column by column: at a thousand
    replicas a look at each number by itself would be most of what a cycle costs the host."""
    sums, weights, *rest = table.cpu().T.tolist()
    digests = zip(rest.pop(0), rest.pop(0), strict=True) if compare else repeat(())
    marked = zip(*(rest.pop(0) for _ in range(marks)), strict=True) if marks else repeat(())
    finite = [not math.isnan(weight) for weight in weights]
    raw = [total / weight if weight > 0 else None for total, weight in zip(sums, weights, strict=True)]
    votes = [good and math.isfinite(total) for good, total in zip(finite, sums, strict=True)]
    losses = [loss if vote else None for loss, vote in zip(raw, votes, strict=True)]
    probes = zip(*rest, strict=True) if rest else repeat(())
    return list(map(CycleStats._make, zip(sums, weights, digests, marked, probes, finite, raw, losses, votes)))  # noqa: B905 - repeat has no end
