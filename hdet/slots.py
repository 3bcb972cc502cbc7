"""The slots of a cycle: one row of numbers per replica, gathered once, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from .converge import Masters, all_finite, digest
from .ranges import ranged
from .replicas import Replicas
from .window import LossWindow

__all__ = ["LocalReplica", "Slot", "gather_slots", "local_replicas", "masters_of"]


@dataclass(frozen=True)
class LocalReplica:
    """A replica of this process in the running cycle."""

    parameters: Sequence[torch.Tensor]
    masters: Masters
    """Gives what the optimizer keeps beside each of them: float32, or the lower half of the split form, or None."""
    window: LossWindow


def local_replicas(replicas: Replicas, optimizer: Optimizer, tensors: Sequence[torch.Tensor]) -> list[LocalReplica]:
    """The replicas that this process holds, each with its own of ``tensors``."""

    return [
        LocalReplica(own, masters_of(optimizer, tensors, place), LossWindow(own[0].device))
        for place, own in enumerate(replicas.sets(tensors))
    ]


def masters_of(optimizer: Optimizer, tensors: Sequence[torch.Tensor], place: int) -> Masters:
    """For the local replica at that place. Only a fused optimizer's are known: what others call a master is not read."""
    ask = getattr(optimizer, "masters", None)
    return (lambda: ask(tensors, place)) if callable(ask) else (lambda: [None] * len(tensors))


@dataclass(frozen=True)
class Slot:
    """What one replica contributes at the end of a cycle."""

    finite: bool
    """Are all its parameters finite?"""
    loss_sum: float
    weight: float
    digest: tuple[float, float]
    """Of its parameters, where replicas are to be compared; else zeros."""
    probe: list[float]
    """The probe's row; empty if there was none."""

    @property
    def loss(self) -> float | None:
        """Mean training loss over the cycle; None if it has none, or one that must not count."""
        return self.loss_sum / self.weight if self.weight > 0 and self.finite and math.isfinite(self.loss_sum) else None

    @property
    def votes(self) -> bool:
        """May its probe count? Not with broken parameters, nor with a training loss that was NaN or infinite."""
        return self.finite and math.isfinite(self.loss_sum)


@ranged("hdet.slots")
def gather_slots(
    replicas: Replicas, members: Sequence[LocalReplica], probes: Sequence[torch.Tensor] | None, *, compare: bool
) -> list[Slot]:
    """One small all_reduce, then one read by the host: the only place where a cycle waits for the device.

    ``members``: this process's replicas; ``probes``: the probe's row of each. ``compare`` adds a digest of the parameters, by
    which replicas that should be equal are recognised.
    """
    replicas.settle()
    local = [_row(member, None if probes is None else probes[k], compare) for k, member in enumerate(members)]
    return [Slot(row[0] == 1, row[1], row[2], (row[3], row[4]), row[5:]) for row in replicas.sum_rows(*local).tolist()]


def _row(member: LocalReplica, probe: torch.Tensor | None, compare: bool) -> torch.Tensor:
    """(5 + the probe's width,) float64 on the parameters' device."""
    finite = all_finite(member.parameters)
    # Masters may differ where their rounded copies do not.
    marks = digest([*member.parameters, *(m for m in member.masters() if m is not None)]) if compare else finite.new_zeros(2)
    pieces = [finite.reshape(1), member.window.slots(), marks, *([] if probe is None else [probe])]
    return torch.cat([piece.to(member.parameters[0].device) for piece in pieces])
