"""Named snapshots of a run, to be restored: parameters, and, if a plan asks for it, buffers and the optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from ..converge import Masters
from ..core.plan import SnapshotOf
from ..kernels.spec.rounding import split
from ..measure.weight_line import local_masters, room_for, value_at
from ..tensors.dtensor import local_parts
from .snapshot import Snapshot

__all__ = ["Snapshots"]


class Snapshots:
    """`Plan.snapshots`: each is taken before the first step of the first cycle that names it, and given up with the first that does not.

    Args:
        trained: the parameters of this process's (first) replica, in the order of the optimizer's groups, with their ``masters``.
        model: whose buffers belong to the run, if there is one.
    """

    def __init__(self, trained: Sequence[torch.Tensor], masters: Masters, optimizer: Optimizer, model: nn.Module | None) -> None:
        self._trained, self._masters, self._optimizer, self._model = list(trained), masters, optimizer, model
        self._kept: dict[str, Snapshot | _Values] = {}

    def begin_cycle(self, wanted: Mapping[str, SnapshotOf]) -> None:
        """Free what is not wanted any more, and prepare what is new."""
        for name in self._kept.keys() - wanted.keys():
            del self._kept[name]
        for name in wanted.keys() - self._kept.keys():
            self._kept[name] = self._prepared(wanted[name])

    def _prepared(self, wanted: SnapshotOf) -> Snapshot | _Values:
        if wanted.state:
            return Snapshot(self._trained, self._optimizer, wanted.place, self._model)
        return _Values(wanted, self._trained, self._masters, self._optimizer)

    def on_cycle_start(self) -> None:
        """Before the first step: take those that have not been."""
        for snapshot in self._kept.values():
            if not snapshot.taken:
                snapshot.take()

    def restore(self, name: str) -> None:
        """Parameters of the (first) local replica, and what else the snapshot has. Raises ValueError if there is none of that name."""
        self._of(name).restore()

    def take(self, name: str) -> None:
        """What is there now in the place of what it has. Raises ValueError if there is none of that name."""
        self._of(name).take()

    def forget(self) -> None:
        """Other weights have been loaded: all are taken anew, with the next first step."""
        for snapshot in self._kept.values():
            snapshot.forget()

    def close(self) -> None:
        """The Ensemble is given up."""
        self.begin_cycle({})

    def _of(self, name: str) -> Snapshot | _Values:
        found = self._kept.get(name)
        if found is None or not found.taken:
            raise ValueError(
                f"there is no snapshot {name!r}, only {sorted(self._kept)}: name it in Plan.snapshots of the cycle before its first step"
            )
        return found


class _Values:
    """What the parameters stand for, and nothing else."""

    def __init__(self, wanted: SnapshotOf, tensors: Sequence[torch.Tensor], masters: Masters, optimizer: Optimizer) -> None:
        self._tensors, self._masters, self._optimizer = tensors, masters, optimizer
        self._place, self._dtype = wanted.place, None if wanted.dtype is None else getattr(torch, wanted.dtype)
        self._values: list[torch.Tensor] = []

    @property
    def taken(self) -> bool:
        return bool(self._values)

    def forget(self) -> None:
        self._values = []

    @torch.no_grad()
    def take(self) -> None:
        pairs = list(zip(local_parts(self._tensors), local_masters(self._masters()), strict=True))
        self._values = [room_for(tensor, self._dtype, self._place).copy_(value_at(tensor, master)) for tensor, master in pairs]

    @torch.no_grad()
    def restore(self) -> None:
        """In place, and what is beyond a parameter's dtype in its master, or in the base of all replicas."""
        if getattr(self._optimizer, "storage", None) == "displacement":
            self._optimizer.put_values(self._tensors, self._values)  # type: ignore[attr-defined]
            return
        for tensor, master, kept in zip(local_parts(self._tensors), local_masters(self._masters()), self._values, strict=True):
            tensor.copy_(kept)
            if master is not None and master.dtype == torch.float32:
                master.copy_(kept)
            elif master is not None:
                for part, value in zip((tensor, master), split(kept.to(tensor.device, torch.float32)), strict=True):
                    part.copy_(value)
