"""Averages of weights over time, and the line from where an interval began through the average of where it has been since."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from .converge import BucketedAverage, Masters
from .kernels import PairPlan
from .kernels.checks import FLOATS
from .kernels.reference_rules import value_of
from .kernels.rounding import split
from .optim.finish import values_to
from .replicas import Replicas
from .shards import local_parts

__all__ = ["CycleAverage", "Way", "check_room"]


def check_room(place: Any, dtype: Any) -> None:
    """Raises ValueError for a place or a dtype in which no weights can be kept."""
    if place not in ("device", "host"):
        raise ValueError(f"place must be 'device' or 'host' (where anchor and average live), got {place!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating-point dtype or None, got {dtype!r}")


class CycleAverage:
    """Running mean of some tensors: one more copy of the parameters, float32 (or better) beside them.

    Args:
        masters: gives the master of each tensor or None, asked at every sample; the mean is that of the masters' values.
        dtype: of the copy, where it is not to be the default.
        place: "device", or "host" for the host's memory, to and from which a copy then travels at every sample.
        origin: what is subtracted from each sample. In 16 bits most samples, which count 1 / n, would be rounded away, unless what is
            averaged is as small as the way from there.
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
        self.means = [_room(t, dtype, place) for t in local_parts(self.tensors)]
        self._dtype, self._place, self._dtypes = dtype, place, [t.dtype for t in self.tensors]
        self.samples = 0
        self._sources: list[_Source] = []
        self.follow(tensors, masters)

    def follow(self, tensors: Sequence[torch.Tensor], masters: Masters | None = None) -> None:
        """Let the mean be over these too: the same tensors of another replica in this process."""
        self._sources.append(_Source(tensors, masters, self.means, self._origin))

    @torch.no_grad()
    def add(self) -> None:
        """mean <- mean + (theta - mean) / n."""
        if not self.samples:
            self._fit()
        for source in self._sources:
            self.samples += 1
            source.lerp(1.0 / self.samples)  # 1 copies, whatever stands there

    def _fit(self) -> None:
        """A model that has been cast or moved since needs other room, or its weights would come back from an `exchange` rounded."""
        for i, tensor in enumerate(local_parts(self.tensors)):
            if tensor.dtype != self._dtypes[i] or (tensor.device != self.means[i].device and self._place == "device"):
                self.means[i], self._dtypes[i] = _room(tensor, self._dtype, self._place), tensor.dtype

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap contents, addresses stay: graphs and flat buffers that point at the parameters remain valid. Twice restores the tensors."""
        for tensor, mean in zip(local_parts(self.tensors), self.means, strict=True):
            _exchange(tensor, mean)

    def reset(self) -> None:
        self.samples = 0


class Way:
    """Where an interval began (the anchor), the mean of where it has been since, and any point on the line through both.

    Two copies of the tensors; ``masters``, ``dtype`` and ``place`` as in `CycleAverage`. In 16 bits the mean is that of the way from the
    anchor, so that what is rounded is the displacement and not the weights.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], masters: Masters | None = None, dtype: torch.dtype | None = None, place: str = "device"
    ) -> None:
        self._tensors, self._masters = list(tensors), masters or _no_masters(tensors)
        self._anchor = [_room(t, dtype, place) for t in local_parts(self._tensors)]
        self._from_anchor = dtype is not None and dtype.itemsize < 4
        self._mean = CycleAverage(tensors, masters, dtype, place, self._anchor if self._from_anchor else None)

    @property
    def samples(self) -> int:
        return self._mean.samples

    def follow(self, tensors: Sequence[torch.Tensor], masters: Masters | None = None) -> None:
        """As `CycleAverage.follow`; where an interval begins all replicas of a process are equal."""
        self._mean.follow(tensors, masters)

    @torch.no_grad()
    def begin(self) -> None:
        for anchor, tensor, master in zip(self._anchor, local_parts(self._tensors), _locals(self._masters()), strict=True):
            anchor.copy_(_value(tensor, master))
        self.begin_mean()

    def begin_mean(self) -> None:
        """The anchor stays, the mean begins anew."""
        self._mean.reset()

    def add(self) -> None:
        self._mean.add()

    @torch.no_grad()
    def share(self, replicas: Replicas) -> None:
        """Anchor and mean become the means over all replicas: bitwise the same everywhere. As much traffic as two averages.

        Where they live in the host's memory tensor by tensor, because some backends only see the device.
        """
        for room, tensor in zip((*self._anchor, *self._mean.means), 2 * local_parts(self._tensors), strict=True):
            beside = room.to(tensor.device)
            BucketedAverage([beside], replicas)()
            if beside is not room:
                room.copy_(beside)

    @torch.no_grad()
    def take_back(self) -> None:
        """The tensors as they were at the anchor, in place, and what is beyond their dtype in their masters."""
        for tensor, master, anchor in zip(local_parts(self._tensors), _locals(self._masters()), self._anchor, strict=True):
            tensor.copy_(anchor)
            if master is not None and master.dtype == torch.float32:
                master.copy_(anchor)
            elif master is not None:
                for part, value in zip((tensor, master), split(anchor.to(tensor.device, torch.float32)), strict=True):
                    part.copy_(value)

    @contextmanager
    def scored(self, tensors: Sequence[torch.Tensor] | None = None) -> Iterator[Callable[[Sequence[float]], None]]:
        """Gives ``put``: ``put(rho)`` makes the tensors anchor + rho[i] * (mean - anchor); afterwards they are what they were, to the bit.

        ``tensors``: the same ones of another replica in this process. A tensor whose mean has its dtype is kept in the mean's memory
        meanwhile, so there is no third copy: not in 16 bits, where the way from point to point would be lost in rounding.
        """
        spots: list[_Spot] = []
        with torch.no_grad():
            for tensor, anchor, mean in zip(
                local_parts(self._tensors if tensors is None else tensors), self._anchor, self._mean.means, strict=True
            ):
                swaps = mean.dtype == tensor.dtype and tensor.itemsize >= 4
                spots.append(_Swapped(tensor, anchor, mean) if swaps else _Copied(tensor, anchor, mean, self._from_anchor))

        @torch.no_grad()
        def put(rho: Sequence[float]) -> None:
            for spot, own in zip(spots, rho, strict=True):
                spot.put(own)

        try:
            yield put
        finally:
            with torch.no_grad():
                for spot in spots:
                    spot.leave()


class _Source:
    """Some tensors with their masters, and how they move the means."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], masters: Masters | None, means: list[torch.Tensor], origin: Sequence[torch.Tensor] | None
    ) -> None:
        self._tensors, self._masters = list(tensors), masters or _no_masters(tensors)
        self._means, self._origin = means, origin
        self._addresses: list[int] = []
        self._plans: list[PairPlan | _ByHand] = []

    def lerp(self, weight: float) -> None:
        self._plan()
        for plan in self._plans:
            plan.lerp(weight)

    def _plan(self) -> None:
        """One for each device and each way of doing it; made anew if a tensor has moved."""
        masters, own = _locals(self._masters()), local_parts(self._tensors)
        addresses = [t.data_ptr() for pair in zip(own, masters, strict=True) for t in pair if t is not None]
        if self._plans and addresses == self._addresses:
            return
        kinds: dict[tuple[torch.device, str], list[int]] = {}
        for i, (tensor, mean) in enumerate(zip(own, self._means, strict=True)):
            native = tensor.dtype in FLOATS and tensor.is_contiguous() and tensor.device.type in ("cpu", "cuda")
            # A plan works on one device, and in float32.
            planned = self._origin is None and mean.device == tensor.device and mean.dtype in FLOATS and tensor.dtype in FLOATS
            how = "hand" if not planned else "auto" if native else "torch"
            kinds.setdefault((mean.device, how), []).append(i)
        self._addresses, self._plans = addresses, []
        for (_, how), places in kinds.items():
            means, tensors, held = [self._means[i] for i in places], [own[i] for i in places], [masters[i] for i in places]
            origin = None if self._origin is None else [self._origin[i] for i in places]
            self._plans.append(_ByHand(means, tensors, held, origin) if how == "hand" else values_to(means, tensors, held, how))


class _ByHand:
    """`PairPlan.lerp` where the mean lies elsewhere than its tensor, counts from an origin, or is in float64."""

    def __init__(
        self,
        means: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        masters: Sequence[torch.Tensor | None],
        origin: Sequence[torch.Tensor] | None,
    ) -> None:
        self._rows = list(zip(means, tensors, masters, [None] * len(means) if origin is None else origin, strict=True))

    def lerp(self, weight: float) -> None:
        for mean, tensor, master, origin in self._rows:
            value = _value(tensor, master)
            if origin is not None:
                value = value - origin.to(value.device)
            mean.copy_(value if weight == 1 else torch.lerp(mean.to(value.device, value.dtype), value, weight))


class _Spot(Protocol):
    """A tensor while points are scored."""

    def put(self, rho: float) -> None:
        """It becomes anchor + rho * (mean - anchor)."""

    def leave(self) -> None:
        """It is what it was, and so are anchor and mean (but for rounding)."""


class _Swapped:
    """What the tensor held lies in the mean's memory meanwhile."""

    def __init__(self, tensor: torch.Tensor, anchor: torch.Tensor, mean: torch.Tensor) -> None:
        self._tensor, self._anchor, self._mean = tensor, anchor, mean
        self._at, self._aside = 1.0, False
        _exchange(tensor, mean)

    def put(self, rho: float) -> None:
        # At 0 nothing would be left of the direction: the point before waits in the anchor's memory.
        if self._aside != (rho == 0):
            _exchange(self._tensor, self._anchor)
            self._aside = not self._aside
        if rho not in (0, self._at):
            origin = self._anchor.to(self._tensor.device)
            self._tensor.sub_(origin).mul_(rho / self._at).add_(origin)
            self._at = rho

    def leave(self) -> None:
        self.put(1.0)
        _exchange(self._tensor, self._mean)


class _Copied:
    """What the tensor held lies in memory of its own meanwhile."""

    def __init__(self, tensor: torch.Tensor, anchor: torch.Tensor, mean: torch.Tensor, from_anchor: bool) -> None:
        self._tensor, self._anchor, self._mean, self._from_anchor = tensor, anchor, mean, from_anchor
        self._own = tensor.detach().to(mean.device, copy=True)

    def put(self, rho: float) -> None:
        anchor, mean = (t.to(self._tensor.device, torch.float32) for t in (self._anchor, self._mean))
        self._tensor.copy_(torch.add(anchor, mean, alpha=rho) if self._from_anchor else torch.lerp(anchor, mean, rho))

    def leave(self) -> None:
        self._tensor.copy_(self._own)


def _room(tensor: torch.Tensor, dtype: torch.dtype | None, place: str) -> torch.Tensor:
    dtype = torch.promote_types(tensor.dtype, torch.float32) if dtype is None else dtype
    if place == "host" and tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=dtype, pin_memory=True)
    return torch.empty_like(tensor, dtype=dtype)


def _value(tensor: torch.Tensor, master: torch.Tensor | None) -> torch.Tensor:
    """What the tensor stands for: rounded weights stand still while their masters move."""
    return tensor if master is None and tensor.dtype == torch.float64 else value_of(tensor, master)


def _exchange(a: torch.Tensor, b: torch.Tensor) -> None:
    """Contents change places, bit for bit where dtypes are equal; devices may differ."""
    held = a.clone()
    a.copy_(b)
    b.copy_(held)


def _no_masters(tensors: Sequence[torch.Tensor]) -> Masters:
    return lambda: [None] * len(tensors)


def _locals(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if t is None else local_parts([t])[0] for t in tensors]
