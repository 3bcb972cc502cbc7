"""What becomes of an optimizer's own state when the parameters are averaged.

Under local gradients it differs between replicas, and `hdet.Sync(moments=...)` chooses:

- ``keep``: each replica goes on with its own. No traffic; the first steps after an average use
  directions that were learned elsewhere. A checkpoint holds one state for each replica.
- ``average``: the mean of the state, as of the parameters. Two to three times the traffic (Adam).
- ``reset``: as before the first step, counters included. No traffic; each cycle pays a warm-up.

Under shared gradients (None) it is equal on all replicas if it follows from gradients alone. Of
optimizers whose rule is not known, and where decay is part of the gradient, this is compared at
every average, and what differs is averaged.
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
from ..knobs.of_optimizer import is_coupled
from ..optim.snapshot import (
    OwnData,
    inner_optimizer,
    is_known,
    keys_of_own,
    optimizers_in,
    owners_in,
    reset_moments,
    weight_keys,
)
from ..replicas import Replicas
from ..replicas.agreement import reachable
from ..tensors.dtensor import local_parts

__all__ = ["Moments", "follows_gradients"]


class Moments:
    """The state of one optimizer, and of those inside of it, under one of the policies.

    Masters, other replicas' parameters, schedule-free's z, which is averaged with the parameters,
    and the counters named ``step`` are no moments. Numbers are: also those that an optimizer of
    another library keeps in its groups (Prodigy's d). A reset makes the latter what they were when
    this object was made.
    """

    def __init__(
        self, policy: str | None, optimizer: Optimizer, replicas: Replicas, bucket_bytes: int
    ) -> None:
        self.policy, self._optimizer, self._replicas = policy, optimizer, replicas
        alone = replicas.count == 1 or len(replicas.local) > 1
        self.must_be_compared = policy is None and not alone and not follows_gradients(optimizer)
        """Is it to be found out at each average whether the state is equal on all replicas?"""
        self.differ = False
        """What the last comparison has found."""
        self._buckets = Buckets(  # without self: a cycle would keep the state in memory
            lambda: [Part(entry.value) for entry in _tensors(optimizer)],
            bucket_bytes,
            in_place=True,
        )
        others = [one for one in optimizers_in(optimizer) if policy and not is_known(one)]
        self._first_data = [OwnData(one) for one in others if policy != "average"]

    @property
    def are_averaged(self) -> bool:
        return self.policy == "average" or self.differ

    @property
    def must_agree(self) -> bool:
        """Must peers have the same ones, in number and shape?"""
        return self.are_averaged or self.must_be_compared

    def check(self) -> None:
        """Raises ValueError for state that could be averaged in part only, by name."""
        for entry in _entries(self._optimizer) if self.are_averaged else []:
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
        return [
            (entry.owner, entry.key, () if entry.is_number else tuple(entry.value.shape))
            for entry in (_entries(self._optimizer) if self.must_agree else [])
        ]

    def digest(self) -> torch.Tensor:
        """0-d, a whole number below 2^40: equal on replicas with equal state."""
        entries = _entries(self._optimizer)
        plain = [float(entry.value) for entry in entries if not entry.is_tensor]
        tensors = [entry.value for entry in entries if entry.is_tensor]
        return digest([*tensors, torch.tensor(plain, dtype=torch.float64)])[0]

    def end_cycle(self, shares: Sequence[float]) -> None:
        """After the parameters. All peers alike."""
        led_astray = self.policy == "keep" and shares[self._replicas.index] == 0
        if self.are_averaged:
            self.average(shares)
        elif self.policy == "reset" or led_astray:
            self.reset()

    @torch.no_grad()
    def average(self, shares: Sequence[float]) -> None:
        """Now. All peers alike. Numbers that are equal stay bitwise, and whole ones whole."""
        self._buckets.average(self._replicas, shares)
        numbers = [entry for entry in _entries(self._optimizer) if entry.is_number]
        group = self._replicas.peer_group
        if not numbers or group is None:
            return
        parameter = self._optimizer.param_groups[0]["params"][0]
        device = reachable(group, local_parts([parameter])[0].device)
        values = [torch.as_tensor(e.value, dtype=torch.float64, device=device) for e in numbers]
        own = torch.stack([value.squeeze() for value in values])
        table = own.new_empty(self._replicas.count, len(own))
        all_gather(table.view(-1), own, group)
        for entry, column in zip(numbers, table.T.tolist(), strict=True):
            counted = [(x, w) for x, w in zip(column, shares, strict=True) if w]
            is_equal = len({x for x, _ in counted}) == 1
            mean = counted[0][0] if is_equal else sum(x * w for x, w in counted)
            if mean != column[self._replicas.index]:
                entry.write(mean)

    def reset(self) -> None:
        """As before the first step, also the counters. Masters stay."""
        for optimizer in optimizers_in(self._optimizer):
            reset_moments(optimizer)
        for data in self._first_data:
            data.put_back()

    def tensors_of(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """What an average writes for this parameter."""
        if not self.are_averaged:
            return []
        return [e.value for e in _tensors(self._optimizer) if e.parameter is parameter]


class _Entry(NamedTuple):
    """A tensor or a number that an optimizer keeps."""

    owner: str
    """Such as "parameter 3" or "group 0"."""
    key: str
    parameter: Any
    container: Any
    place: Any
    """Where in the container it stands."""

    @property
    def value(self) -> Any:
        """The number, or what of the tensor lies on this rank."""
        held = self.container[self.place]
        return local_parts([held])[0] if isinstance(held, torch.Tensor) else held

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.container[self.place], torch.Tensor)

    @property
    def is_number(self) -> bool:
        """0-d tensors are, but for those of a 0-d parameter, which have its shape; and counters."""
        held = self.container[self.place]
        if not isinstance(held, torch.Tensor):
            return True
        if not held.is_floating_point():
            return held.numel() == 1
        of_scalar = isinstance(self.parameter, torch.Tensor) and not self.parameter.dim()
        return not held.dim() and not of_scalar

    def write(self, number: float) -> None:
        value = self.value
        if self.is_tensor:
            value.fill_(number if value.is_floating_point() else round(number))
        else:
            self.container[self.place] = round(number) if type(value) is int else number


def _entries(optimizer: Optimizer) -> list[_Entry]:
    """Of the optimizer and those inside of it, in the same order on all peers: the state of
    parameters and of what is no parameter, then the groups. Each tensor once."""
    entries: dict[Any, _Entry] = {}
    for one in optimizers_in(optimizer):
        for key, owner in owners_in(one):
            name = f"state {key!r}" if key is owner else f"parameter {key}"
            values = one.state.get(owner, {})
            own = values.keys() - weight_keys(one) - {"step"} if isinstance(values, dict) else ()
            _collect(entries, name, owner, values, own)
        for g, group in enumerate(() if is_known(one) else one.param_groups):
            _collect(entries, f"group {g}", None, group, keys_of_own(group))
    return list(entries.values())


def _tensors(optimizer: Optimizer) -> list[_Entry]:
    return [entry for entry in _entries(optimizer) if not entry.is_number]


def _collect(
    entries: dict[Any, _Entry], owner: str, parameter: Any, values: Any, keys: Any
) -> None:
    for key in sorted(keys, key=str):
        for container, place in _places(values, key):
            held = container[place]
            identity = id(held) if isinstance(held, torch.Tensor) else (id(container), place)
            entries.setdefault(identity, _Entry(owner, str(key), parameter, container, place))


def _places(container: Any, place: Any) -> Iterator[tuple[Any, Any]]:
    """Where tensors and numbers stand, however nested: (container, key or index)."""
    value = container[place]
    is_number = type(value) in (int, float) and not isinstance(container, tuple)
    if is_number or isinstance(value, torch.Tensor):
        yield container, place
    elif isinstance(value, (dict, list, tuple)):
        for inner in sorted(value, key=str) if isinstance(value, dict) else range(len(value)):
            yield from _places(value, inner)


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
    return all(
        is_known(one) and not isinstance(one, others) and not _decays_gradients(one)
        for one in every
    )


def _decays_gradients(optimizer: Optimizer) -> bool:
    groups = enumerate(optimizer.param_groups)
    return any(
        group.get("weight_decay", 0) != 0 and is_coupled(optimizer, i) for i, group in groups
    )
