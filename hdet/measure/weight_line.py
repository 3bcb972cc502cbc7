"""Averages of weights over time, and the line from an interval's beginning through an average."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..converge import Masters, average_tensors
from ..kernels.reference.rules import value_of
from ..replicas import Replicas
from ..tensors.dtensor import local_parts

__all__ = ["RunningMean", "WeightLine"]


class RunningMean:
    """Running mean of some tensors: one more copy of the parameters, float32 (or better).

    Args:
        tensors: parameters; DTensors stand for their shards.
        masters: gives the master of each tensor or None, asked at every sample; the mean is that of
            the masters' values.
        place: "device", or "host" for the host's memory, to which a copy then travels at every
            sample.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], masters: Masters | None = None, place: str = "device"
    ) -> None:
        self.tensors, self._place = list(tensors), place
        self.means = [_room_for(tensor, place) for tensor in local_parts(self.tensors)]
        self._dtypes = [tensor.dtype for tensor in self.tensors]
        self.samples = 0
        self._sources: list[tuple[list[torch.Tensor], Masters]] = []
        self.follow(tensors, masters)

    def follow(self, tensors: Sequence[torch.Tensor], masters: Masters | None = None) -> None:
        """Let the mean be over these too: the same tensors of another replica in this process."""
        self._sources.append((list(tensors), masters or (lambda: [None] * len(tensors))))

    @torch.no_grad()
    def add(self) -> None:
        """mean <- mean + (theta - mean) / n."""
        if not self.samples:
            self._fit()
        for tensors, masters in self._sources:
            self.samples += 1
            for mean, value in zip(self.means, _values(tensors, masters), strict=True):
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

    def reset(self) -> None:
        self.samples = 0


class WeightLine:
    """The line from some weights (the origin) through the mean of where a run has been since, and
    any point on it. Two copies of the tensors, and a third one inside `at`; arguments as for
    `RunningMean`."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], masters: Masters | None = None, place: str = "device"
    ) -> None:
        self._tensors = list(tensors)
        self._masters = masters or (lambda: [None] * len(tensors))
        self.origin = [_room_for(tensor, place) for tensor in local_parts(self._tensors)]
        self.mean = RunningMean(tensors, masters, place)

    @torch.no_grad()
    def begin(self) -> None:
        values = _values(self._tensors, self._masters)
        for origin, value in zip(self.origin, values, strict=True):
            origin.copy_(value)
        self.mean.reset()

    @torch.no_grad()
    def share(self, replicas: Replicas) -> None:
        """Origin and mean become the means over all replicas: bitwise the same everywhere. As much
        traffic as two averages, tensor by tensor, because some backends only see the device."""
        rooms, tensors = [*self.origin, *self.mean.means], 2 * local_parts(self._tensors)
        for room, tensor in zip(rooms, tensors, strict=True):
            on_device = room.to(tensor.device)
            average_tensors([on_device], replicas)
            if on_device is not room:
                room.copy_(on_device)

    @contextmanager
    def at(
        self, rho: Sequence[float], tensors: Sequence[torch.Tensor] | None = None
    ) -> Iterator[None]:
        """Inside, the tensors are origin + rho[i] * (mean - origin); afterwards bitwise what they
        were. ``tensors``: the same ones of another replica in this process."""
        points = local_parts(self._tensors if tensors is None else tensors)
        means = self.mean.means
        kept = [point.to(m.device, copy=True) for point, m in zip(points, means, strict=True)]
        try:
            for point, origin, mean, part in zip(points, self.origin, means, rho, strict=True):
                point.copy_(torch.lerp(origin, mean, part))
            yield
        finally:
            for point, content in zip(points, kept, strict=True):
                point.copy_(content)


def _room_for(tensor: torch.Tensor, place: str) -> torch.Tensor:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    if place == "host" and tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=dtype, pin_memory=True)
    return torch.empty_like(tensor, dtype=dtype)


def _values(tensors: Sequence[torch.Tensor], masters: Masters) -> Iterator[torch.Tensor]:
    """What the tensors stand for, one at a time: rounded weights stand still while their masters
    move."""
    for tensor, master in zip(local_parts(tensors), masters(), strict=True):
        if master is None and tensor.dtype == torch.float64:
            yield tensor
        else:
            yield value_of(tensor, None if master is None else local_parts([master])[0])
