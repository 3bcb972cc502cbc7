"""Cycle statistics: one row of numbers per replica, added up over its ranks, the same on every rank
of all replicas.

A row is (loss sum, weight, a mark of the schedule's values), with more columns where more is
compared or measured. All ranks of a replica add to its row: micro-batches,
context-parallel ranks and pipeline stages add up (a stage without a loss adds nothing), and ranks
that see the same loss (tensor parallel) cancel in the ratio. A parameter that is not finite makes
the weight NaN, which no loss can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from ..converge import Masters, all_finite, digest
from ..core.validate import within
from ..optim.snapshot import masters_of
from ..replicas import Replicas
from ..tensors.dtensor import local_parts
from ..tensors.profiling import ranged

__all__ = [
    "CycleStats",
    "LocalReplica",
    "LossMeter",
    "gather_stats",
    "local_replicas",
    "parse",
]

Measured = Mapping[str, torch.Tensor]
"""By measurement, the row of one replica."""


class LossMeter:
    """Weighted sum of scalar losses in float64 on ``device``; `add` never waits for the device.

    Losses of the host are added up there, in a microsecond; an operation on a tensor takes forty
    in a step that has used the caches for something else.
    """

    def __init__(self, device: torch.device) -> None:
        self._total = torch.zeros(2, dtype=torch.float64, device=device)
        """Sum of weight * loss, sum of the weights that are tensors."""
        self._sum = self._total[0]
        self._number, self._weight = 0.0, 0.0

    def add(self, loss: torch.Tensor | float, weight: torch.Tensor | float = 1.0) -> None:
        """Add one loss (a tensor of one element, or a number) with its weight (micro-batches,
        tokens). Weight 0 counts nothing, not even a NaN. Raises ValueError for a loss that is not
        one floating-point number, and a weight that is negative or NaN (of a tensor that would wait
        for the device)."""
        if isinstance(loss, torch.Tensor):
            if loss.numel() != 1 or not loss.dtype.is_floating_point:
                raise ValueError(
                    f"loss must be one floating-point number, got a {loss.dtype} tensor of shape "
                    f"{tuple(loss.shape)}: pass loss.mean()"
                )
            if loss.is_cpu:
                loss = loss.item()
            else:
                loss = loss.detach().reshape(()).to(self._total.device, non_blocking=True)
        elif not isinstance(loss, Real):  # numpy's scalars too
            raise ValueError(f"loss must be a scalar tensor or a number, got {type(loss).__name__}")
        if isinstance(weight, torch.Tensor):
            weight = weight.detach().reshape(()).to(self._total)
            self._total[1].add_(weight)
            self._sum.add_(torch.where(weight == 0, 0.0, weight * loss))
            return
        if weight != 1.0:  # the usual one needs no check
            within(weight, "weight", "[0, inf)")
        if weight == 0:
            return
        self._weight += weight
        if isinstance(loss, torch.Tensor):
            self._sum.add_(loss, alpha=weight)
        else:
            self._number += float(loss) * weight

    def stats(self) -> torch.Tensor:
        """(2,) float64 on the device: weighted sum and weight.

        A weight that is NaN makes the sum NaN and is 0 itself.
        """
        total, weight = self._total[0] + self._number, self._total[1] + self._weight
        return torch.stack(
            [torch.where(weight.isnan(), weight, total), weight.nan_to_num(0.0, posinf=math.inf)]
        )

    def reset(self) -> None:
        self._total.zero_()
        self._number, self._weight = 0.0, 0.0


@dataclass(frozen=True)
class LocalReplica:
    """A replica of this process, or this process's part of one, in the running cycle."""

    parameters: Callable[[], Sequence[torch.Tensor]]
    """Gives its parameters and buffers, which may be others by now."""
    masters: Masters
    """Gives what the optimizer keeps beside each of them: float32, or the lower half of the split
    form, or None."""


def local_replicas(
    replicas: Replicas, optimizer: Optimizer, tensors: Sequence[torch.Tensor]
) -> list[LocalReplica]:
    """The replicas that this process holds, each with its own of ``tensors``."""

    def replica(slot: int) -> LocalReplica:
        masters = masters_of(optimizer, tensors, slot)
        return LocalReplica(lambda: replicas.sets(tensors)[slot], masters)

    return [replica(slot) for slot in range(len(replicas.local))]


class CycleStats(NamedTuple):
    """What the replicas contribute at the end of a cycle: by replica, but for marks and
    measured."""

    finite: list[bool]
    """Are all its parameters finite?"""
    raw_losses: list[float | None]
    """Mean training loss over the cycle, whatever it is; None if it has none."""
    losses: list[float | None]
    """Mean training loss over the cycle; None if it has none, or one that must not count."""
    votes: list[bool]
    """May what was measured of it count? Not with broken parameters, nor with a training loss that
    was NaN or infinite."""
    marks: list[tuple[float, ...]]
    """[mark][replica]: of what must be alike on all replicas, then of what may be."""
    measured: dict[str, list[list[float]]]
    """By measurement, [replica]: its row, added up over the replica's ranks."""

    @property
    def are_alike(self) -> bool:
        return all(len(set(column)) == 1 for column in self.marks)


@ranged("hdet.cycle_stats")
def gather_stats(
    replicas: Replicas,
    members: Sequence[LocalReplica],
    losses: Sequence[LossMeter],
    measured: Sequence[Measured],
    purpose: str,
    *,
    compare: bool,
    marks: Sequence[float | torch.Tensor] = (),
) -> CycleStats:
    """One small all_reduce, then one read by the host: the only place where a cycle waits for the
    device.

    Args:
        purpose: of the collective, for the error of a rank that has come for another one.
        members: the replicas of this process.
        losses, measured: of each of them.
        compare: add two marks of the parameters, to recognise equal replicas.
        marks: whole numbers below 2^40 that are to be compared.
    """
    replicas.write_back()
    rows = [
        _row(member, meter, own, compare, marks)
        for member, meter, own in zip(members, losses, measured, strict=True)
    ]
    widths = {name: len(row) for name, row in measured[0].items()}
    return parse(replicas.sum_rows(*rows, purpose=purpose), len(marks) + 2 * compare, widths)


def _row(
    member: LocalReplica,
    losses: LossMeter,
    measured: Measured,
    compare: bool,
    marks: Sequence[float | torch.Tensor],
) -> torch.Tensor:
    """float64 on the parameters' device."""
    parameters = local_parts(member.parameters())
    row = losses.stats()
    row[1] += torch.where(all_finite(parameters).to(row.device) == 1, 0.0, math.nan)
    pieces = [
        row,
        *(row.new_tensor([mark]) if isinstance(mark, float) else mark.reshape(1) for mark in marks),
    ]
    if compare:
        # Masters may differ where their rounded copies do not.
        masters = local_parts([m for m in member.masters() if m is not None])
        pieces.append(digest([*parameters, *masters]))
    return torch.cat([piece.to(row.device) for piece in (*pieces, *measured.values())])


def parse(table: torch.Tensor, marks: int, widths: Mapping[str, int]) -> CycleStats:
    """The inverse of `_row`, of the sums over each replica's ranks: (N, w) float64, on any device.

    Column by column: at a thousand replicas a look at each number by itself would be most of what a
    cycle costs the host.
    """
    table = table.cpu()
    sums, weights, *marked = table[:, : 2 + marks].T.tolist()
    parts = table[:, 2 + marks :].split(list(widths.values()), dim=1)
    pairs = list(zip(sums, weights, strict=True))
    finite = [not math.isnan(weight) for weight in weights]
    raw = [total / weight if weight > 0 else None for total, weight in pairs]
    votes = [good and math.isfinite(total) for good, total in zip(finite, sums, strict=True)]
    losses = [loss if vote else None for loss, vote in zip(raw, votes, strict=True)]
    measured = {name: part.tolist() for name, part in zip(widths, parts, strict=True)}
    return CycleStats(finite, raw, losses, votes, marked, measured)
