"""Plans of steps, and what they were made for, to notice when that is no longer what the optimizer
holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdet.kernels import StepOptions, StepPlan, StepSettings, StepTensors
from hdet.kernels.checks import UnusualMemory, check_gradients_apart
from hdet.kernels.ema import WeightAverage
from hdet.kernels.interface import Column
from hdet.rules import Facts, Kind
from hdet.tensors import dtensor as shards
from hdet.tensors import strides

from . import lists
from .finish import ShardedClip
from .lists import Gradients
from .masters import EMA_KEYS, Watch, kept_beside, kept_masters, state_sets, with_shards
from .moment_storage import scale_key

Hyper = tuple[Any, ...]
"""of a group, numbers or tensors: Rule.values"""

_NUMBERS = frozenset((float, int, bool))
_REST = tuple(StepSettings._field_defaults.values())


class Member(NamedTuple):
    """A parameter that is planned for, as kernels see it: its shard on this rank, with dimensions
    in the order of its memory."""

    place: int
    """among the parameters of the plans"""
    group: int
    param: Tensor
    """itself"""
    order: strides.Order | None
    sets: list[Tensor]
    """in all replicas"""
    state: dict[str, Any]
    """with what a first step adds"""
    number: int
    """among all parameters"""

    @property
    def shape(self) -> torch.Size:
        return self.sets[0].shape


def member(
    place: int, group: int, sets: Sequence[Tensor], state: Mapping[str, Any], number: int
) -> Member:
    """Of a parameter in all replicas, itself first, and its state."""
    param = sets[0]
    own, order = shards.locals_of(sets), strides.memory_order(shards.local(param))
    laid = [strides.laid(tensor, order) for tensor in own]
    local = strides.laid_state(shards.local_state(state, param), own[0])
    return Member(place, group, param, order, laid, local, number)


def step_tensors(
    rule: str,
    members: Sequence[Member],
    groups: Sequence[int],
    moments: Sequence[str],
    averages: Sequence[WeightAverage],
    **more: Any,
) -> StepTensors:
    """What a plan for these works on. `moments`: their names in states."""
    states = [member.state for member in members]
    replicas = range(len(members[0].sets))
    return StepTensors(
        rule,
        params=[[member.sets[k] for member in members] for k in replicas],
        groups=groups,
        steps=[state["step"] for state in states],
        moments=[[state.get(key) for state in states] for key in moments],
        masters=master_columns(states, len(replicas)),
        ids=[member.number for member in members],
        scales=[[state.get(scale_key(key)) for state in states] for key in moments],
        averages=averages,
        emas=[
            [[kept_beside(state, key)[k] for state in states] for k in replicas]
            for key in EMA_KEYS[: len(averages)]
        ],
        ema_steps=[state["ema_step"] for state in states] if averages else (),
        **more,
    )


def master_columns(states: Sequence[Mapping[str, Any]], num_replicas: int) -> list[Column] | None:
    """K lists of masters, or None where there are none."""
    kept = [kept_masters(state) for state in states]
    if not any(kept):
        return None
    return [[masters[k] if masters else None for masters in kept] for k in range(num_replicas)]


@dataclass(frozen=True)
class Part:
    """The plan of one device."""

    plan: StepPlan
    places: list[int]
    """of its gradients among those of all parameters"""
    groups: list[int]
    """the parameter group of each of its settings"""
    device: torch.device
    in_turns: bool = False
    """Steps some of its tensors after the others: settings and gradients are checked outside,
    before the first, and the norm is taken there."""


class Norms(NamedTuple):
    """Where a step has left the norms of its gradients."""

    source: Any
    """a StepPlan, ShardedClip or GradientRelease"""
    places: Sequence[int]
    """of its norms among all parameters"""
    absent: list[int]
    """the places of those that had no gradient"""


class Planned:
    """The plans of all steps, one for each device, and everything they rely on.

    They are made for the parameters that have had a gradient, by place: `members`. A step leaves
    those of them alone that have none. `groups`: of each its size, and what plans rely on.
    `states`: of all parameters that have one, with `entries`, which go into `container` once a
    step has been done. `numbers`: of the parameters in messages.
    """

    def __init__(
        self,
        params: list[Tensor],
        groups: list[tuple[int, Kind]],
        parts: list[Part],
        members: Mapping[int, Member],
        states: Mapping[int, dict[str, Any]],
        entries: Mapping[Tensor, dict[str, Any]],
        container: dict[Tensor, dict[str, Any]],
        numbers: Sequence[int],
    ) -> None:
        self.params, self.groups, self.parts, self.numbers = params, groups, parts, numbers
        self.places, self.entries, self.container = list(members), entries, container
        self.outside = set(range(len(params))).difference(members)
        self.watch = Watch((params[i], state) for i, state in states.items())
        self._noted: lists.NotedObjects | None = None  # once a step has been done
        self.copies_gradients = False
        """Has a gradient been found that has to be copied first?"""
        self.hypers: list[Hyper] = []
        self.multipliers: list[list[float]] = []
        self.settings: list[tuple[StepSettings, ...]] = []

        in_turns = [i for part in parts if part.in_turns for i in part.places]
        self.in_turns, self.sharded = bool(in_turns), any(map(shards.is_sharded, params))
        self.clip = ShardedClip(params) if in_turns or self.sharded else None
        self._orders = {i: m.order for i, m in members.items() if m.order is not None}
        laid = [strides.laid(shards.local(p), self._orders.get(i)) for i, p in enumerate(params)]
        self.check = lists.GradientCheck(laid, numbers)

        watched = set(map(id, with_shards(self.watch.params)))
        self._writes = [
            (i, tensor)
            for i in members
            for tensor in with_shards(state_sets(states[i], params[i]))
            if not tensor.is_inference()
        ]
        self._watched_writes = [i for i, tensor in self._writes if id(tensor) in watched]
        self._choose([])

    def _objects(self, container: dict[Tensor, dict[str, Any]], params: list[Tensor]) -> list[Any]:
        """What plans rely on. Shards may move and be replaced."""
        return [params, container, shards.locals_of(self._shards)]

    def _choose(self, absent: list[int]) -> None:
        """The next steps find no gradient at these places."""
        self.absent, without = absent, set(absent)
        self._written = [tensor for i, tensor in self._writes if i not in without]
        self._num_watched = sum(i not in without for i in self._watched_writes)
        self.active = [
            (n, part) for n, part in enumerate(self.parts) if not without.issuperset(part.places)
        ]

    def holds(
        self,
        container: dict[Tensor, dict[str, Any]],
        params: list[Tensor],
        groups: list[tuple[int, Kind]],
    ) -> bool:
        """Is everything as it was: the same tensors, in the same memory, in the same groups?"""
        return (
            groups == self.groups
            and self._noted is not None
            and self._noted.same(self._objects(container, params))
        )

    def step(
        self,
        gradients: Gradients,
        absent: list[int],
        settings: Sequence[Any],
        options: Callable[[torch.device], StepOptions],
    ) -> Gradients:
        """A step on the gradients of all parameters; at the places `absent` there are none.

        A part's settings are what its plan takes, StepSettings of the kernels'. Returns the
        gradients that the kernels have read.
        """
        if absent != self.absent:
            self._choose(absent)
        own = self._own(gradients)
        if not self.copies_gradients:
            try:
                self._step(own, settings, options)
                return own
            except UnusualMemory:  # torch's optimizers take such gradients, too
                self.copies_gradients = True
        copied = [None if one is None else one.resolve_neg().contiguous() for one in own]
        self._step(copied, settings, options)
        return copied

    def _own(self, gradients: Gradients) -> Gradients:
        """As they lie on this rank, in the order in which their parameters lie in memory."""
        if self.sharded:
            gradients = [
                None if g is None else shards.gradient_on(g, p, f"the gradient of parameter {i}")
                for i, g, p in zip(self.numbers, gradients, self.params, strict=True)
            ]
        if not self._orders:
            return list(gradients) if self.in_turns else gradients
        made = list(gradients)
        for i, order in self._orders.items():
            gradient = gradients[i]
            if gradient is None or gradient.layout != torch.strided or gradient.dim() != len(order):
                continue  # what is wrong with it will be said
            made[i] = gradient.permute(order)
        return made

    def _step(
        self,
        gradients: Gradients,
        settings: Sequence[Any],
        options_on: Callable[[torch.device], StepOptions],
    ) -> None:
        options = {part.device: options_on(part.device) for _, part in self.active}
        takes_norm = any(one.max_norm != 0 for one in options.values())
        if takes_norm and len(options) > 1:
            devices = ", ".join(map(str, options))
            raise ValueError(
                f"max_grad_norm needs all parameters on one device, they are on {devices}: use "
                "torch.nn.utils.clip_grad_norm_"
            )
        # A kernel's plan checks its own gradients. Where others step, too, all are checked here
        # before the first plan writes.
        if self.in_turns or len(self.active) > 1 or (takes_norm and self.clip is not None):
            self.check(gradients)
            if any(one.zero_gradients for one in options.values()):
                check_gradients_apart(gradients, self.numbers)
        if takes_norm and self.clip is not None:
            options = {device: self.clip(gradients, one) for device, one in options.items()}
        for turn, (n, part) in enumerate(self.active):
            if turn == 0 and part.in_turns:
                self._wrote()  # it may run out of memory half-way: what it has moved is kept
            chosen = lists.chosen(gradients, part.places)
            part.plan.step(chosen, settings[n], options[part.device])
            if turn == 0 and not part.in_turns:
                # a later part fails for want of memory only; what the first has written stays
                self._wrote()
        if self._noted is None:  # there was no gradient
            self._write_back()
        if self.in_turns:
            self.watch.refresh()

    def _wrote(self) -> None:
        lists.bump_versions(self._written)
        self.watch.wrote(self._num_watched)
        if self._noted is None:
            self._write_back()

    def _write_back(self) -> None:
        """The first step has been done: what was made for it goes into the optimizer's state."""
        add_entries(self.container, self.entries)
        self.entries = {}
        found = lists.objects_in([self.params, self.container]) if self.sharded else ()
        self._shards = [tensor for tensor in found if shards.is_sharded(tensor)]
        self._noted = lists.NotedObjects(self._objects(self.container, self.params))

    def norms(self) -> Norms | None:
        """Of the step that has been done, with a norm."""
        if not self.active:
            return None
        if self.clip is not None:
            return Norms(self.clip, range(len(self.params)), self.absent)
        part = self.active[0][1]
        return Norms(part.plan, part.places, self.absent)

    def settings_of(
        self, hypers: list[Hyper], multipliers: list[list[float]], decay: tuple[bool, bool]
    ) -> list[tuple[StepSettings, ...]]:
        """One entry for each group of each part; the very same objects as in the last step if
        nothing has changed. `decay`: at the base rate? cautious?"""
        # a tensor may change in place
        plain = _NUMBERS.issuperset(map(type, chain.from_iterable(hypers)))
        if plain and hypers == self.hypers and multipliers == self.multipliers:
            return self.settings
        columns = [tuple(map(float, column)) for column in zip(*multipliers, strict=True)]
        made = []
        for part in self.parts:
            by_group = [
                _settings(kind.rule, hyper, column, decay, part.device)
                for (_, kind), hyper, column in zip(self.groups, hypers, columns, strict=True)
            ]
            made.append(tuple(by_group[group] for group in part.groups))
        self.hypers = hypers if plain else []
        self.multipliers, self.settings = [list(row) for row in multipliers], made
        return made


def with_entries(state: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """A state with what is made for a first step; None: the entry goes."""
    return {key: value for key, value in {**state, **entries}.items() if value is not None}


def add_entries(
    container: dict[Tensor, dict[str, Any]], entries: Mapping[Tensor, Mapping[str, Any]]
) -> None:
    """What has been made for a first step goes into states; None: the entry goes."""
    for param, made in entries.items():
        state = container.setdefault(param, {})
        state.update(made)
        for key in [key for key, value in made.items() if value is None]:
            del state[key]


def _settings(
    rule: Facts,
    hyper: Hyper,
    multipliers: tuple[float, ...],
    decay: tuple[bool, bool],
    device: torch.device,
) -> StepSettings:
    if len(hyper) != len(rule.fields):
        raise ValueError(f"betas must be as many numbers as {len(rule.settings['betas'])}")
    lr = hyper[0]
    if not isinstance(lr, Tensor) or lr.is_cpu or lr.device != device:
        lr = float(lr)
    elif lr.dtype != torch.float32:  # else itself: kernels read it there, and know it again
        lr = lr.detach().to(torch.float32)
    return StepSettings(lr, multipliers, *rule.arrange((*map(float, hyper[1:]), *decay, *_REST)))


def by_device(params: Sequence[Tensor], members: Iterable[int]) -> dict[torch.device, list[int]]:
    found: dict[torch.device, list[int]] = {}
    for i in members:
        found.setdefault(params[i].device, []).append(i)
    return found
