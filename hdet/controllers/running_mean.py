"""The mean of a replica's weights over a cycle, at which a probe scores it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..converge import Masters
from ..kernels.numbers import value_of
from ..tensors.dtensor import local_parts

__all__ = ["RunningMean"]


class RunningMean:
    """Running mean of some tensors: one more copy of the parameters, float32 (or better).

    Args:
        tensors: parameters, of which DTensors stand for their shards.
        masters: gives the master of each of them, whose value counts, or None.
        place: "device", or "host" for the host's memory, to which they are copied at every
            sample.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], masters: Masters, place: str = "device"
    ) -> None:
        self.tensors, self._masters, self._place = tensors, masters, place
        self.means = [_room_for(tensor, place) for tensor in local_parts(tensors)]
        self._dtypes = [tensor.dtype for tensor in tensors]
        self.samples = 0

    @torch.no_grad()
    def add(self) -> None:
        """mean <- mean + (theta - mean) / n."""
        if not self.samples:
            self._fit()
        self.samples += 1
        for mean, value in zip(self.means, self._values(), strict=True):
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

    def _values(self) -> Iterator[torch.Tensor]:
        """What the tensors stand for, one at a time: rounded weights stand still while their
        masters move."""
        for tensor, master in zip(local_parts(self.tensors), self._masters(), strict=True):
            if master is None and tensor.dtype == torch.float64:
                yield tensor
            else:
                yield value_of(tensor, None if master is None else local_parts([master])[0])


def _room_for(tensor: torch.Tensor, place: str) -> torch.Tensor:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    if place == "host" and tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=dtype, pin_memory=True)
    return torch.empty_like(tensor, dtype=dtype)
