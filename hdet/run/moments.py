"""What becomes of an optimizer's own state when the parameters are averaged.

Under local gradients it differs between replicas, and `hdet.Sync(moments=...)` chooses:

- ``keep``: each replica goes on with its own. No traffic; the first steps after an average use
  directions that were learned elsewhere. A checkpoint holds one state for each replica.
- ``average``: the mean of the state, as of the parameters. Two to three times the traffic (Adam).
- ``reset``: as before the first step, counters included. No traffic; each cycle pays a warm-up.

Under shared gradients (None) it is equal on all replicas if it follows from gradients alone. Of
optimizers whose rule is not known this is compared at every average, and what differs is averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import ASGD, LBFGS, Optimizer, Rprop
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..converge import digest
from ..converge.buckets import Buckets, Part
from ..converge.collectives import all_gather
from ..optim.state import WEIGHT_KEYS
from ..replicas import Replicas
from ..replicas.agreement import reachable
from ..tensors.dtensor import local_parts
from .snapshot import (
    SETTINGS,
    GroupNumbers,
    inner_optimizer,
    is_known,
    optimizers_in,
    reset_moments,
)

__all__ = ["Moments", "follows_gradients"]


class Moments:
    """The state of one optimizer under one of the policies.

    Masters, other replicas' parameters and the counters named ``step`` are no moments. Numbers are:
    also those that an optimizer of another library keeps in its groups (Prodigy's d).
    """

    def __init__(
        self,
        policy: str | None,
        optimizer: Optimizer,
        replicas: Replicas,
        bucket_bytes: int,
    ) -> None:
        self.policy, self._optimizer, self._replicas = policy, optimizer, replicas
        alone = replicas.count == 1 or len(replicas.local) > 1
        self.must_be_compared = policy is None and not alone and not follows_gradients(optimizer)
        """Is it to be found out at each average whether the state is equal on all replicas?"""
        self.differ = False
        """What the last comparison has found."""
        self._buckets = Buckets(self._parts, bucket_bytes, in_place=True)
        self._groups = GroupNumbers(optimizer)

    @property
    def are_averaged(self) -> bool:
        return self.policy == "average" or self.differ

    def check(self) -> None:
        """Raises ValueError for state that could be averaged in part only, by name."""
        if not self.are_averaged:
            return
        for entry in _entries(self._optimizer):
            if entry.is_tensor and (dtype := _dtype_without_mean(entry.value)) is not None:
                raise ValueError(
                    f"moments are to be averaged, but {type(self._optimizer).__name__} keeps "
                    f"{entry.key!r} of {entry.owner} in {dtype}, which has no mean, so its state "
                    "would be averaged in part: pass moments='reset', or with gradients='local' "
                    "moments='keep'"
                )

    def structure(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """What is averaged, for comparison between peers: there is no state where there was never a
        gradient. Raises as `check`."""
        self.check()
        if not (self.are_averaged or self.must_be_compared):
            return []
        shapes = [(e.owner, e.key, tuple(e.local.shape)) for e in self._tensors()]
        return shapes + [(e.owner, e.key, ()) for e in self._numbers()]

    def digest(self) -> torch.Tensor:
        """0-d, a whole number below 2^40: equal on replicas with equal state."""
        entries = list(_entries(self._optimizer))
        plain = [float(entry.value) for entry in entries if not entry.is_tensor]
        tensors = [entry.local for entry in entries if entry.is_tensor]
        return digest([*tensors, torch.tensor(plain, dtype=torch.float64)])[0]

    @torch.no_grad()
    def end_cycle(self, weights: Sequence[float]) -> None:
        """After the parameters. All peers alike."""
        if self.are_averaged:
            self.average(weights)
        elif self.policy == "reset":
            self.reset()
        elif self.policy == "keep" and weights[self._replicas.index] == 0:
            self.reset()  # its own led it astray

    @torch.no_grad()
    def average(self, weights: Sequence[float]) -> None:
        """Now. All peers alike."""
        self._buckets.average(self._replicas, weights)
        self._average_numbers(weights)

    @torch.no_grad()
    def reset(self) -> None:
        """As before the first step, also the counters. Masters stay."""
        reset_moments(self._optimizer)
        self._groups.put_back()

    def tensors_of(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """What an average writes for this parameter."""
        if not self.are_averaged:
            return []
        return [entry.local for entry in self._tensors() if entry.parameter is parameter]

    def _parts(self) -> list[Part]:
        return [Part(entry.local) for entry in self._tensors()]

    def _tensors(self) -> list[_Entry]:
        return [entry for entry in _entries(self._optimizer) if not entry.is_number]

    def _numbers(self) -> list[_Entry]:
        return [entry for entry in _entries(self._optimizer) if entry.is_number]

    def _average_numbers(self, weights: Sequence[float]) -> None:
        """Those that differ between replicas; what is equal stays bitwise, and whole ones whole."""
        numbers, group = self._numbers(), self._replicas.peer_group
        if not numbers or group is None:
            return
        parameter = self._optimizer.param_groups[0]["params"][0]
        device = reachable(group, local_parts([parameter])[0].device)
        own = torch.cat([entry.as_float64(device) for entry in numbers])
        table = own.new_empty(self._replicas.count, len(own))
        all_gather(table.view(-1), own, group)
        for entry, column in zip(numbers, table.T.tolist(), strict=True):
            mean = _mean_of(column, weights)
            if mean != column[self._replicas.index]:
                entry.write(mean)


def _mean_of(numbers: Sequence[float], weights: Sequence[float]) -> float:
    counted = [(x, w) for x, w in zip(numbers, weights, strict=True) if w]
    first = counted[0][0]
    return first if all(x == first for x, _ in counted) else sum(x * w for x, w in counted)


class _Entry(NamedTuple):
    """A tensor or a number that an optimizer keeps."""

    owner: str
    """Such as "parameter 3" or "group 0"."""
    key: str
    parameter: Any
    container: Any
    place: Any
    """Where in the container it stands."""
    value: Any

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, torch.Tensor)

    @property
    def is_number(self) -> bool:
        """0-d tensors are, but for those of a 0-d parameter, which have its shape; and counters."""
        if not self.is_tensor:
            return True
        if not self.value.is_floating_point():
            return self.value.numel() == 1
        of_scalar = isinstance(self.parameter, torch.Tensor) and not self.parameter.dim()
        return not self.value.dim() and not of_scalar

    @property
    def local(self) -> torch.Tensor:
        return local_parts([self.value])[0]

    def as_float64(self, device: torch.device) -> torch.Tensor:
        value = self.local if self.is_tensor else torch.tensor(float(self.value))
        return value.detach().reshape(1).to(device, torch.float64)

    def write(self, number: float) -> None:
        if self.is_tensor:
            self.local.fill_(number if self.value.is_floating_point() else round(number))
        else:
            self.container[self.place] = round(number) if type(self.value) is int else number


def _entries(optimizer: Optimizer) -> list[_Entry]:
    """Of the optimizer and those that it is made of, in the same order on all peers: the state of
    its parameters and of what is no parameter, then the groups. Each tensor once."""
    seen: set[int] = set()
    entries = []
    for one in optimizers_in(optimizer):
        for entry in (*_state_entries(one), *_group_entries(one)):
            if not (entry.is_tensor and id(entry.value) in seen):
                seen.add(id(entry.value))
                entries.append(entry)
    return entries


def _state_entries(optimizer: Optimizer) -> Iterator[_Entry]:
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    known = set(listed)
    owners = [(f"parameter {n}", p) for n, p in enumerate(listed)]
    owners += [(f"state {key!r}", key) for key in optimizer.state if key not in known]
    for name, owner in owners:
        values = optimizer.state.get(owner, {})
        for key in sorted(values, key=str) if isinstance(values, dict) else ():
            if key not in (*WEIGHT_KEYS, "step"):
                yield from _walk(name, str(key), owner, values, key)


def _group_entries(optimizer: Optimizer) -> Iterator[_Entry]:
    if is_known(optimizer):
        return
    for g, group in enumerate(optimizer.param_groups):
        for key in sorted(group.keys() - SETTINGS - {"params"}, key=str):
            yield from _walk(f"group {g}", str(key), None, group, key)


def _walk(owner: str, key: str, parameter: Any, container: Any, place: Any) -> Iterator[_Entry]:
    value = container[place]
    is_number = type(value) in (int, float) and not isinstance(container, tuple)
    if is_number or isinstance(value, torch.Tensor):
        yield _Entry(owner, key, parameter, container, place, value)
    elif isinstance(value, (dict, list, tuple)):
        for inner in sorted(value, key=str) if isinstance(value, dict) else range(len(value)):
            yield from _walk(owner, key, parameter, value, inner)


def _dtype_without_mean(tensor: torch.Tensor) -> torch.dtype | None:
    """Of a tensor, or of one that it is made of (codes and scales behind the face of a float);
    None: it has a mean, or is a counter."""
    tensor = local_parts([tensor])[0]
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner = (_dtype_without_mean(getattr(tensor, name)) for name in names)
        return next((dtype for dtype in inner if dtype is not None), None)
    averageable = tensor.is_floating_point() and tensor.element_size() > 1
    return None if averageable or tensor.numel() == 1 else tensor.dtype


def follows_gradients(optimizer: Optimizer) -> bool:
    """Is its state known to follow from gradients alone, not from rates or parameters?"""
    others = (ASGD, LBFGS, Rprop)
    every = [inner_optimizer(one) for one in optimizers_in(optimizer)]
    return all(is_known(one) and not isinstance(one, others) for one in every)
