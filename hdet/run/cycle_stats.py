"""Cycle statistics: one row of numbers per replica, added up over its ranks, the same on every rank
of all replicas.

A row is (loss sum, weight, a mark of the schedule's values), with more columns only where more is
compared: 3N numbers a cycle. All ranks of a replica add to its row: micro-batches, context-parallel
ranks and pipeline stages add up (a stage without a loss adds nothing), and ranks that see the same
loss (tensor parallel) cancel in the ratio. A parameter that is not finite makes the weight NaN,
which no loss can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from numbers import Real
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from ..converge import Masters, all_finite, digest
from ..core.divergence import Divergence, Verdict, judge
from ..core.validate import within
from ..profiling import ranged
from ..replicas import Replicas
from ..tensors.dtensor import local_parts

__all__ = [
    "CycleStats",
    "LocalReplica",
    "LossMeter",
    "gather_stats",
    "local_replicas",
    "masters_of",
    "parse",
    "verdict_on",
]


class LossMeter:
    """Weighted sum of scalar losses in float64 on ``device``; `add` never waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._total = torch.zeros(
            2, dtype=torch.float64, device=device
        )  # (sum of weight * loss, sum of tensor weights)
        self._sum = self._total[0]
        self._weight = 0.0

    def add(self, loss: torch.Tensor | float, weight: torch.Tensor | float = 1.0) -> None:
        """Add one loss (0-d or one-element tensor, or a number) with its weight (micro-batches,
        tokens). Weight 0 counts nothing. Raises ValueError for a loss that is not one
        floating-point number, and a weight that is negative or NaN (of a tensor that would wait
        for the device)."""
        if isinstance(loss, torch.Tensor):
            if (loss.dim() and loss.numel() != 1) or not loss.dtype.is_floating_point:
                raise ValueError(
                    f"loss must be one floating-point number, got a {loss.dtype} tensor of shape "
                    f"{tuple(loss.shape)}: pass loss.mean()"
                )
            loss = loss.detach() if loss.dim() == 0 else loss.detach().reshape(())
        elif not isinstance(loss, Real):  # numpy's scalars too
            raise ValueError(f"loss must be a scalar tensor or a number, got {type(loss).__name__}")
        if isinstance(weight, torch.Tensor):
            if weight.numel() != 1:
                raise ValueError(
                    f"weight must be one number, got a tensor of shape {tuple(weight.shape)}"
                )
            weight = weight.detach().reshape(()).to(self._total)
            self._total[1].add_(weight)
            self._sum.add_(torch.where(weight == 0, 0.0, weight * loss))
            return
        if weight != 1.0:  # the usual one needs no check
            within(weight, "weight", "[0, inf)")
        if weight == 0:
            return  # nothing of it counts, not even a NaN
        self._weight += weight
        if isinstance(loss, torch.Tensor) and loss.device != self._total.device:
            loss = loss.to(self._total.device, non_blocking=True)
        if isinstance(loss, torch.Tensor) and weight != 1.0:
            self._sum.add_(loss, alpha=weight)
        else:
            self._sum.add_(loss if weight == 1.0 else loss * weight)

    def stats(self) -> torch.Tensor:
        """(2,) float64 on the device: weighted sum and weight.

        A weight that is NaN makes the sum NaN and is 0 itself.
        """
        total, weight = self._total[0], self._total[1] + self._weight
        return torch.stack(
            [torch.where(weight.isnan(), weight, total), weight.nan_to_num(0.0, posinf=math.inf)]
        )

    def reset(self) -> None:
        self._total.zero_()
        self._weight = 0.0


@dataclass(frozen=True)
class LocalReplica:
    """A replica of this process, or this process's part of one, in the running cycle."""

    parameters: Callable[[], Sequence[torch.Tensor]]
    """Gives its parameters and buffers, which may be others by now."""
    masters: Masters
    """Gives what the optimizer keeps beside each of them: float32, or the lower half of the split
    form, or None."""
    loss_meter: LossMeter


def local_replicas(
    replicas: Replicas, optimizer: Optimizer, tensors: Sequence[torch.Tensor]
) -> list[LocalReplica]:
    """The replicas that this process holds, each with its own of ``tensors``."""
    device = local_parts(tensors[:1])[0].device
    return [
        LocalReplica(
            partial(_set_of, replicas, tensors, place),
            masters_of(optimizer, tensors, place),
            LossMeter(device),
        )
        for place in range(len(replicas.local))
    ]


def _set_of(replicas: Replicas, tensors: Sequence[torch.Tensor], place: int) -> list[torch.Tensor]:
    return replicas.sets(tensors)[place]


def masters_of(optimizer: Optimizer, tensors: Sequence[torch.Tensor], place: int) -> Masters:
    """For the local replica at that place.

    Only a fused optimizer's are known: what others call a master is not read.
    """
    ask = getattr(optimizer, "masters", None)
    return (lambda: ask(tensors, place)) if callable(ask) else (lambda: [None] * len(tensors))


class CycleStats(NamedTuple):
    """What one replica contributes at the end of a cycle, and what follows from it.

    (Made by `parse`, a thousand at a time.)
    """

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
    """May its probe count? Not with broken parameters, nor with a training loss that was NaN or
    infinite."""


def verdict_on(
    stats: Sequence[CycleStats],
    divergence: Divergence,
    level: float | None,
    searching: bool = False,
) -> tuple[Verdict, list[float | None]]:
    """Who has diverged, and each replica's loss.

    ``level``: `Verdict.level` of the last cycle that was not taken back. ``searching``: is an
    `AutoLR` in its first steps, which takes back what breaks in them?"""
    losses = [stat.loss for stat in stats]
    if searching:
        finite = [r for r, stat in enumerate(stats) if stat.finite]
        return Verdict(
            finite or list(range(len(stats))), roll_back=False, level=None, notes=[]
        ), losses
    return judge(
        divergence, [stat.finite for stat in stats], [stat.raw_loss for stat in stats], level
    ), losses


@ranged("hdet.cycle_stats")
def gather_stats(
    replicas: Replicas,
    members: Sequence[LocalReplica],
    probes: Sequence[torch.Tensor] | None,
    *,
    compare: bool,
    marks: Sequence[float | torch.Tensor] = (),
) -> list[CycleStats]:
    """One small all_reduce, then one read by the host: the only place where a cycle waits for
    the device. ``probes``: the probe's row of each member. ``compare`` adds a digest of the
    parameters, to recognise equal replicas; ``marks``: whole numbers below 2^40 that are to be
    compared."""
    replicas.write_back()
    local = [
        _row(member, None if probes is None else probes[k], compare, marks)
        for k, member in enumerate(members)
    ]
    return parse(replicas.sum_rows(*local), compare=compare, marks=len(marks))


def _row(
    member: LocalReplica,
    probe: torch.Tensor | None,
    compare: bool,
    marks: Sequence[float | torch.Tensor],
) -> torch.Tensor:
    """float64 on the parameters' device."""
    parameters = local_parts(member.parameters())
    row = member.loss_meter.stats()
    row[1] += torch.where(all_finite(parameters).to(row.device) == 1, 0.0, math.nan)
    pieces = [row]
    if compare:
        # Masters may differ where their rounded copies do not.
        pieces.append(
            digest([*parameters, *local_parts([m for m in member.masters() if m is not None])])
        )
    pieces += [
        mark.reshape(1) if isinstance(mark, torch.Tensor) else row.new_tensor([mark])
        for mark in marks
    ]
    if probe is not None:
        pieces.append(probe)
    return torch.cat([piece.to(row.device) for piece in pieces])


def parse(table: torch.Tensor, *, compare: bool, marks: int) -> list[CycleStats]:
    """The inverse of `_row`, of the sums over each replica's ranks: (N, w) float64, on any
    device. Column by column: at a thousand replicas a look at each number by itself would be
    most of what a cycle costs the host."""
    sums, weights, *rest = table.cpu().T.tolist()
    digests = zip(rest.pop(0), rest.pop(0), strict=True) if compare else repeat(())
    marked = zip(*(rest.pop(0) for _ in range(marks)), strict=True) if marks else repeat(())
    finite = [not math.isnan(weight) for weight in weights]
    raw = [
        total / weight if weight > 0 else None for total, weight in zip(sums, weights, strict=True)
    ]
    votes = [good and math.isfinite(total) for good, total in zip(finite, sums, strict=True)]
    losses = [loss if vote else None for loss, vote in zip(raw, votes, strict=True)]
    probes = zip(*rest, strict=True) if rest else repeat(())
    return list(map(CycleStats._make, zip(digests, marked, probes, finite, raw, losses, votes)))  # noqa: B905 - repeat has no end
