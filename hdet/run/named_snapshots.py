"""Named snapshots of a run: parameters, and with them, if a plan asks for it, buffers and the optimizer's state, to go back to."""

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
from .run_start import RunStart

__all__ = ["Snapshots"]


class Snapshots:
    """What plans ask to be kept (`Plan.snapshots`): each is taken before the first step of the cycle that names it first, and given up with the
    first that does not.

    Args:
        trained: the parameters of this process's (first) replica, in the order of the optimizer's groups, with their ``masters``.
        models: whose buffers, and parameters that this optimizer does not have, belong to the run.
        copied: the optimizer has copies of the models' parameters.
    """

    def __init__(
        self, trained: Sequence[torch.Tensor], masters: Masters, optimizer: Optimizer, models: Sequence[nn.Module], copied: bool
    ) -> None:
        self._trained, self._masters, self._optimizer = list(trained), masters, optimizer
        self._model = models[0] if models else None
        self._copied = copied
        self._kept: dict[str, _Snapshot] = {}

    def begin_cycle(self, wanted: Mapping[str, SnapshotOf]) -> None:
        """Give up what is not wanted any more, and expect what is new."""
        for name in self._kept.keys() - wanted.keys():
            self._kept.pop(name).close()
        for name in wanted.keys() - self._kept.keys():
            self._kept[name] = _Snapshot(wanted[name], self._optimizer, self._model, self._copied)

    def on_cycle_start(self) -> None:
        """Before the first step: take those that have not been."""
        for snapshot in self._kept.values():
            snapshot.take(self._trained, self._masters)

    def parameters(self, name: str) -> list[torch.Tensor]:
        """Their values in a snapshot, local shards; its memory, not a copy. Raises ValueError if there is none of that name."""
        return self._of(name).weights

    def restore(self, name: str) -> None:
        """Parameters of the (first) local replica, and what else the snapshot has. Raises ValueError if there is none of that name."""
        self._of(name).restore(self._trained, self._masters)

    def moved(self) -> str | None:
        """The name of a parameter of a model that is not this optimizer's, and has moved since a snapshot with state was taken, on this rank."""
        return next((name for snapshot in self._kept.values() if (name := snapshot.moved()) is not None), None)

    def forget(self) -> None:
        """Other weights have been loaded: those that are wanted are taken anew."""
        for snapshot in self._kept.values():
            snapshot.forget()

    def close(self) -> None:
        """The Ensemble is given up."""
        self.begin_cycle({})

    def _of(self, name: str) -> _Snapshot:
        found = self._kept.get(name)
        if found is None or not found.weights:
            raise ValueError(
                f"there is no snapshot {name!r}, only {sorted(self._kept)}: name it in Plan.snapshots of the cycle before its first step"
            )
        return found


class _Snapshot:
    def __init__(self, wanted: SnapshotOf, optimizer: Optimizer, model: nn.Module | None, copied: bool) -> None:
        self._optimizer = optimizer
        self._place, self._dtype = wanted.place, None if wanted.dtype is None else getattr(torch, wanted.dtype)
        self._rest = RunStart(optimizer, model, wanted.place, copied) if wanted.state else None
        self.weights: list[torch.Tensor] = []
        if self._rest is not None:
            self._rest.expect()

    @torch.no_grad()
    def take(self, tensors: Sequence[torch.Tensor], masters: Masters) -> None:
        if self.weights:
            return
        for tensor, master in zip(local_parts(tensors), local_masters(masters()), strict=True):
            room = room_for(tensor, self._dtype, self._place)
            room.copy_(value_at(tensor, master))
            self.weights.append(room)
        if self._rest is not None:
            self._rest.take()

    @torch.no_grad()
    def restore(self, tensors: Sequence[torch.Tensor], masters: Masters) -> None:
        """In place, and what is beyond a parameter's dtype in its master, or in the base of all replicas."""
        if getattr(self._optimizer, "storage", None) == "displacement":
            self._optimizer.put_values(tensors, self.weights)  # type: ignore[attr-defined]
        else:
            self._restore_each(tensors, masters)
        if self._rest is not None:
            self._rest.put_back()

    def _restore_each(self, tensors: Sequence[torch.Tensor], masters: Masters) -> None:
        for tensor, master, kept in zip(local_parts(tensors), local_masters(masters()), self.weights, strict=True):
            tensor.copy_(kept)
            if master is not None and master.dtype == torch.float32:
                master.copy_(kept)
            elif master is not None:
                for part, value in zip((tensor, master), split(kept.to(tensor.device, torch.float32)), strict=True):
                    part.copy_(value)

    def moved(self) -> str | None:
        return None if self._rest is None or not self.weights else self._rest.moved()

    def forget(self) -> None:
        self.weights = []
        if self._rest is not None:
            self._rest.expect()

    def close(self) -> None:
        self.weights = []
        if self._rest is not None:
            self._rest.close()
