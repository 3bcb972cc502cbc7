"""Streaming: one fragment of the parameters after the other, spread over the cycle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .average import BucketedAverage
from .buckets import Part, parts_of
from .health import all_finite
from .plain import Plain, PlainAverage
from .protocol import Average, Task, local_parts

__all__ = ["Streaming"]


@dataclass(frozen=True)
class Streaming:
    """Fragment f of F is averaged after step ceil((f + 1) T / F) of each cycle, the last at its end: the same bytes in F smaller bursts.

    ``fragments``: F, 2 .. T. Fragments are neighbouring tensors, or pieces of them, of equal bytes.

    Replicas are never all equal (`Ensemble.converge` makes them so; and a cycle in which a replica is left out ends with all of them
    averaged, so that it takes the whole mean). A fragment before the last is averaged over the replicas whose
    values in it are finite, uniformly also with ``average="softmax"``: the cycle's losses are not known yet. That takes a sum of N
    numbers, and the host waits for it.
    """

    fragments: int

    def __post_init__(self) -> None:
        f = self.fragments
        if not isinstance(f, int) or isinstance(f, bool) or f < 2:
            raise ValueError(f"fragments must be a whole number >= 2, got {f!r}: one fragment is Plain()")

    def build(self, task: Task) -> Average:
        """Raises ValueError for more fragments than steps in a cycle."""
        if self.fragments > task.sync_interval:
            raise ValueError(
                f"fragments={self.fragments} is more than sync_interval={task.sync_interval}: at most one fragment is averaged after a step"
            )
        return Plain().build(task) if task.replicas.count == 1 else _Streaming(task, self.fragments)


class _Streaming(PlainAverage):
    def __init__(self, task: Task, count: int) -> None:
        super().__init__(task)
        self._task, self.settled, self._position = task, True, 0
        self.due = [-(-(f + 1) * task.sync_interval // count) for f in range(count)]
        """the step after which each fragment is averaged"""
        room = max(1024, task.bucket_bytes // count)
        self._averages = [
            BucketedAverage(task.tensors, task.replicas, room, task.masters, select=_fragment(f, count)) for f in range(count)
        ]

    def after_step(self, position: int) -> list[str]:
        self._position, self.wrote = position, False
        return [note for f, due in enumerate(self.due[:-1]) if due == position for note in self._average_alone(f)]

    @torch.no_grad()
    def _average_alone(self, f: int) -> list[str]:
        """A fragment whose weights nobody has told."""
        replicas = self._task.replicas
        values = [part.value for part in _fragment(f, len(self.due))(parts_of(self._task.tensors, self._task.masters))]
        device = local_parts(self._task.tensors[:1])[0].device
        broken = (1.0 - all_finite(values)).reshape(1).to(device)
        rows: list[float] = replicas.sum_rows(broken).flatten().tolist()
        healthy = [r for r, bad in enumerate(rows) if bad == 0]
        where = f"fragment {f + 1} of {len(self.due)}"
        if not healthy:
            return [f"{where} not averaged: finite on no replica"]
        self.settled, self.wrote = False, True
        self._averages[f]([1 / len(healthy) if bad == 0 else 0.0 for bad in rows])
        return [f"replica {r} left out of the average of {where}: not finite" for r, bad in enumerate(rows) if bad != 0]

    def end_cycle(self, weights: Sequence[float]) -> list[str]:
        """What has not had its turn yet: the last fragment, or more in a cycle that the run's end cuts short."""
        absent = [r for r, weight in enumerate(weights) if weight == 0]
        if absent:  # it is to take the mean, not a last fragment of it
            self.complete(weights)
            return [f"all fragments averaged at once: replica {', '.join(map(str, absent))} is left out"]
        self.settled = False
        for average, due in zip(self._averages, self.due, strict=True):
            if due > self._position:
                average(weights)
        self._position = 0
        return []

    def complete(self, weights: Sequence[float]) -> None:
        super().complete(weights)
        self.settled, self._position = True, 0


def _fragment(f: int, count: int) -> Callable[[Sequence[Part]], list[Part]]:
    """Cuts the parts of a model at f / count and (f + 1) / count of their bytes."""

    def select(parts: Sequence[Part]) -> list[Part]:
        total = sum(part.tensor.nbytes for part in parts)
        low, high, begin, chosen = total * f // count, total * (f + 1) // count, 0, []
        for part in parts:
            size, width = part.tensor.nbytes, part.tensor.element_size()
            if part.tensor.is_contiguous():
                first, last = (min(max(-(-(cut - begin) // width), 0), part.tensor.numel()) for cut in (low, high))
                if first < last:
                    master = None if part.master is None else part.master.view(-1)[first:last]
                    chosen.append(Part(part.tensor.view(-1)[first:last], master))
            elif low <= begin < high:  # cannot be cut: goes where it begins
                chosen.append(part)
            begin += size
        return chosen

    return select
