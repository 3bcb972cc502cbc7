"""Averages that are spread out over the cycle: in fragments (Streaming), or beside the next steps
(Overlapped)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..core.validate import whole
from ..replicas.process_groups import own_group
from ..tensors.dtensor import local_parts
from .base import Averager, Averaging, Task
from .buckets import Buckets, Part
from .health import all_finite


@dataclass(frozen=True)
class Streaming(Averaging):
    """Average fragment f of F after step ceil((f + 1) T / F) of each cycle, the last at its end.

    The same bytes as `Plain` in F smaller bursts. Fragments are neighbouring tensors, or pieces of
    them, of equal bytes. Replicas are never all equal (`Ensemble.converge` makes them so); a cycle
    in which a replica is left out ends with the plain average. A fragment before the last is
    averaged over the replicas whose values in it are finite. That takes a sum of N numbers, and the
    host waits for it.

    Args:
        fragments: F, 2 .. T.

    Example::

        sync = hdet.Sync(100, converge=hdet.converge.Streaming(fragments=4))
    """

    fragments: int

    def __post_init__(self) -> None:
        whole(self.fragments, "fragments", 2, why="one fragment is Plain()")

    def make_averager(self, task: Task) -> Averager:
        if self.fragments > task.sync_interval:
            raise ValueError(
                f"fragments={self.fragments} is more than the cycle's {task.sync_interval} steps: "
                "at most one fragment is averaged after a step"
            )
        return _SpreadOut(task, fragments=self.fragments)


@dataclass(frozen=True)
class Overlapped(Averaging):
    """Take the average of the cycle's end while the next ``steps`` steps run.

    With theta_r(0) at the cycle's end, after step tau of the next one (the delta rule)::

        theta_r <- theta_r(tau) + sum_q w_q theta_q(0) - theta_r(0)

    the mean plus what this replica has done since. So replicas are never all equal: they keep the
    displacements of tau steps (`Ensemble.converge` makes them equal). A cycle in which a replica is
    left out ends with the plain average.

    Sends as many bytes as `Plain`, on a communicator of its own. Extra memory: twice the
    parameters in fp32, beside a bucket.

    Args:
        steps: tau, 1 .. T - 1.

    Example::

        sync = hdet.Sync(100, converge=hdet.converge.Overlapped(steps=2))
    """

    steps: int

    def __post_init__(self) -> None:
        whole(self.steps, "steps", why="without steps to hide behind use Plain()")

    def make_averager(self, task: Task) -> Averager:
        if self.steps >= task.sync_interval:
            raise ValueError(
                f"steps={self.steps} must be less than the cycle's {task.sync_interval}: an "
                "average is to be applied before the next begins"
            )
        return _SpreadOut(task, delay=self.steps)


class _Travelling(NamedTuple):
    """The average of one filling, on its way."""

    snapshot: torch.Tensor
    """This replica's values when it was sent."""
    total: torch.Tensor
    """Their weighted sum over the replicas, once ``work`` is done."""
    work: Any


class _SpreadOut(Averager):
    """Fragment f is sent after step ceil((f + 1) T / F) and taken ``delay`` steps later: at once
    and in place, or in the background."""

    def __init__(self, task: Task, fragments: int = 1, delay: int = 0) -> None:
        super().__init__(task)
        self._forget_on_load()
        self._delay = delay
        self._position = 0
        """Of the cycle's steps, the last after which a fragment was sent."""
        self._due = [-(-(f + 1) * task.sync_interval // fragments) for f in range(fragments)]
        """The step after which each fragment is sent."""
        self._parts = [task.parts]
        """Of each fragment. Not a method, for buckets must not hold self."""
        if fragments > 1:
            spans = _spans(local_parts(task.tensors), fragments)
            self._parts = [functools.partial(_parts_of, task, own) for own in spans]
        room = max(1024, task.bucket_bytes // fragments)
        self._fragments = [Buckets(parts, room, in_place=not delay) for parts in self._parts]
        self._group: Any = None
        if delay:
            # On a shared communicator the next steps' gradients would queue behind the average.
            columns = [list(column) for column in zip(*task.replicas.ranks, strict=True)]
            self._group = own_group(columns, task.replicas.ranks)
        self._travelling: list[_Travelling] = []
        """Of the only fragment, where there is a delay."""

    def _forget(self) -> None:
        for one in self._travelling:
            one.work.wait()
        self.idle, self._position, self._travelling = True, 0, []

    def acts_after(self, position: int) -> bool:
        is_taken = bool(self._travelling) and position >= self._delay
        return is_taken or position in self._due[:-1]

    def after_step(self, position: int) -> list[str]:
        self._take()
        notes = []
        for f, due in enumerate(self._due[:-1]):
            if due == position:
                self._position = position
                notes += self._average_within_cycle(f)
        return notes

    def end_cycle(self, weights: Sequence[float]) -> list[str]:
        """Send the last fragment; more, in a cycle that the run's end cuts short."""
        self._take()
        absent = [str(r) for r, weight in enumerate(weights) if weight == 0]
        if absent:  # it is to train on with the mean
            self.complete(weights)
            return [f"averaged at once: replica {', '.join(absent)} is left out"]
        self.idle = False
        for f, due in enumerate(self._due):
            if due > self._position:
                self._send(f, weights)
        self._position = 0
        return []

    def complete(self, weights: Sequence[float]) -> None:
        self._take()
        super().complete(weights)

    @torch.no_grad()
    def _average_within_cycle(self, f: int) -> list[str]:
        """Over the replicas on which the fragment is finite: weights are not known yet."""
        values = [part.value for part in self._parts[f]()]
        device = local_parts(self.task.tensors[:1])[0].device
        own = (1.0 - all_finite(values)).reshape(1).to(device)
        broken = [bad != 0 for bad in self.task.replicas.sum_rows(own).flatten().tolist()]
        name = f"fragment {f + 1} of {len(self._due)}"
        if all(broken):
            return [f"{name} not averaged: finite on no replica"]
        self.idle = False
        share = 1 / broken.count(False)
        self._send(f, [0.0 if bad else share for bad in broken])
        return [
            f"replica {r} left out of the average of {name}: not finite"
            for r, bad in enumerate(broken)
            if bad
        ]

    @torch.no_grad()
    def _send(self, f: int, weights: Sequence[float]) -> None:
        if not self._delay:
            self._fragments[f].average(self.task.replicas, weights)
            return
        weight = float(weights[self.task.replicas.index])
        for filling in self._fragments[f].plan():
            snapshot = filling.pack().clone()
            total = snapshot * weight
            work = dist.all_reduce(total, group=self._group, async_op=True)
            self._travelling.append(_Travelling(snapshot, total, work))

    @torch.no_grad()
    def _take(self) -> None:
        """What is under way, by the delta rule. On CUDA the wait orders streams only."""
        travelling, self._travelling = self._travelling, []
        if not travelling:
            return
        for filling, one in zip(self._fragments[0].plan(), travelling, strict=True):
            one.work.wait()
            filling.pack().add_(one.total.sub_(one.snapshot))
            filling.unpack()


_Span = tuple[int, int, int]
"""Number of a tensor, first and last + 1 of its elements."""


def _parts_of(task: Task, spans: Sequence[_Span]) -> list[Part]:
    """A fragment: the first and the last of its tensors are perhaps not whole. A weight beside a
    tensor is cut, and averaged, with it."""
    both = list(zip(task.parts(), task.beside(), strict=False))
    found = [(part, first, last) for i, first, last in spans for part in both[i]]
    return [_cut(part, first, last) for part, first, last in found if part is not None]


def _cut(part: Part, first: int, last: int) -> Part:
    if last - first == part.tensor.numel():
        return part
    master = part.master if part.master is None else part.master.view(-1)[first:last]
    return Part(part.tensor.view(-1)[first:last], master)


def _spans(tensors: Sequence[torch.Tensor], count: int) -> list[list[_Span]]:
    """Cut the tensors, one after the other, at every count-th of their bytes.

    One that is not contiguous goes where it begins."""
    total, begin = sum(tensor.nbytes for tensor in tensors), 0
    cuts = [total * f // count for f in range(count + 1)]
    spans: list[list[_Span]] = [[] for _ in range(count)]
    for i, tensor in enumerate(tensors):
        size, width = tensor.numel(), tensor.element_size()
        if tensor.is_contiguous():
            bounds = [min(max(-(-(cut - begin) // width), 0), size) for cut in cuts]
        else:
            bounds = [size if cut > begin else 0 for cut in cuts]
        for f, (first, last) in enumerate(itertools.pairwise(bounds)):
            if first < last:
                spans[f].append((i, first, last))
        begin += tensor.nbytes
    return spans
