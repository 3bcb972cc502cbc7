"""Averages that are spread out over the cycle: in fragments (Streaming), or beside the next steps
(Overlapped)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..core.validate import whole
from ..replicas import Replicas
from ..replicas.process_groups import own_group
from ..tensors.dtensor import local_parts
from .base import Averager, Averaging, Task
from .buckets import Buckets, Part
from .collectives import peers
from .health import all_finite


@dataclass(frozen=True)
class Streaming(Averaging):
    """Average fragment f of F after step ceil((f + 1) T / F) of each cycle, the last at its end.

    The same bytes as `Plain` in F smaller bursts. Fragments are neighbouring tensors, or pieces of
    them, of equal bytes. Replicas are never all equal (`Ensemble.converge` makes them so); a cycle
    in which a replica is left out ends with the plain average. A fragment before the last is
    averaged over the replicas whose values in it are finite, uniformly also with
    ``weights="softmax"``, because the cycle's losses are not known yet. That takes a sum of N
    numbers, and the host waits for it.

    Args:
        fragments: F, 2 .. T.
    """

    fragments: int

    def __post_init__(self) -> None:
        whole(self.fragments, "fragments", 2, why="one fragment is Plain()")

    def check_task(self, task: Task) -> None:
        if self.fragments > task.sync_interval:
            raise ValueError(
                f"fragments={self.fragments} is more than sync_interval={task.sync_interval}: at "
                "most one fragment is averaged after a step"
            )

    def make_averager(self, task: Task) -> Averager:
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
    parameters in fp32.

    Args:
        steps: tau, 1 .. T - 1.
    """

    steps: int

    def __post_init__(self) -> None:
        whole(self.steps, "steps", why="without steps to hide behind use Plain()")

    def check_task(self, task: Task) -> None:
        if self.steps >= task.sync_interval:
            raise ValueError(
                f"steps={self.steps} must be less than sync_interval={task.sync_interval}: an "
                "average is to be applied before the next begins"
            )

    def make_averager(self, task: Task) -> Averager:
        return _SpreadOut(task, delay=self.steps)


class _SpreadOut(Averager):
    """Fragment f is sent after step ceil((f + 1) T / F) and applied ``delay`` steps later."""

    def __init__(self, task: Task, fragments: int = 1, delay: int = 0) -> None:
        super().__init__(task)
        self._forget_on_load()
        self._delay, self._position = delay, 0
        self._due = [-(-(f + 1) * task.sync_interval // fragments) for f in range(fragments)]
        """The step after which each fragment is sent."""
        self._spans = _spans(local_parts(task.tensors), fragments)
        group = None
        if delay:
            # On a shared communicator the next steps' gradients would queue behind the average.
            columns = [peers(task.replicas, member) for member in range(task.replicas.members)]
            group = own_group(columns, task.replicas.ranks)
        room = max(1024, task.bucket_bytes // fragments)
        self._fragments = [
            _Fragment(functools.partial(self._parts_of, f), room, task.replicas, group)
            for f in range(fragments)
        ]

    def _parts_of(self, fragment: int) -> list[Part]:
        """The first and the last of its tensors are perhaps not whole."""
        parts = self.task.parts()
        if len(self._due) == 1:
            return parts
        return [_cut(parts[i], first, last) for i, first, last in self._spans[fragment]]

    def _forget(self) -> None:
        for fragment in self._fragments:
            fragment.drop()
        self.idle, self._position = True, 0

    def acts_after(self, position: int) -> bool:
        if position in self._due[:-1]:
            return True
        return position >= self._delay and any(
            fragment.is_under_way for fragment in self._fragments
        )

    def after_step(self, position: int) -> list[str]:
        self._apply()
        notes = []
        for f, due in enumerate(self._due[:-1]):
            if due == position:
                self._position = position
                notes += self._average_within_cycle(f)
        return notes

    def end_cycle(self, weights: Sequence[float]) -> list[str]:
        """Send the last fragment; more, in a cycle that the run's end cuts short."""
        self._apply()
        if notes := self._average_at_once(weights):
            return notes
        self.idle = False
        for fragment, due in zip(self._fragments, self._due, strict=True):
            if due > self._position:
                fragment.send(weights)
        self._position = 0
        return []

    def complete(self, weights: Sequence[float]) -> None:
        self._apply()
        super().complete(weights)

    def close(self) -> None:
        super().close()
        self._fragments = []

    def _apply(self) -> None:
        for fragment in self._fragments:
            fragment.apply()

    @torch.no_grad()
    def _average_within_cycle(self, f: int) -> list[str]:
        """Over the replicas on which the fragment is finite: weights are not known yet."""
        values = [part.value for part in self._parts_of(f)]
        device = local_parts(self.task.tensors[:1])[0].device
        own = (1.0 - all_finite(values)).reshape(1).to(device)
        broken = [bad != 0 for bad in self.task.replicas.sum_rows(own).flatten().tolist()]
        name = f"fragment {f + 1} of {len(self._due)}"
        if all(broken):
            return [f"{name} not averaged: finite on no replica"]
        self.idle = False
        share = 1 / broken.count(False)
        self._fragments[f].send([0.0 if bad else share for bad in broken])
        return [
            f"replica {r} left out of the average of {name}: not finite"
            for r, bad in enumerate(broken)
            if bad
        ]


class _Fragment:
    """A part of the model that is averaged by itself: in place at once; with a ``group`` of its
    own, in the background, until `apply`."""

    def __init__(
        self,
        ask_parts: Callable[[], Sequence[Part]],
        room: int,
        replicas: Replicas,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._replicas, self._group = replicas, group
        background = group is not None
        self._buckets = Buckets(ask_parts, room, in_place=not background, own_memory=background)
        self._sums: list[torch.Tensor] = []
        self._works: list[Any] = []

    @property
    def is_under_way(self) -> bool:
        return bool(self._works)

    @torch.no_grad()
    def send(self, weights: Sequence[float]) -> None:
        if self._group is None:
            self._buckets.average(self._replicas, weights)
            return
        fillings, weight = self._buckets.plan(), float(weights[self._replicas.index])
        if not self._sums:
            self._sums = [torch.empty_like(filling.flat) for filling in fillings]
        for filling, total in zip(fillings, self._sums, strict=True):
            torch.mul(filling.pack(), weight, out=total)
            self._works.append(dist.all_reduce(total, group=self._group, async_op=True))

    @torch.no_grad()
    def apply(self) -> None:
        """The delta rule, on what is under way. On CUDA the wait orders streams only."""
        works, self._works = self._works, []
        if not works:
            return
        for filling, mean, work in zip(self._buckets.plan(), self._sums, works, strict=True):
            work.wait()
            mean.sub_(filling.flat)  # which has been the snapshot until here
            filling.pack().add_(mean)
            filling.mark_written()
            filling.unpack()

    def drop(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []


_Span = tuple[int, int, int]
"""Number of a tensor, first and last + 1 of its elements."""


def _cut(part: Part, first: int, last: int) -> Part:
    if (first, last) == (0, part.tensor.numel()):
        return part
    pieces = [None if t is None else t.view(-1)[first:last] for t in part]
    assert pieces[0] is not None
    return Part(pieces[0], pieces[1])


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
