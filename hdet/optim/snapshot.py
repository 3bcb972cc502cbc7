"""Copies of parameters and of an optimizer's state, to be restored: after a cycle that diverged,
and in a trial."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Adagrad, Optimizer
from torch.utils.hooks import RemovableHandle

from ..kernels.numbers import value_of
from ..rules import RULES
from ..tensors.buffers import (
    BufferCopies,
    Contents,
    Copy,
    ReplicaTensors,
    averages_in,
    keep,
    put,
    tensors_in,
)
from ..tensors.dtensor import local, local_parts
from .fused import FusedOptimizer
from .masters import (
    EMA_KEYS,
    MASTER_KEYS,
    WEIGHT_KEYS,
    kept_beside,
    kept_masters,
    reset_master,
    state_sets,
)
from .moment_storage import EIGHT_BIT
from .release import weakly
from .schedule_free import ScheduleFree

Masters = Callable[[], Sequence[torch.Tensor | None]]
"""Gives the master of each of some tensors, or None. Asked whenever they are needed, because an
optimizer makes masters in its first step."""
SETTINGS = {
    "lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "momentum",
    "weight_decay", "eps", "betas",
}  # fmt: skip
"""Numbers of a group that users, schedules and knobs write."""
_OF_TORCH = {"state", "param_groups", "defaults"}
"""Attributes of each optimizer."""


# -- what an optimizer is, and keeps ---------------------------------------------------------------


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
    found = [optimizer]
    for one in found:
        for value in vars(one).values():
            held = value.values() if isinstance(value, dict) else value
            for inner in held if isinstance(value, (dict, list, tuple)) else [value]:
                if isinstance(inner, Optimizer) and all(inner.state is not o.state for o in found):
                    found.append(inner)
    return found


def owners_in(optimizer: Optimizer) -> list[tuple[Any, Any]]:
    """(key, whose state it is): parameters by number, which survives a state that is loaded again;
    then what is no parameter, by itself."""
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    own = set(listed)
    return [*enumerate(listed), *((key, key) for key in optimizer.state if key not in own)]


def keys_of_own(group: Mapping[str, Any]) -> set[str]:
    """What an optimizer of another library may keep in a group, beside settings."""
    return group.keys() - SETTINGS - {"params"}


def keeps_weights(optimizer: Optimizer) -> bool:
    """Does its state hold weights beside the parameters? Schedule-free ones do, and note in their
    groups which of them are in place."""
    return any("train_mode" in group for group in optimizer.param_groups)


def is_schedule_free(optimizer: Optimizer) -> bool:
    """Is it ours, whose z is known to be a weight, and whose groups' numbers are alike on all
    replicas?"""
    return isinstance(inner_optimizer(optimizer), ScheduleFree)


def weight_keys(optimizer: Optimizer) -> set[str]:
    """What its states have that is no moment: the parameters themselves, and weights beside
    them."""
    return {*WEIGHT_KEYS, *_own_weights(inner_optimizer(optimizer))}


def _own_weights(inner: Optimizer) -> tuple[str, ...]:
    """Those that its rule keeps beside the parameters."""
    return RULES[inner.rule].weights if isinstance(inner, FusedOptimizer) else ()


def beside(optimizer: Optimizer, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The weights that the optimizer keeps beside these tensors, one after the other, and that are
    averaged and sent as they are."""
    inner = inner_optimizer(optimizer)
    kept = inner.beside(tensors) if isinstance(inner, FusedOptimizer) else []
    return [weight for weights in kept for weight in weights]


def keeps_emas(optimizer: Optimizer) -> bool:
    """Are averages over time kept?"""
    return bool(getattr(inner_optimizer(optimizer), "ema", ()))


def keeps_codes(optimizer: Optimizer) -> bool:
    """Are moments kept in 8 bits?"""
    return getattr(inner_optimizer(optimizer), "moment_dtype", None) == EIGHT_BIT


# -- put back --------------------------------------------------------------------------------------


def masters_of(optimizer: Optimizer, tensors: Sequence[torch.Tensor], slot: int) -> Masters:
    """For the local replica in that slot.

    Only a fused optimizer's are known: what others call a master is not read.
    """
    ask = getattr(optimizer, "masters", None)
    return (lambda: ask(tensors, slot)) if callable(ask) else (lambda: [None] * len(tensors))


@contextmanager
def in_train_mode(optimizer: Optimizer) -> Iterator[None]:
    """Inside, the parameters of a schedule-free optimizer of ours are y, on whichever ranks they
    were x."""
    inner = inner_optimizer(optimizer)
    if not isinstance(inner, ScheduleFree) or inner.param_groups[0]["train_mode"]:
        yield
        return
    inner.train()
    try:
        yield
    finally:
        inner.eval()


def attach_hook(
    register: Callable[[Any], RemovableHandle], hook: Callable[..., Any]
) -> Callable[[], object]:
    """Registers a hook and returns what removes it. A method's object is not kept alive by it.

    torch's own handle cannot remove it where the garbage collector frees a run: weak references,
    of which it is one, are cleared before anything else."""
    handle = register(weakly(hook) if isinstance(hook, MethodType) else hook)
    hooks: Any = handle.hooks_dict_ref()
    return partial(hooks.pop, handle.id, None)


@contextmanager
def without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Inside, no hook is called before or after a step."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    before = {name: getattr(optimizer, name) for name in names}
    optimizer.__dict__.update({name: type(hooks)() for name, hooks in before.items()})
    try:
        yield
    finally:
        optimizer.__dict__.update(before)


@torch.no_grad()
def reset_moments(optimizer: Optimizer) -> None:
    """The state as before the first step; masters and other replicas' parameters stay.

    hdet's optimizers get zeros in place, because their plans hold the addresses. The state of
    others is dropped, and they make it again.
    """
    _put_back(optimizer, {}, weights=False)


def _put_back(optimizer: Optimizer, kept: Mapping[Any, Mapping[str, Any]], weights: bool) -> None:
    """The state as it is in ``kept``, by key of `owners_in`.

    What has been made since goes. ``weights``: those of `weight_keys` too. A state
    that lacks weights of its rule is made again, of the weights that the model has by then.
    """
    inner, state = inner_optimizer(optimizer), optimizer.state
    for key, owner in owners_in(optimizer):
        before = kept.get(key)
        begins = weights and not {*_own_weights(inner)} <= (before or {}).keys()
        if owner in state and isinstance(inner, FusedOptimizer) and not begins:
            _renew(state[owner], owner, before or {}, weights, weight_keys(inner))
        elif before is not None:
            state[owner] = put(state.get(owner), before)
        elif state.get(owner) and isinstance(inner, Adagrad):
            # made together with the optimizer, and never again
            state[owner]["step"].zero_()
            first = inner.defaults["initial_accumulator_value"]
            local_parts([state[owner]["sum"]])[0].fill_(first)
        else:
            state.pop(owner, None)


def _renew(
    state: dict[str, Any],
    parameter: torch.Tensor,
    before: Mapping[str, Any],
    weights: bool,
    no_moments: set[str],
) -> None:
    """Of a fused optimizer: in place, and what was not there begins: moments and counters as zeros,
    replicas and masters as the model."""
    made = [key for key in state if key not in before]
    state.update({key: put(state.get(key), held) for key, held in before.items()})
    for key in made:
        if key == "replica_params" and weights:
            for other in state[key]:
                other.copy_(parameter)
        elif key == "ema_step" and weights:
            state[key].zero_()
        elif key not in no_moments and isinstance(state[key], torch.Tensor):
            local_parts([state[key]])[0].zero_()
    if weights and not set(MASTER_KEYS) & before.keys():
        for tensor, master in zip(state_sets(state, parameter), kept_masters(state), strict=False):
            reset_master(tensor, master)
    sets, masters = state_sets(state, parameter), kept_masters(state)
    for key in (key for key in made if weights and key in EMA_KEYS):
        for tensor, master, ema in zip_longest(sets, masters, kept_beside(state, key)):
            own = None if master is None else local(master)
            local(ema).copy_(value_of(local(tensor), own))


def forget_states(optimizer: Optimizer, but: Mapping[int, set[Any]]) -> None:
    """Drops what was made for keys of states that are not in ``but``, by id of the optimizer."""
    for one in optimizers_in(optimizer):
        for key in one.state.keys() - but[id(one)]:
            del one.state[key]
        if isinstance(one, FusedOptimizer):
            one.forget_plans()


class OwnData:
    """A copy of what an optimizer keeps outside of its state: in groups, beside settings (the steps
    counted there, the distance that it has found), and in attributes. torch's and hdet's keep
    nothing there, but for schedule-free ones."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._kept = [{n: held[n] for n in names} for held, names in _own_data(optimizer)]
        self._contents = Contents(self._kept, seen=parameters_in(optimizer))

    @torch.no_grad()
    def put_back(self) -> None:
        """Those that were not there are gone."""
        self._contents.put_back()
        # Other dicts than then, if a state has been loaded since.
        for (held, names), before in zip(_own_data(self._optimizer), self._kept, strict=False):
            for name in names - before.keys():
                del held[name]
            held.update(before)


def parameters_in(optimizer: Optimizer) -> dict[int, Any]:
    """By id."""
    return {id(p): p for group in optimizer.param_groups for p in group["params"]}


def _own_data(optimizer: Optimizer) -> list[tuple[dict[str, Any], set[str]]]:
    """(where, by which names): attributes, then each group."""
    own: dict[str, Any] = {}
    if not type(optimizer).__module__.startswith(("torch.optim.", "hdet.")):
        own = vars(optimizer)
    names = {name for name, value in own.items() if _is_data(optimizer, name, value)}
    has_none = is_known(optimizer) and not is_schedule_free(optimizer)
    groups = [] if has_none else optimizer.param_groups
    return [(own, names), *((group, keys_of_own(group)) for group in groups)]


def _is_data(optimizer: Optimizer, name: str, value: Any) -> bool:
    """Is an attribute what an optimizer counts or collects, and no handle of a trainer's?"""
    if name in _OF_TORCH or name.startswith("_optimizer_"):
        return False
    if isinstance(value, (torch.Tensor, torch.Generator, nn.Module)):
        return True
    home = type(value).__module__
    is_plain = home.split(".")[0] in ("builtins", "collections", "numpy", "random")
    return home == type(optimizer).__module__ or (is_plain and not callable(value))


# -- snapshots -------------------------------------------------------------------------------------


class Snapshot:
    """Copies of some tensors, the same ones from `take` to `restore`, of a model's buffers and
    `averages_in` it, and of all that an optimizer keeps, and those inside of it.

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
        averages = [] if model is None else averages_in(model, tensors)
        self._tensors, self._optimizer = [*tensors, *averages], optimizer
        self._on_host = place == "host"
        self._buffers = None if model is None else BufferCopies(model, self._on_host)
        self._copies: list[Any] = [None] * len(self._tensors)
        self._states: list[tuple[Optimizer, dict[Any, Any], OwnData]] = []

    @torch.no_grad()
    def take(self) -> None:
        """Remember what is there now. Raises ValueError for what cannot be copied."""
        pairs = zip(self._tensors, self._copies, strict=True)
        self._copies = [Copy(tensor, self._on_host, before) for tensor, before in pairs]
        if self._buffers is not None:
            self._buffers.take()
        befores = {id(optimizer): state for optimizer, state, _ in self._states}
        self._states = []
        for one in optimizers_in(self._optimizer):
            state = {key: one.state[owner] for key, owner in owners_in(one) if owner in one.state}
            state = {key: values for key, values in state.items() if values != {}}
            try:
                kept = keep(state, self._on_host, befores.get(id(one)), parameters_in(one))
                self._states.append((one, kept, OwnData(one)))
            except ValueError as error:
                raise ValueError(
                    f"{type(one).__name__} keeps {error}, so that neither a trial nor a rollback "
                    "could put it back: leave AutoLR and Divergence(rollback=) out"
                ) from error

    @property
    def num_bytes(self) -> int:
        """Of the memory that the copies take."""
        buffers = [] if self._buffers is None else self._buffers.copies
        held = [self._copies, buffers, [state for _, state, _ in self._states]]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(held))

    @torch.no_grad()
    def restore(self, keep_new_buffers: bool = False) -> None:
        """Put it back, in place.

        State that was made since (an optimizer makes it in its first step) is as before the
        first step; buffers that were made since are gone, unless they are to be kept."""
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            copy.put(tensor)
        if self._buffers is not None:
            self._buffers.put_back(keep_new_buffers)
        for optimizer, state, data in self._states:
            _put_back(optimizer, state, weights=True)
            data.put_back()


class CycleStarts:
    """The beginnings of the running cycle and of the accepted one before it.

    A cycle whose last steps have ruined it may be accepted, because its mean loss is still good.
    Then no rate helps from its end, and the beginning before has to be restored.
    """

    def __init__(self, tensors: ReplicaTensors, optimizer: Optimizer, place: str) -> None:
        self._make = lambda: Snapshot(tensors.fixed, optimizer, place, tensors.model)
        self._taken: list[Snapshot] = []
        """Two at most, the last one last."""
        self._went_back = False

    def advance(self) -> None:
        """A cycle begins. After a rollback it begins where it is known to."""
        if not self._went_back:
            snapshot = self._taken.pop(0) if len(self._taken) == 2 else self._make()
            snapshot.take()
            self._taken.append(snapshot)
        self._went_back = False

    def forget(self) -> None:
        """Other parameters have been loaded: there is no cycle before the next one."""
        self._taken, self._went_back = [], False

    def go_back(self, attempt: int) -> None:
        """To the beginning of the cycle; from the third attempt in a row on, to that of the cycle
        before. ``attempt`` counts from 0."""
        if attempt >= 2 and len(self._taken) == 2:
            self._taken.pop()
        assert self._taken, "nothing to go back to: no cycle has begun"
        self._taken[-1].restore()
        self._went_back = True
