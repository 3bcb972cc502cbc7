"""Streaming: one fragment of the parameters after the other, spread over the cycle."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..core.validate import whole
from ..tensors.dtensor import local_parts
from .base import Average, Task
from .bucketed_average import average
from .buckets import Buckets, Part, parts_of
from .health import all_finite
from .plain import PlainAverage


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
        whole(self.fragments, "fragments", 2, why="one fragment is Plain()")

    def build(self, task: Task) -> Average:
        """Raises ValueError for more fragments than steps in a cycle."""
        if self.fragments > task.sync_interval:
            raise ValueError(
                f"fragments={self.fragments} is more than sync_interval={task.sync_interval}: at most one fragment is averaged after a step"
            )
        return PlainAverage(task) if task.replicas.count == 1 else _Streaming(task, self.fragments)


class _Streaming(PlainAverage):
    keeps_state = True

    def __init__(self, task: Task, count: int) -> None:
        super().__init__(task)
        self._position = 0
        self.due = [-(-(f + 1) * task.sync_interval // count) for f in range(count)]
        """the step after which each fragment is averaged"""
        room = max(1024, task.bucket_bytes // count)
        self._spans = _spans(local_parts(task.tensors), count)
        self._fragments = [Buckets(functools.partial(self._parts, f), room, direct=True) for f in range(count)]

    def _parts(self, f: int) -> list[Part]:
        """Of fragment ``f``: the first and the last of its tensors are perhaps not whole."""
        parts = parts_of(self._task.tensors, self._task.masters)
        return [_cut(parts[i], first, last) for i, first, last in self._spans[f]]

    def acts_after(self, position: int) -> bool:
        return position in self.due[:-1]

    def after_step(self, position: int) -> list[str]:
        self._position = position
        return [note for f, due in enumerate(self.due[:-1]) if due == position for note in self._average_alone(f)]

    @torch.no_grad()
    def _average_alone(self, f: int) -> list[str]:
        """Average a fragment inside a cycle, whose weights are not known yet."""
        replicas = self._task.replicas
        values = [part.value for part in self._parts(f)]
        device = local_parts(self._task.tensors[:1])[0].device
        broken = (1.0 - all_finite(values)).reshape(1).to(device)
        rows: list[float] = replicas.sum_rows(broken).flatten().tolist()
        healthy = [r for r, bad in enumerate(rows) if bad == 0]
        where = f"fragment {f + 1} of {len(self.due)}"
        if not healthy:
            return [f"{where} not averaged: finite on no replica"]
        self.idle = False
        average(self._fragments[f], replicas, [1 / len(healthy) if bad == 0 else 0.0 for bad in rows])
        return [f"replica {r} left out of the average of {where}: not finite" for r, bad in enumerate(rows) if bad != 0]

    def end_cycle(self, weights: Sequence[float]) -> list[str]:
        """The fragments that are still to be averaged: the last, or more in a cycle that the run's end cuts short."""
        if notes := self._average_at_once(weights, "all fragments "):
            return notes
        self.idle = False
        for fragment, due in zip(self._fragments, self.due, strict=True):
            if due > self._position:
                average(fragment, self._task.replicas, weights)
        self._position = 0
        return []

    def _forget(self) -> None:
        self.idle, self._position = True, 0


_Span = tuple[int, int, int]
"""number of a tensor, first and last + 1 of its elements"""


def _cut(part: Part, first: int, last: int) -> Part:
    if (first, last) == (0, part.tensor.numel()):
        return part
    return Part(part.tensor.view(-1)[first:last], None if part.master is None else part.master.view(-1)[first:last])


def _spans(tensors: Sequence[torch.Tensor], count: int) -> list[list[_Span]]:
    """Cuts the tensors, one after the other, at every count-th of their bytes; one that is not contiguous goes where it begins."""
    total, begin = sum(tensor.nbytes for tensor in tensors), 0
    cuts = [total * f // count for f in range(count + 1)]
    spans: list[list[_Span]] = [[] for _ in range(count)]
    for i, tensor in enumerate(tensors):
        size, width = tensor.numel(), tensor.element_size()
        if tensor.is_contiguous():
            places = [min(max(-(-(cut - begin) // width), 0), size) for cut in cuts]
        else:
            places = [size if cut > begin else 0 for cut in cuts]
        for f, (first, last) in enumerate(itertools.pairwise(places)):
            if first < last:
                spans[f].append((i, first, last))
        begin += tensor.nbytes
    return spans
