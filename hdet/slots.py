"""The slots of a cycle: one row of numbers per replica, added up over its ranks, the same on every rank of all replicas.

A row is (loss sum, weight), and only where something is to be compared more: 2N numbers a cycle for every layout. All ranks of a
replica add to its row: micro-batches, context-parallel ranks and pipeline stages add up (a stage without a loss adds nothing), and
ranks that see the same loss (tensor parallel) cancel in the ratio. A parameter that is not finite makes the weight NaN, which no loss can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from .converge import Masters, all_finite, digest
from .ranges import ranged
from .replicas import Replicas
from .shards import local_parts
from .window import LossWindow

__all__ = ["LocalReplica", "Slot", "gather_slots", "local_replicas", "masters_of"]


@dataclass(frozen=True)
class LocalReplica:
    """A replica of this process, or this process's part of one, in the running cycle."""

    parameters: Sequence[torch.Tensor]
    masters: Masters
    """Gives what the optimizer keeps beside each of them: float32, or the lower half of the split form, or None."""
    window: LossWindow


def local_replicas(replicas: Replicas, optimizer: Optimizer, tensors: Sequence[torch.Tensor]) -> list[LocalReplica]:
    """The replicas that this process holds, each with its own of ``tensors``."""

    return [
        LocalReplica(own, masters_of(optimizer, tensors, place), LossWindow(local_parts(own[:1])[0].device))
        for place, own in enumerate(replicas.sets(tensors))
    ]


def masters_of(optimizer: Optimizer, tensors: Sequence[torch.Tensor], place: int) -> Masters:
    """For the local replica at that place. Only a fused optimizer's are known: what others call a master is not read."""
    ask = getattr(optimizer, "masters", None)
    return (lambda: ask(tensors, place)) if callable(ask) else (lambda: [None] * len(tensors))


class Slot(NamedTuple):
    """What one replica contributes at the end of a cycle. (A tuple, because there may be a thousand of them.)"""

    loss_sum: float
    weight: float
    digest: tuple[float, ...] = ()
    """Of its parameters, where replicas are to be compared; else empty."""
    mark: float = 0.0
    """Of what else must be alike on all replicas."""
    probe: tuple[float, ...] = ()
    """The probe's row, added up over the replica's ranks; empty if there was none."""

    @property
    def finite(self) -> bool:
        """Are all its parameters finite?"""
        return not math.isnan(self.weight)

    @property
    def raw_loss(self) -> float | None:
        """Mean training loss over the cycle, whatever it is; None if it has none."""
        return self.loss_sum / self.weight if self.weight > 0 else None

    @property
    def loss(self) -> float | None:
        """Mean training loss over the cycle; None if it has none, or one that must not count."""
        return self.raw_loss if self.finite and math.isfinite(self.loss_sum) else None

    @property
    def votes(self) -> bool:
        """May its probe count? Not with broken parameters, nor with a training loss that was NaN or infinite."""
        return self.finite and math.isfinite(self.loss_sum)


@ranged("hdet.slots")
def gather_slots(
    replicas: Replicas, members: Sequence[LocalReplica], probes: Sequence[torch.Tensor] | None, *, compare: bool, mark: float | None = None
) -> list[Slot]:
    """One small all_reduce, then one read by the host: the only place where a cycle waits for the device.

    ``members``: this process's replicas; ``probes``: the probe's row of each. ``compare`` adds a digest of the parameters, by
    which replicas that should be equal are recognised; ``mark`` a whole number below 2^40 that is to be compared.
    """
    replicas.settle()
    local = [_row(member, None if probes is None else probes[k], compare, mark) for k, member in enumerate(members)]
    return [_slot(row, compare, mark is not None) for row in replicas.sum_rows(*local).tolist()]


def _row(member: LocalReplica, probe: torch.Tensor | None, compare: bool, mark: float | None) -> torch.Tensor:
    """float64 on the parameters' device."""
    parameters = local_parts(member.parameters)
    row = member.window.slots()
    row[1] += torch.where(all_finite(parameters).to(row.device) == 1, 0.0, math.nan)
    pieces = [row]
    if compare:
        # Masters may differ where their rounded copies do not.
        pieces.append(digest([*parameters, *local_parts([m for m in member.masters() if m is not None])]))
    if mark is not None:
        pieces.append(row.new_tensor([mark]))
    if probe is not None:
        pieces.append(probe)
    return torch.cat([piece.to(row.device) for piece in pieces])


def _slot(row: Sequence[float], compare: bool, marked: bool) -> Slot:
    """The inverse of `_row`, of the sum over a replica's ranks."""
    marks = tuple(row[2:4]) if compare else ()
    rest = row[2 + len(marks) :]
    return Slot(row[0], row[1], marks, rest[0] if marked else 0.0, tuple(rest[1:] if marked else rest))
