"""Named snapshots of a run, to be restored: parameters, buffers and the optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from ..core.plan import SnapshotOf
from .snapshot import Snapshot

__all__ = ["Snapshots"]


class Snapshots:
    """`Plan.snapshots`: each is taken before the first step of the first cycle that names it, and given up with the first that does not.

    Args:
        trained: the parameters of this process's (first) replica, in the order of the optimizer's groups.
        model: whose buffers belong to the run, if there is one.
    """

    def __init__(self, trained: Sequence[torch.Tensor], optimizer: Optimizer, model: nn.Module | None) -> None:
        self._trained, self._optimizer, self._model = list(trained), optimizer, model
        self._kept: dict[str, Snapshot] = {}

    def begin_cycle(self, wanted: Mapping[str, SnapshotOf]) -> None:
        """Free what is not wanted any more, and prepare what is new."""
        for name in self._kept.keys() - wanted.keys():
            del self._kept[name]
        for name in wanted.keys() - self._kept.keys():
            self._kept[name] = Snapshot(self._trained, self._optimizer, wanted[name].place, self._model)

    def on_cycle_start(self) -> None:
        """Before the first step: take those that have not been."""
        for snapshot in self._kept.values():
            if not snapshot.taken:
                snapshot.take()

    def restore(self, name: str) -> None:
        """Puts everything back, in place. Raises ValueError if there is none of that name."""
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

    def _of(self, name: str) -> Snapshot:
        found = self._kept.get(name)
        if found is None or not found.taken:
            raise ValueError(
                f"there is no snapshot {name!r}, only {sorted(self._kept)}: name it in Plan.snapshots of the cycle before its first step"
            )
        return found
