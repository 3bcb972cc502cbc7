"""Copies of parameters and of an optimizer's state, to be restored: after a cycle that diverged,
and in a trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Adagrad, Optimizer

from ..optim.fused import FusedOptimizer
from ..optim.moment_storage import EIGHT_BIT
from ..optim.state import MASTER_KEYS, WEIGHT_KEYS, kept_masters, reset_master, state_sets
from ..tensors.buffers import BufferCopies, Copy, ReplicaTensors, keep, put, tensors_in
from ..tensors.dtensor import local_parts

__all__ = [
    "SETTINGS",
    "CycleStarts",
    "GroupNumbers",
    "Snapshot",
    "inner_optimizer",
    "is_known",
    "keeps_codes",
    "keeps_weights",
    "optimizers_in",
    "reset_moments",
]

SETTINGS = {
    "lr",
    "initial_lr",
    "max_lr",
    "min_lr",
    "base_momentum",
    "max_momentum",
    "momentum",
    "weight_decay",
    "eps",
}
"""Numbers of a group that users, schedules and knobs write."""


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """The `optimizer` of a wrapper."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def is_known(optimizer: Optimizer) -> bool:
    """Is it torch's or hdet's, whose groups hold settings, and no numbers of their own?"""
    return type(inner_optimizer(optimizer)).__module__.startswith(("torch.optim.", "hdet."))


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """An optimizer and those that it is made of, whatever the attribute is called: a wrapper's,
    SAM's base optimizer, a list of parts. Those that hand on the state of another one count
    once."""
    found: list[Optimizer] = []
    waiting = [optimizer]
    while waiting:
        one = waiting.pop(0)
        if any(one is other or one.state is other.state for other in found):
            continue
        found.append(one)
        for value in vars(one).values():
            held = (
                value.values()
                if isinstance(value, dict)
                else value
                if isinstance(value, (list, tuple))
                else [value]
            )
            waiting += [inner for inner in held if isinstance(inner, Optimizer)]
    return found


def keeps_weights(optimizer: Optimizer) -> bool:
    """Does its state hold weights beside the parameters? Schedule-free ones do, and note in their
    groups which of them are in place."""
    return any("train_mode" in group for group in optimizer.param_groups)


def keeps_codes(optimizer: Optimizer) -> bool:
    """Are moments kept in 8 bits?"""
    return getattr(inner_optimizer(optimizer), "moment_dtype", None) == EIGHT_BIT


@torch.no_grad()
def reset_moments(optimizer: Optimizer) -> None:
    """The state as before the first step; masters and other replicas' parameters stay.

    hdet's optimizers get zeros in place, because their plans hold the addresses. The state of
    others is dropped, and they make it again.
    """
    _put_back(optimizer, {}, weights=False)


def _put_back(optimizer: Optimizer, kept: Mapping[Any, Mapping[str, Any]], weights: bool) -> None:
    """The state as it is in ``kept``, by number of the parameter.

    What has been made since goes. ``weights``: the `WEIGHT_KEYS` too.
    """
    fused, state = isinstance(inner_optimizer(optimizer), FusedOptimizer), optimizer.state
    for key, parameter, group in _owners(optimizer):
        before = kept.get(key)
        if fused and parameter in state:
            _renew(state[parameter], parameter, before or {}, weights)
        elif (
            before is None
            and isinstance(inner_optimizer(optimizer), Adagrad)
            and state.get(parameter)
        ):
            # made together with the optimizer, and never again
            state[parameter]["step"].zero_()
            local_parts([state[parameter]["sum"]])[0].fill_(group["initial_accumulator_value"])
        elif before is None:
            state.pop(parameter, None)
        else:
            state[parameter] = put(state.get(parameter), before)


def _renew(
    state: dict[str, Any], parameter: torch.Tensor, before: Mapping[str, Any], weights: bool
) -> None:
    """Of a fused optimizer: in place, and what was not there begins: moments and counters as zeros,
    replicas and masters as the model."""
    made = [key for key in state if key not in before]
    state.update({key: put(state.get(key), held) for key, held in before.items()})
    for key in made:
        if key == "replica_params" and weights:
            for other in state[key]:
                other.copy_(parameter)
        elif key not in WEIGHT_KEYS and isinstance(state[key], torch.Tensor):
            local_parts([state[key]])[0].zero_()
    if weights and not set(MASTER_KEYS) & before.keys():
        for tensor, master in zip(state_sets(state, parameter), kept_masters(state), strict=False):
            reset_master(tensor, master)


def _owners(optimizer: Optimizer) -> list[tuple[Any, Any, Mapping[str, Any]]]:
    """(key, whose state it is, its group): parameters by number, which survives a state that is
    loaded anew; then what is no parameter."""
    listed = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    own = {p for p, _ in listed}
    return [(n, p, group) for n, (p, group) in enumerate(listed)] + [
        (key, key, {}) for key in [*optimizer.state] if key not in own
    ]


class GroupNumbers:
    """A copy of what an optimizer that is neither torch's nor ours keeps in its groups, beside
    settings: the steps counted there, or the distance that it has found; as numbers, tensors or
    lists of tensors."""

    def __init__(self, optimizer: Optimizer) -> None:
        groups = [] if is_known(optimizer) else optimizer.param_groups
        self._groups = [
            (group, {key: keep(group[key]) for key in self._keys(group)}) for group in groups
        ]

    @staticmethod
    def _keys(group: Mapping[str, Any]) -> set[str]:
        return {
            key
            for key, value in group.items()
            if key not in {*SETTINGS, "params"}
            and (type(value) in (int, float) or next(tensors_in(value), None) is not None)
        }

    @torch.no_grad()
    def put_back(self) -> None:
        """Those that were not there are gone."""
        for group, before in self._groups:
            for key in self._keys(group) - before.keys():
                del group[key]
            group.update({key: put(group.get(key), value) for key, value in before.items()})


class Snapshot:
    """Copies of some tensors, the same ones from `take` to `restore`, of a model's buffers and of
    an optimizer's state, and that of optimizers inside of it.

    Memory: as much as they have at the moment (nothing for moments that do not exist yet), on their
    device or (``place`` "host") in the host's, pinned for CUDA. `take` and `restore` are one pass
    over them each.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        optimizer: Optimizer,
        place: str,
        model: nn.Module | None = None,
    ) -> None:
        self._tensors, self._optimizer, self._on_host = list(tensors), optimizer, place == "host"
        self._buffers = None if model is None else BufferCopies(model, self._on_host)
        self._copies: list[Copy] = []
        self._states: list[tuple[Optimizer, dict[Any, dict[str, Any]], GroupNumbers]] = []
        self.taken = False

    def forget(self) -> None:
        """Its memory stays for the next time."""
        self.taken = False

    @torch.no_grad()
    def take(self) -> None:
        """Remember what is there now."""
        befores: list[Any] = [*self._copies] or [None] * len(self._tensors)
        self._copies = [
            Copy(tensor, self._on_host, old)
            for tensor, old in zip(self._tensors, befores, strict=True)
        ]
        if self._buffers is not None:
            self._buffers.take()
        before = {id(optimizer): state for optimizer, state, _ in self._states}
        self._states = [
            (one, keep(_held(one), self._on_host, before.get(id(one))), GroupNumbers(one))
            for one in optimizers_in(self._optimizer)
        ]
        self.taken = True

    @torch.no_grad()
    def restore(self, keep_new_buffers: bool = False) -> None:
        """Put it back, in place.

        State that was made since (an optimizer makes it in its first step) is as before the
        first step; buffers that were made since are gone, unless they are to be kept."""
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            copy.put(tensor)
        if self._buffers is not None:
            self._buffers.put_back(keep_new_buffers)
        for optimizer, state, numbers in self._states:
            _put_back(optimizer, state, weights=True)
            numbers.put_back()


def _held(optimizer: Optimizer) -> dict[Any, Any]:
    """What an optimizer's state has, by `_owners`' keys."""
    state = optimizer.state
    return {
        key: state[owner]
        for key, owner, _ in _owners(optimizer)
        if owner in state and state[owner] != {}
    }


class CycleStarts:
    """The beginnings of the running cycle and of the accepted one before it.

    A cycle whose last steps have ruined it may be accepted, because its mean loss is still good.
    Then no rate helps from its end, and the beginning before has to be restored.
    """

    def __init__(self, tensors: ReplicaTensors, optimizer: Optimizer, place: str) -> None:
        self._now, self._before = (
            Snapshot(tensors.fixed, optimizer, place, tensors.model) for _ in range(2)
        )
        self._went_back = False

    def advance(self) -> None:
        """A cycle begins. After a rollback it begins where it is known to."""
        if not self._went_back:
            self._now, self._before = self._before, self._now
            self._now.take()
        self._went_back = False

    def forget(self) -> None:
        """Other parameters have been loaded: there is no cycle before the next one."""
        self._went_back = False
        self._now.forget()
        self._before.forget()

    def go_back(self, attempt: int) -> None:
        """To the beginning of the cycle; from the third attempt in a row on, to that of the cycle
        before. ``attempt`` counts from 0."""
        if attempt >= 2 and self._before.taken:
            self._now = self._before
        assert self._now.taken, "nothing to go back to: no cycle has begun"
        self._now.restore()
        self._went_back = True
