"""Averages of weights over time, and the line from an interval's beginning through such an average."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..converge import Masters, average_tensors
from ..kernels import PairPlan, select
from ..kernels.reference.rules import value_of
from ..kernels.spec.arguments import FLOATS
from ..optim.finish import values_to
from ..replicas import Replicas
from ..tensors.dtensor import local_parts

__all__ = ["RunningMean", "WeightLine", "check_kernels", "check_room"]


def check_room(place: Any, dtype: Any) -> None:
    """Raises ValueError for a place or a dtype in which no weights can be kept."""
    if place not in ("device", "host"):
        raise ValueError(f"place must be 'device' or 'host' (where copies of the weights live), got {place!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating-point dtype or None, got {dtype!r}")


def check_kernels(tensors: Sequence[torch.Tensor], place: str) -> None:
    """Raises RuntimeError, with the way out, where such tensors could not be averaged over time, because hdet's kernels are missing: this shows
    at the end of a cycle else."""
    for device in {t.device for t in local_parts(tensors) if _is_native(t)}:
        if place == "device" or device.type == "cpu":  # else the average lies elsewhere, and is made without kernels
            select("auto", device)


def _is_native(tensor: torch.Tensor) -> bool:
    return tensor.dtype in FLOATS and tensor.is_contiguous() and tensor.device.type in ("cpu", "cuda")


class RunningMean:
    """Running mean of some tensors: one more copy of the parameters, float32 (or better) beside them.

    Args:
        masters: gives the master of each tensor or None, asked at every sample; the mean is that of the masters' values.
        dtype: of the copy, where it is not to be the default.
        place: "device", or "host" for the host's memory, to and from which a copy then travels at every sample.
        origin: what is subtracted from each sample. In 16 bits most samples, which count 1 / n, would be rounded away, unless what is
            averaged is as small as the displacement from there.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        masters: Masters | None = None,
        dtype: torch.dtype | None = None,
        place: str = "device",
        origin: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.tensors, self._origin = list(tensors), origin
        self.means = [room_for(t, dtype, place) for t in local_parts(self.tensors)]
        self._dtype, self._place, self._dtypes = dtype, place, [t.dtype for t in self.tensors]
        self.samples = 0
        self._sources: list[_Source] = []
        self.follow(tensors, masters)

    def follow(self, tensors: Sequence[torch.Tensor], masters: Masters | None = None) -> None:
        """Let the mean be over these too: the same tensors of another replica in this process."""
        self._sources.append(_Source(list(tensors), masters or _no_masters(tensors), self.means, self._origin))

    @torch.no_grad()
    def add(self) -> None:
        """mean <- mean + (theta - mean) / n."""
        if not self.samples:
            self._fit()
        for source in self._sources:
            self.samples += 1
            source.lerp(1.0 / self.samples)  # 1 copies, whatever stands there

    def _fit(self) -> None:
        """A model that was cast or moved needs other memory, or an `exchange` would round its weights."""
        for i, tensor in enumerate(local_parts(self.tensors)):
            if tensor.dtype != self._dtypes[i] or (tensor.device != self.means[i].device and self._place == "device"):
                self.means[i], self._dtypes[i] = room_for(tensor, self._dtype, self._place), tensor.dtype

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap contents, addresses stay: graphs and flat buffers that point at the parameters remain valid. Twice restores the tensors."""
        for tensor, mean in zip(local_parts(self.tensors), self.means, strict=True):
            _exchange(tensor, mean)

    def reset(self) -> None:
        self.samples = 0


class WeightLine:
    """The line from some weights (the origin) through the mean of where a run has been since, and any point on it.

    Two copies of the tensors; ``masters``, ``dtype`` and ``place`` as in `RunningMean`. In 16 bits the mean is that of the displacement from
    the origin, so that this is rounded and not the weights.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], masters: Masters | None = None, dtype: torch.dtype | None = None, place: str = "device"
    ) -> None:
        self._tensors, self._masters = list(tensors), masters or _no_masters(tensors)
        self.origin = [room_for(t, dtype, place) for t in local_parts(self._tensors)]
        self._from_origin = bool(self.origin) and self.origin[0].dtype.itemsize < 4
        self.mean = RunningMean(tensors, masters, dtype, place, self.origin if self._from_origin else None)

    @torch.no_grad()
    def begin(self) -> None:
        for origin, tensor, master in zip(self.origin, local_parts(self._tensors), local_masters(self._masters()), strict=True):
            origin.copy_(value_at(tensor, master))
        self.mean.reset()

    @torch.no_grad()
    def share(self, replicas: Replicas) -> None:
        """Origin and mean become the means over all replicas: bitwise the same everywhere. As much traffic as two averages.

        Where they live in the host's memory tensor by tensor, because some backends only see the device.
        """
        for room, tensor in zip((*self.origin, *self.mean.means), 2 * local_parts(self._tensors), strict=True):
            beside = room.to(tensor.device)
            average_tensors([beside], replicas)
            if beside is not room:
                room.copy_(beside)

    @contextmanager
    def at(self, rho: Sequence[float], tensors: Sequence[torch.Tensor] | None = None) -> Iterator[None]:
        """Inside, the tensors are origin + rho[i] * (mean - origin), for rho[i] > 0; afterwards they are what they were, to the bit.

        ``tensors``: the same ones of another replica in this process. A tensor whose mean has its dtype is kept in the mean's memory
        meanwhile, so there is no third copy; not in 16 bits, where the mean would be lost in rounding.
        """
        own = local_parts(self._tensors if tensors is None else tensors)
        with ExitStack() as stack:
            for tensor, origin, mean, part in zip(own, self.origin, self.mean.means, rho, strict=True):
                swaps = mean.dtype == tensor.dtype and tensor.itemsize >= 4
                stack.enter_context(
                    _swapped(tensor, origin, mean, part) if swaps else _copied(tensor, origin, mean, part, self._from_origin)
                )
            yield


@dataclass(eq=False)
class _Source:
    """Some tensors with their masters, and how they move the means."""

    tensors: Sequence[torch.Tensor]
    masters: Masters
    means: list[torch.Tensor]
    origin: Sequence[torch.Tensor] | None
    addresses: Sequence[int] = ()
    plans: Sequence[PairPlan | _ByHand] = ()

    def lerp(self, weight: float) -> None:
        self._plan()
        for plan in self.plans:
            plan.lerp(weight)

    def _plan(self) -> None:
        """A plan for each device and implementation; made anew if a tensor has moved."""
        masters, own = local_masters(self.masters()), local_parts(self.tensors)
        addresses = [t.data_ptr() for pair in zip(own, masters, strict=True) for t in pair if t is not None]
        if self.plans and addresses == self.addresses:
            return
        kinds: dict[tuple[torch.device, str], list[int]] = {}
        for i, (tensor, mean) in enumerate(zip(own, self.means, strict=True)):
            # A plan works on one device, and in float32.
            planned = self.origin is None and mean.device == tensor.device and mean.dtype in FLOATS and tensor.dtype in FLOATS
            how = "hand" if not planned else "auto" if _is_native(tensor) else "torch"
            kinds.setdefault((mean.device, how), []).append(i)
        plans: list[PairPlan | _ByHand] = []
        for (_, how), places in kinds.items():
            means, tensors, held = [self.means[i] for i in places], [own[i] for i in places], [masters[i] for i in places]
            origin = None if self.origin is None else [self.origin[i] for i in places]
            plans.append(_ByHand(means, tensors, held, origin) if how == "hand" else values_to(means, tensors, held, how))
        self.addresses, self.plans = addresses, plans


@dataclass(frozen=True)
class _ByHand:
    """`PairPlan.lerp` where the mean lies elsewhere than its tensor, counts from an origin, or is in float64."""

    means: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor]
    masters: Sequence[torch.Tensor | None]
    origins: Sequence[torch.Tensor] | None

    def lerp(self, weight: float) -> None:
        origins = [None] * len(self.means) if self.origins is None else self.origins
        for mean, tensor, master, origin in zip(self.means, self.tensors, self.masters, origins, strict=True):
            value = value_at(tensor, master)
            if origin is not None:
                value = value - origin.to(value.device)
            mean.copy_(value if weight == 1 else torch.lerp(mean.to(value.device, value.dtype), value, weight))


@contextmanager
@torch.no_grad()
def _swapped(tensor: torch.Tensor, origin: torch.Tensor, mean: torch.Tensor, rho: float) -> Iterator[None]:
    """A tensor at a point of the line. Its content waits in the mean's memory."""
    _exchange(tensor, mean)
    _stretch(tensor, origin, rho)
    try:
        yield
    finally:
        _stretch(tensor, origin, 1 / rho)
        _exchange(tensor, mean)


def _stretch(tensor: torch.Tensor, origin: torch.Tensor, factor: float) -> None:
    if factor != 1:
        origin = origin.to(tensor.device)
        tensor.sub_(origin).mul_(factor).add_(origin)


@contextmanager
@torch.no_grad()
def _copied(tensor: torch.Tensor, origin: torch.Tensor, mean: torch.Tensor, rho: float, from_origin: bool) -> Iterator[None]:
    """As `_swapped`, but the tensor's content waits in memory of its own."""
    own = tensor.detach().to(mean.device, copy=True)
    origin, mean = (t.to(tensor.device, torch.float32) for t in (origin, mean))
    tensor.copy_(torch.add(origin, mean, alpha=rho) if from_origin else torch.lerp(origin, mean, rho))
    del origin, mean
    try:
        yield
    finally:
        tensor.copy_(own)


def room_for(tensor: torch.Tensor, dtype: torch.dtype | None, place: str) -> torch.Tensor:
    dtype = torch.promote_types(tensor.dtype, torch.float32) if dtype is None else dtype
    if place == "host" and tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=dtype, pin_memory=True)
    return torch.empty_like(tensor, dtype=dtype)


def value_at(tensor: torch.Tensor, master: torch.Tensor | None) -> torch.Tensor:
    """What the tensor stands for: rounded weights stand still while their masters move."""
    return tensor if master is None and tensor.dtype == torch.float64 else value_of(tensor, master)


def _exchange(a: torch.Tensor, b: torch.Tensor) -> None:
    """Contents change places, bit for bit where dtypes are equal; devices may differ."""
    held = a.clone()
    a.copy_(b)
    b.copy_(held)


def _no_masters(tensors: Sequence[torch.Tensor]) -> Masters:
    return lambda: [None] * len(tensors)


def local_masters(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if t is None else local_parts([t])[0] for t in tensors]
