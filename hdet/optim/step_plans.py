"""Plans, and what they were made for, to notice when that is no longer what the optimizer holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdet.kernels import StepOptions, StepPlan, StepSettings
from hdet.kernels.checks import check_gradients
from hdet.kernels.interface import Column
from hdet.rules import Facts, Kind
from hdet.tensors import dtensor as shards
from hdet.tensors import strides

from . import lists
from .masters import Watch, kept_masters, with_shards

Hyper = tuple[Any, ...]
"""of a group, numbers or tensors: Rule.values"""


_NUMBERS = frozenset((float, int, bool))
_REST = tuple(StepSettings._field_defaults.values())


@dataclass(frozen=True)
class Part:
    """The plan of one device."""

    plan: StepPlan
    places: list[int]
    """of its gradients among those of all parameters"""
    groups: list[int]
    """the parameter group of each of its settings"""
    device: torch.device
    watched: Sequence[Tensor] = ()
    """Tensors that the plan has views of.

    Their addresses and forms are compared in every step: an assignment to `.data` does not reach a
    view.
    """
    in_turns: bool = False
    """Steps some of its tensors after the others: settings and gradients are checked outside,
    before the first, and the norm is taken there."""


class Member(NamedTuple):
    """A parameter that is planned for."""

    group: int
    sets: list[Tensor]
    """the parameter in all replicas"""
    state: dict[str, Any]


class Planned:
    """The plans of all steps, one for each device, and everything they rely on.

    They are made for the parameters that have had a gradient (`members`, by the parameter's place).
    A step leaves those of them alone that have none. `entries`: what is to be added to states once
    a step has been done, to those in `container`. `kinds`: of each group, what its plan relies on.
    `watch`: over all masters.
    """

    def __init__(
        self,
        params: list[Tensor],
        sizes: list[int],
        kinds: list[Kind],
        parts: list[Part],
        members: Mapping[int, Member],
        entries: Mapping[int, dict[str, Any]],
        watch: Watch,
        container: dict[Tensor, dict[str, Any]],
    ) -> None:
        self.params, self.sizes, self.kinds, self.parts = params, sizes, kinds, parts
        self.entries, self.places, self.container = entries, list(members), container
        self.outside = set(range(len(params))).difference(members)
        self.sharded = any(map(shards.is_sharded, params))
        self._orders = _orders(params, self.places)
        self.watch = watch
        self._watched = list(chain.from_iterable(part.watched for part in parts))
        self._forms = lists.forms(self._lying(self._watched))
        self._addresses = lists.note_addresses(self._relied_on(params))
        self._usual = lists.UsualGradients(self._as_gradients())
        self.in_turns = any(part.in_turns for part in parts)
        self.contents: list[Any] | None = None  # of `container`, once a step has been done
        self.copies_gradients = False
        """Has a gradient been found that has to be copied first?"""
        self.hypers: list[Hyper] = []
        self.multipliers: list[list[float]] = []
        self.settings: list[tuple[StepSettings, ...]] = []
        # what steps write to, if all have gradients; of each place a slice
        self.writes: list[Tensor] = []
        self._slices: dict[int, slice] = {}
        for i, member in members.items():
            start = len(self.writes)
            self.writes += with_shards(
                [tensor for tensor in member.sets if not tensor.is_inference()]
            )
            self._slices[i] = slice(start, len(self.writes))
        self._choose([])

    def _relied_on(self, params: list[Tensor]) -> list[Tensor]:
        """What must lie where it lay: parameters that are planned for, and what is watched."""
        chosen = params if not self.outside else [params[i] for i in self.places]
        return self._lying(chosen + self._watched if self._watched else chosen)

    def _lying(self, tensors: list[Tensor]) -> list[Tensor]:
        """As they lie on this rank."""
        return shards.locals_of(tensors) if self.sharded else tensors

    def _as_gradients(self) -> list[Tensor]:
        """The parameters as their gradients must be."""
        return [
            strides.laid(shards.local(param), self._orders.get(i))
            for i, param in enumerate(self.params)
        ]

    def _choose(self, absent: list[int]) -> None:
        """The next steps find no gradient at these places."""
        self.absent, without = absent, set(absent)
        chosen = bytearray(b"\1") * len(self.writes)
        for i in without.intersection(self._slices):
            place = self._slices[i]
            chosen[place] = bytes(place.stop - place.start)
        self.written = list(compress(self.writes, chosen)) if absent else self.writes
        self.watch.expect(self.written)
        self.active = [
            (n, part) for n, part in enumerate(self.parts) if not without.issuperset(part.places)
        ]

    def _write_back(self) -> None:
        """The first step has been done: what was made for it goes into the optimizer's state."""
        add_entries(self.container, {self.params[i]: made for i, made in self.entries.items()})
        self.entries = {}
        self.contents = lists.contents(self.container)

    def holds(
        self,
        container: dict[Tensor, dict[str, Any]],
        params: list[Tensor],
        sizes: list[int],
        kinds: list[Kind],
    ) -> bool:
        """Is everything as it was: the same tensors, at the same places, in the same groups?"""
        return (
            lists.same(params, self.params)
            and sizes == self.sizes
            and kinds == self.kinds
            and container is self.container
            and self.contents is not None
            and lists.same_contents(container, self.contents)
            and self._addresses.same(self._relied_on(params))
            and lists.forms(self._lying(self._watched)) == self._forms
        )

    def own(self, gradients: list[Tensor | None], absent: list[int]) -> list[Tensor | None]:
        """The gradients of the next step, of all parameters, as they lie on this rank and in the
        order of their parameters' memory; at the places `absent` there are none."""
        if absent != self.absent:
            self._choose(absent)
        if self.sharded:
            pairs = enumerate(zip(gradients, self.params, strict=True))
            gradients = [
                None if g is None else shards.gradient_on(g, p, f"the gradient of parameter {i}")
                for i, (g, p) in pairs
            ]
        return self._laid(gradients) if self._orders else gradients

    def step(
        self,
        gradients: list[Tensor | None],
        settings: Sequence[Sequence[Any]],
        options: Callable[[torch.device], StepOptions],
    ) -> None:
        """`gradients` as `own` has made them.

        A part's settings are what its plan takes, StepSettings of the kernels'.
        """
        self._check_parts(gradients, options)
        for turn, (n, part) in enumerate(self.active):
            if turn == 0 and part.in_turns:
                self._wrote()  # it may run out of memory half-way: what it has moved is kept
            every = len(part.places) == len(gradients)
            chosen = gradients if every else [gradients[i] for i in part.places]
            part.plan.step(chosen, settings[n], options(part.device))
            if turn == 0 and not part.in_turns:
                # a later part fails for want of memory only; what the first has written stays
                self._wrote()
        if self.contents is None:  # there was no gradient
            self._write_back()
        if self.in_turns:
            self.watch.refresh()

    def _wrote(self) -> None:
        torch.autograd.graph.increment_version(
            self.written
        )  # what a backward pass has saved of them is no longer valid
        self.watch.wrote()
        if self.contents is None:
            self._write_back()

    def _check_parts(
        self, gradients: list[Tensor | None], options: Callable[[torch.device], StepOptions]
    ) -> None:
        """A kernel's plan checks its own gradients.

        Where others step, too, all are checked here before the first plan writes.
        """
        parts = [part for _, part in self.active]
        if not parts or (len(parts) == 1 and not parts[0].in_turns):
            return
        if options(parts[0].device).max_norm != 0:
            devices = ", ".join(dict.fromkeys(str(part.device) for part in parts))
            raise ValueError(
                f"max_grad_norm needs all parameters on one device, they are on {devices}: use "
                "torch.nn.utils.clip_grad_norm_"
            )
        self.check(gradients)

    def check(self, gradients: list[Tensor | None]) -> None:
        """Raises ValueError or TypeError for gradients that no step can use."""
        if self._usual.are(gradients):
            return
        try:
            check_gradients(gradients, self._as_gradients())
        except (TypeError, ValueError):
            self._usual.forget()
            raise

    def _laid(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """In the order in which their parameters lie in memory."""
        made = list(gradients)
        for i, order in self._orders.items():
            gradient = gradients[i]
            if gradient is None or gradient.layout != torch.strided or gradient.dim() != len(order):
                continue  # what is wrong with it will be said
            made[i] = gradient.permute(order)
        return made

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
                for kind, hyper, column in zip(self.kinds, hypers, columns, strict=True)
            ]
            made.append(tuple(by_group[group] for group in part.groups))
        self.hypers = hypers if plain else []
        self.multipliers, self.settings = [list(row) for row in multipliers], made
        return made


def _orders(params: Sequence[Tensor], places: Iterable[int]) -> dict[int, strides.Order]:
    """In which order those lie whose dimensions are not in order."""
    found = {i: strides.memory_order(shards.local(params[i])) for i in places}
    return {i: order for i, order in found.items() if order is not None}


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


def numbered(groups: Sequence[int]) -> tuple[list[int], list[int]]:
    """Groups numbered from 0 without a gap: the number of each entry, and the group of each
    number."""
    numbers = {group: number for number, group in enumerate(sorted(set(groups)))}
    return [numbers[group] for group in groups], list(numbers)


def by_device(params: Sequence[Tensor], members: Sequence[int]) -> dict[torch.device, list[int]]:
    found: dict[torch.device, list[int]] = {}
    for i in members:
        found.setdefault(params[i].device, []).append(i)
    return found


def column(states: Sequence[Mapping[str, Any]], key: str) -> Column:
    """One entry for each state."""
    return [state.get(key) for state in states]


def master_columns(states: Sequence[Mapping[str, Any]], num_replicas: int) -> list[Column] | None:
    """K lists of masters, or None where there are none."""
    kept = [kept_masters(state) for state in states]
    if not any(kept):
        return None
    return [[masters[k] if masters else None for masters in kept] for k in range(num_replicas)]


def scalar(value: Tensor | float | None, device: torch.device) -> Tensor | None:
    """What torch's GradScaler leaves, where and as the kernels read it."""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        return torch.tensor(float(value), dtype=torch.float32, device=device)
    return value.to(device=device, dtype=torch.float32, non_blocking=True)
