"""Plans, and what they were made for, to notice when that is no longer what the optimizer holds."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from hdet.kernels import StepOptions, StepPlan, StepSettings
from hdet.kernels.spec.arguments import check_gradients
from hdet.kernels.spec.interface import Column
from hdet.tensors import dtensor as shards

from . import lists
from .lists import VersionWatch
from .state import REPLICA_KEYS, adopt, kept_masters, state_sets

Hyper = tuple[Any, ...]
"""lr, beta1, beta2, eps, weight_decay, dampening, nesterov, maximize of a group: the fields of StepSettings, numbers or tensors"""

_NUMBERS = frozenset((float, int, bool))


class Watch(VersionWatch):
    """Notices in-place changes by others to parameters that have float32 masters.

    Masters are written by `check` and `adopt` alone; the first check looks at all of them. A DTensor and its shard count apart, and
    both are watched; a shard may move.
    """

    def __init__(self, stepped: Iterable[tuple[Tensor, dict[str, Any]]], others: Iterable[tuple[Tensor, dict[str, Any]]]) -> None:
        """Parameters and their states: those that the plan's steps write to, and those they leave alone."""
        ours = [pair for param, state in stepped for pair in _watched(param, state)]
        self.pairs = [*ours, *(pair for param, state in others for pair in _watched(param, state))]
        self.sharded = [param for param, _ in self.pairs if shards.is_sharded(param)]
        super().__init__([], len(with_shards([param for param, _ in ours])))
        self._look()

    def _look(self) -> None:
        self.params = with_shards([param for param, _ in self.pairs])
        self.addresses = lists.addresses(shards.locals_of(self.sharded))

    def check(self) -> None:
        if self.params and (self.written() or lists.addresses(shards.locals_of(self.sharded)) != self.addresses):
            for param, master in self.pairs:
                adopt(param, master)
            self._look()
            self.refresh()


@dataclass(frozen=True)
class Part:
    """The plan of one device."""

    plan: StepPlan
    places: list[int]
    """of its gradients among those of all parameters"""
    groups: list[int]
    """the parameter group of each row"""
    device: torch.device


class Planned:
    """The plans of one step, one for each device, and everything they rely on.

    `written`: the parameters in all their replicas; `watch`: over all masters.
    `entries` and `states`, by the parameter's place: what is to be added to its state, and the state with it.
    """

    def __init__(
        self,
        params: list[Tensor],
        sizes: list[int],
        absent: list[bool],
        flags: list[bool],
        parts: list[Part],
        written: list[Tensor],
        entries: Mapping[int, dict[str, Any]],
        states: Mapping[int, dict[str, Any]],
        watch: VersionWatch,
    ) -> None:
        self.params, self.sizes, self.absent, self.flags, self.parts = params, sizes, absent, flags, parts
        self.entries, self.places = entries, list(states)
        self.whole = len(parts) == 1 and len(self.places) == len(params)
        self.sharded = any(map(shards.is_sharded, params))
        self.written = with_shards([tensor for tensor in written if not tensor.is_inference()])
        self.addresses = self._addresses(params)
        keys = sorted({key for state in states.values() for key in state if key not in REPLICA_KEYS})
        self.columns = {key: [state.get(key) for state in states.values()] for key in keys}
        self.watch = watch
        self.hypers: list[Hyper] = []
        self.multipliers: list[list[float]] = []
        self.settings: list[tuple[StepSettings, ...]] = []

    def _chosen(self, items: list[Any]) -> list[Any]:
        return items if len(self.places) == len(items) else [items[i] for i in self.places]

    def _addresses(self, params: list[Tensor]) -> list[int]:
        chosen = self._chosen(params)
        return lists.addresses(shards.locals_of(chosen) if self.sharded else chosen)

    def write_back(self, container: dict[Tensor, dict[str, Any]]) -> None:
        """The first step has been done: what was made for it goes into the optimizer's state."""
        for i, made in self.entries.items():
            state = container.setdefault(self.params[i], {})
            state.update(made)
            for key in [key for key, value in made.items() if value is None]:
                del state[key]
        self.entries = {}
        self.container, self.values = container, list(container.values())
        self.states = [container[self.params[i]] for i in self.places]

    def fits(
        self, container: Mapping[Tensor, dict[str, Any]], params: list[Tensor], sizes: list[int], absent: list[bool], flags: list[bool]
    ) -> bool:
        """Is a step on these parameters the step that was planned: the same tensors, at the same places, in the same groups?"""
        return (
            lists.same(params, self.params)
            and absent == self.absent
            and sizes == self.sizes
            and flags == self.flags
            and container is self.container
            and lists.same(list(container.values()), self.values)
            and all(lists.same_items(self.states, key, column) for key, column in self.columns.items())
            and self._addresses(params) == self.addresses
        )

    def step(
        self, gradients: list[Tensor], settings: list[tuple[StepSettings, ...]], options: Callable[[torch.device], StepOptions]
    ) -> None:
        """`gradients` of all parameters, as they lie on this rank."""
        if len(self.parts) > 1:
            self._check_parts(gradients, options)
        for part, rows in zip(self.parts, settings, strict=True):
            chosen = gradients if self.whole else [gradients[i] for i in part.places]
            part.plan.step(chosen, rows, options(part.device))
        torch.autograd.graph.increment_version(self.written)  # what a backward pass has saved of them is no longer valid
        self.watch.wrote()

    def _check_parts(self, gradients: list[Tensor], options: Callable[[torch.device], StepOptions]) -> None:
        """A plan checks its own gradients; all are checked here before the first plan writes."""
        if options(self.parts[0].device).max_norm != 0:
            devices = ", ".join(str(part.device) for part in self.parts)
            raise ValueError(f"max_grad_norm needs all parameters on one device, they are on {devices}: use torch.nn.utils.clip_grad_norm_")
        for part in self.parts:
            check_gradients([gradients[i] for i in part.places], shards.locals_of([self.params[i] for i in part.places]))

    def settings_of(self, hypers: list[Hyper], multipliers: list[list[float]], decay_at_base: bool) -> list[tuple[StepSettings, ...]]:
        """One entry for each row of each part; the very same objects as in the last step if nothing has changed."""
        plain = _NUMBERS.issuperset(map(type, chain.from_iterable(hypers)))  # a tensor may change in place
        if plain and hypers == self.hypers and multipliers == self.multipliers:
            return self.settings
        columns = [tuple(map(float, column)) for column in zip(*multipliers, strict=True)]
        made = []
        for part in self.parts:
            by_group = [_settings(hyper, column, decay_at_base, part.device) for hyper, column in zip(hypers, columns, strict=True)]
            made.append(tuple(by_group[group] for group in part.groups))
        self.hypers = hypers if plain else []
        self.multipliers, self.settings = [list(row) for row in multipliers], made
        return made


def with_shards(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, and the shards of those that are DTensors: both have a version, and a write counts up one of them."""
    return [*tensors, *(shards.local(tensor) for tensor in tensors if shards.is_sharded(tensor))]


def _settings(hyper: Hyper, multipliers: tuple[float, ...], decay_at_base: bool, device: torch.device) -> StepSettings:
    lr, beta1, beta2, eps, weight_decay, dampening, nesterov, maximize = hyper
    if not isinstance(lr, Tensor) or lr.is_cpu or lr.device != device:
        lr = float(lr)
    elif lr.dtype != torch.float32:  # else the tensor itself: the kernels read it there, and know it again
        lr = lr.detach().to(torch.float32)
    beta1, beta2, eps, weight_decay, dampening = map(float, (beta1, beta2, eps, weight_decay, dampening))
    return StepSettings(lr, multipliers, beta1, beta2, eps, weight_decay, dampening, bool(nesterov), bool(maximize), decay_at_base)


def _watched(param: Tensor, state: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """The parameter's sets that have a float32 master, with it."""
    pairs = zip(state_sets(state, param), kept_masters(state), strict=False)
    return [(tensor, master) for tensor, master in pairs if master.dtype == torch.float32 and not tensor.is_inference()]


def number_rows(groups: Sequence[int], *numbers: Sequence[float]) -> tuple[list[int], list[int]]:
    """The row of each tensor, and its first tensor: one for each group and count (and scale), as a tensor may have missed steps."""
    rows: dict[tuple[float, ...], int] = {}
    row_of = [rows.setdefault(key, len(rows)) for key in zip(groups, *numbers, strict=True)]
    return row_of, [row_of.index(row) for row in range(len(rows))]


def numbers(scalars: Sequence[Tensor]) -> list[float]:
    """0-d tensors of one device as numbers, in one transfer."""
    return torch.stack(list(scalars)).tolist() if scalars else []


def by_device(params: Sequence[Tensor], members: Sequence[int]) -> dict[torch.device, list[int]]:
    found: dict[torch.device, list[int]] = {}
    for i in members:
        found.setdefault(params[i].device, []).append(i)
    return found


def are_none(items: Sequence[object]) -> list[bool]:
    return list(map(operator.is_, items, repeat(None)))


def column(states: Sequence[Mapping[str, Any]], key: str) -> Column | None:
    """One entry for each state, or None where no state has any."""
    found = [state.get(key) for state in states]
    return found if any(item is not None for item in found) else None


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
        return torch.tensor(float(value), device=device)
    return value.to(device=device, dtype=torch.float32, non_blocking=True)
