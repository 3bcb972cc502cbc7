"""The state at the beginning of a cycle, kept until its end, so that a cycle that diverged can be taken back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from .shards import local_parts

__all__ = ["Anchor", "Anchors", "GroupNumbers", "begin_anew", "keeps_weights", "state_tensors"]

# What an optimizer makes as something else than zeros, by the names of torch's: NAdam, Adagrad, Rprop, ASGD.
_BEGINNINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "mu_product": lambda group: 1.0,
    "sum": lambda group: group.get("initial_accumulator_value", 0.0),
    "step_size": lambda group: group["lr"],
    "eta": lambda group: group["lr"],
    "mu": lambda group: 1.0,
}

_SETTINGS = {"lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "momentum", "weight_decay", "eps"}
"""Numbers of a group that users, schedules and knobs write."""

_Key = tuple[int, str, int]  # number of the parameter, key of its state ("" for itself), place in a list


def state_tensors(optimizer: Optimizer) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
    """(parameter, key, tensor) of the optimizer's state, in the order of its groups; lists of tensors one by one."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            values = optimizer.state.get(parameter, {})
            for key in sorted(values, key=str):
                held: Any = values[key]
                for tensor in held if isinstance(held, (list, tuple)) else [held]:
                    if isinstance(tensor, torch.Tensor):
                        yield parameter, str(key), tensor


def _numbers(optimizer: Optimizer) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(number of the parameter, key, its state) of what is kept as a number of Python's, as some optimizers keep their counters."""
    for n, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state.get(parameter, {})
        yield from ((n, key, state) for key in list(state) if type(state[key]) in (int, float))


def _known(optimizer: Optimizer) -> bool:
    """Does `_begin` know how its state begins, and does it count nowhere else? Torch's own and ours, also as `optimizer` of a wrapper."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return type(optimizer).__module__.startswith(("torch.optim.", "hdet."))


def keeps_weights(optimizer: Optimizer) -> bool:
    """Does its state hold weights beside the parameters? Schedule-free ones do, and note in their groups which of them are in place."""
    return any("train_mode" in group for group in optimizer.param_groups)


@torch.no_grad()
def begin_anew(optimizer: Optimizer, keep: Collection[str] = ()) -> None:
    """The state as before the first step: mostly zeros, also the counters. Entries named in ``keep`` stay.

    In place; that of an optimizer that is neither torch's nor ours (unless some of it stays) is dropped, and made by it as it makes it: not
    all begins as zeros. What it counts in its groups is for `GroupNumbers`.
    """
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    _drop(optimizer, [p for p in groups if not any(key in keep for key in optimizer.state.get(p, ()))])
    for parameter, key, tensor in state_tensors(optimizer):
        if key not in keep:
            _begin(local_parts([tensor])[0], key, groups[parameter])
    for _, key, state in _numbers(optimizer):
        state[key] *= 0


def _drop(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """The state of these, where `_begin` does not know how it begins: its optimizer makes it as it makes it."""
    if not _known(optimizer):
        for parameter in parameters:
            optimizer.state.pop(parameter, None)


class GroupNumbers:
    """What an optimizer that is neither torch's nor ours counts in its groups, as some do: steps, or the distance that it has found. As they
    are now, to be put back."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = [] if _known(optimizer) else [(group, self._numbers(group)) for group in optimizer.param_groups]

    @staticmethod
    def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
        return {key: value for key, value in group.items() if type(value) in (int, float) and key not in _SETTINGS}

    def put_back(self) -> None:
        """Those that were not there are gone."""
        for group, before in self._groups:
            for key in self._numbers(group).keys() - before.keys():
                del group[key]
            group.update(before)


def _begin(tensor: torch.Tensor, key: str, group: dict[str, Any]) -> None:
    tensor.fill_(_BEGINNINGS[key](group) if key in _BEGINNINGS else 0.0)


class Anchor:
    """Copies of some tensors and of an optimizer's whole state.

    Memory: as much as they have, on their device or (``place`` "host") in the host's, pinned for CUDA. `take` and `restore` are one
    pass over them each.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], optimizer: Optimizer, place: str) -> None:
        self._tensors, self._optimizer, self._on_host = list(tensors), optimizer, place == "host"
        self._copies: dict[_Key, torch.Tensor] = {}
        self._taken: set[_Key] = set()
        self._numbers: dict[tuple[int, str], float] = {}
        self._groups: GroupNumbers | None = None

    def _contents(self) -> Iterator[tuple[_Key, torch.Tensor, torch.Tensor, dict[str, Any]]]:
        """(key, local part, its parameter, its group) of everything there is now; a key survives a state that is loaded anew."""
        for i, tensor in enumerate(local_parts(self._tensors)):
            yield (i, "", 0), tensor, tensor, {}
        count: Counter[tuple[int, str]] = Counter()
        homes = [(p, group) for group in self._optimizer.param_groups for p in group["params"]]
        places = {p: n for n, (p, _) in enumerate(homes)}
        for parameter, name, tensor in state_tensors(self._optimizer):
            place = (places[parameter], name)
            yield (*place, count[place]), local_parts([tensor])[0], parameter, homes[place[0]][1]
            count[place] += 1

    @property
    def taken(self) -> bool:
        return bool(self._taken)

    def forget(self) -> None:
        self._taken = set()

    @torch.no_grad()
    def take(self) -> None:
        """Remember what is there now."""
        self._taken = set()
        for key, tensor, _, _ in self._contents():
            copy = self._copies.get(key)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = self._copies[key] = self._room_for(tensor)
            copy.copy_(tensor, non_blocking=True)
            self._taken.add(key)
        self._numbers = {(n, key): state[key] for n, key, state in _numbers(self._optimizer)}
        self._groups = GroupNumbers(self._optimizer)

    def _room_for(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._on_host or tensor.device.type == "cpu":
            return torch.empty_like(tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)

    @torch.no_grad()
    def restore(self) -> None:
        """Put it back, in place. State that was made since (an optimizer makes it in its first step) becomes what it began as."""
        had = {n for n, name, _ in self._taken if name} | {n for n, _ in self._numbers}
        parameters = (p for group in self._optimizer.param_groups for p in group["params"])
        _drop(self._optimizer, [p for n, p in enumerate(parameters) if n not in had])
        for key, tensor, parameter, group in self._contents():
            if key in self._taken:
                tensor.copy_(self._copies[key], non_blocking=True)
            elif key[1] == "replica_params":  # until the first step all replicas are the model
                tensor.copy_(parameter)
            else:
                _begin(tensor, key[1], group)
        for n, name, state in _numbers(self._optimizer):
            state[name] = self._numbers.get((n, name), 0)
        if self._groups is not None:
            self._groups.put_back()


class Anchors:
    """The beginnings of the running cycle and of the accepted one before it.

    A cycle may be accepted although its last steps have ruined it, because its mean loss is still good. Then no rate helps from where
    the next one begins, and going back has to go further.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], optimizer: Optimizer, place: str) -> None:
        self._now, self._before = (Anchor(tensors, optimizer, place) for _ in range(2))
        self._went_back = False

    def advance(self) -> None:
        """A cycle begins. After a rollback it begins where it is known to."""
        if not self._went_back:
            self._now, self._before = self._before, self._now
            self._now.take()
        self._went_back = False

    def forget(self) -> None:
        """Other parameters have been loaded: the next cycle begins with them, and there is none before it."""
        self._went_back = False
        self._now.forget()
        self._before.forget()

    def go_back(self, attempt: int) -> None:
        """To the beginning of the cycle; from the third attempt in a row on, to that of the cycle before. ``attempt`` counts from 0."""
        if attempt >= 2 and self._before.taken:
            self._now = self._before
        assert self._now.taken, "nothing to go back to: no cycle has begun"
        self._now.restore()
        self._went_back = True
