"""The weights at which a probe scores the replicas: each at the mean of its own, or all on the line
through an interval of several cycles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..converge import Masters, average_tensors
from ..kernels.reference.rules import value_of
from ..tensors.dtensor import local_parts
from .measurement import Watched

__all__ = ["LinePoints", "OwnMeans", "RunningMean"]

Source = tuple[Sequence[torch.Tensor], Masters]
"""The tensors of a replica, and what gives the master of each of them or None."""


class RunningMean:
    """Running mean of some tensors: one more copy of the parameters, float32 (or better).

    Args:
        sources: parameters, of which DTensors stand for their shards, with their masters, whose
            values count; of several replicas the mean is over all.
        place: "device", or "host" for the host's memory, to which a copy then travels at every
            sample.
    """

    def __init__(self, sources: Sequence[Source], place: str = "device") -> None:
        self._sources, self._place = list(sources), place
        self.tensors = list(sources[0][0])
        self.means = [_room_for(tensor, place) for tensor in local_parts(self.tensors)]
        self._dtypes = [tensor.dtype for tensor in self.tensors]
        self.samples = 0

    @torch.no_grad()
    def add(self) -> None:
        """mean <- mean + (theta - mean) / n."""
        if not self.samples:
            self._fit()
        for source in self._sources:
            self.samples += 1
            for mean, value in zip(self.means, _values(source), strict=True):
                value = value.to(mean.device)
                if self.samples == 1:
                    mean.copy_(value)
                else:
                    mean.lerp_(value, 1.0 / self.samples)

    def _fit(self) -> None:
        """A model that was cast or moved needs other memory, or `exchange` would round it."""
        for i, tensor in enumerate(local_parts(self.tensors)):
            has_moved = tensor.device != self.means[i].device and self._place == "device"
            if tensor.dtype != self._dtypes[i] or has_moved:
                self.means[i], self._dtypes[i] = _room_for(tensor, self._place), tensor.dtype

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap contents; addresses stay, on which graphs and flat buffers rely. Twice restores the
        tensors bitwise."""
        for tensor, mean in zip(local_parts(self.tensors), self.means, strict=True):
            content = tensor.clone()
            tensor.copy_(mean)
            mean.copy_(content)


class OwnMeans:
    """Each replica at the mean of its own weights."""

    def __init__(self, run: Watched, place: str) -> None:
        pairs = zip(run.sets, run.masters, strict=True)
        self._means = [RunningMean([own], place) for own in pairs]

    def begin(self) -> None:
        """An interval begins, before its first step: nothing to remember here."""

    def reset(self) -> None:
        """What was added before counts no more."""
        for mean in self._means:
            mean.samples = 0

    def add(self) -> None:
        """A sample of each replica's weights."""
        for mean in self._means:
            mean.add()

    @contextmanager
    def at(self, place: int) -> Iterator[None]:
        """Inside, the weights of the local replica at ``place`` are those to be scored; afterwards
        bitwise what they were."""
        mean = self._means[place]
        if not mean.samples:
            mean.add()  # a cycle cut too short for a sample: the weights as they are
        mean.exchange()
        try:
            yield
        finally:
            mean.exchange()


class LinePoints:
    """All replicas on one line, each at the multiplier of the cycle that ends:
    origin + rho_r (mean - origin), by knob.

    The origin is where an interval of several cycles began, the mean that of the mean trajectory
    over its later part. Each replica averages its own weights, mean + (rho_r - 1) s, and at the
    interval's end these averages are averaged over replicas. That is the mean trajectory's average
    for one all_reduce, bitwise the same on all replicas, whatever the optimizer. (Samples at the
    ends of cycles would need no all_reduce, but are too few to take the noise out.)

    Two copies of the parameters, and a third one inside `at`. Methods as of `OwnMeans`.
    """

    def __init__(self, run: Watched, place: str) -> None:
        self._run = run
        sources = list(zip(run.sets, run.masters, strict=True))
        self._first = sources[0]
        self.mean = RunningMean(sources, place)
        self.origin = [_room_for(tensor, place) for tensor in local_parts(run.sets[0])]
        knob_of = {index: k for k, knob in enumerate(run.knobs) for index in knob.indices}
        groups = enumerate(run.optimizer.param_groups)
        self._knobs = [knob_of.get(g) for g, group in groups for _ in group["params"]]
        self._is_shared = False

    @torch.no_grad()
    def begin(self) -> None:
        for origin, value in zip(self.origin, _values(self._first), strict=True):
            origin.copy_(value)

    def reset(self) -> None:
        self.mean.samples, self._is_shared = 0, False

    def add(self) -> None:
        self.mean.add()

    @contextmanager
    def at(self, place: int) -> Iterator[None]:
        """The first call communicates."""
        if not self._is_shared:
            self._share()
            self._is_shared = True
        rho, means = self._run.multipliers()[place], self.mean.means
        points = local_parts(self._run.sets[place])
        kept = [point.to(m.device, copy=True) for point, m in zip(points, means, strict=True)]
        try:
            for point, origin, mean, k in zip(points, self.origin, means, self._knobs, strict=True):
                point.copy_(torch.lerp(origin, mean, 1.0 if k is None else rho[k]))
            yield
        finally:
            for point, content in zip(points, kept, strict=True):
                point.copy_(content)

    @torch.no_grad()
    def _share(self) -> None:
        """Origin and mean become the means over all replicas: bitwise the same everywhere. As much
        traffic as two averages, tensor by tensor, because some backends only see the device."""
        rooms, tensors = [*self.origin, *self.mean.means], 2 * local_parts(self._run.sets[0])
        for room, tensor in zip(rooms, tensors, strict=True):
            on_device = room.to(tensor.device)
            average_tensors([on_device], self._run.replicas)
            if on_device is not room:
                room.copy_(on_device)


def _room_for(tensor: torch.Tensor, place: str) -> torch.Tensor:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    if place == "host" and tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=dtype, pin_memory=True)
    return torch.empty_like(tensor, dtype=dtype)


def _values(source: Source) -> Iterator[torch.Tensor]:
    """What the tensors stand for, one at a time: rounded weights stand still while their masters
    move."""
    tensors, masters = source
    for tensor, master in zip(local_parts(tensors), masters(), strict=True):
        if master is None and tensor.dtype == torch.float64:
            yield tensor
        else:
            yield value_of(tensor, None if master is None else local_parts([master])[0])
