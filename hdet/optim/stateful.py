"""Groups and states of an optimizer of a rule: made, checked, saved and loaded."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from hdet.rules import RULES, Facts

from . import group_checks as groups
from .masters import MASTER_KEYS, REPLICA_KEYS
from .moment_storage import Dtype, are_coded, dtype_for
from .state import Layout, replicas_for

# What a copy or a pickle keeps beside torch's parts.
_OWN = (
    "backend",
    "cautious_decay",
    "decay_at",
    "first_replica",
    "master_weights",
    "moment_dtype",
    "multipliers",
    "num_replicas",
    "seed",
    "stochastic_rounding",
    "zero_gradients",
    "_max_grad_norm",
    "_sets",
)


@functools.cache
def _torchs_defaults(name: str) -> dict[str, Any]:
    """What torch.optim's optimizer of that name, as it is installed, keeps in a group."""
    return getattr(torch.optim, name)([torch.nn.Parameter(torch.empty(0))]).defaults


class Stateful(Optimizer):
    """What is kept, without steps."""

    rule: ClassVar[str]
    """by its name in hdet.rules, of which all follows that optimizers differ in"""

    backend: str
    cautious_decay: bool
    decay_at: str
    first_replica: int
    """number of replica 0 among all replicas of the run, for stochastic rounding"""
    master_weights: str | None
    moment_dtype: Dtype
    multipliers: list[list[float]]
    num_replicas: int
    seed: int
    stochastic_rounding: bool
    _sets: dict[Tensor, list[Tensor]]
    """of each parameter, in all replicas; empty for one"""
    _held: dict[str, Any]
    """what load_state_dict takes past torch"""

    def _forget(self) -> None:
        """Nothing is planned or held for the next step."""
        self._held = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, with multipliers of 1.0.

        A parameter that it names twice is stepped once, where torch steps it twice.
        A refused group leaves the optimizer as it was."""
        name = f"parameter group {len(self.param_groups)}"
        if isinstance(param_group.get("params"), Iterator):  # read here and again by torch
            param_group["params"] = list(param_group["params"])
        self._check_group({**self.defaults, **param_group}, name)
        groups.check_params(param_group.get("params"), name)
        super().add_param_group(param_group)  # which warns of a parameter that is named twice
        group = self.param_groups[-1]
        once = dict(zip(group["params"], group.get("param_names", group["params"]), strict=True))
        group["params"] = list(once)
        if "param_names" in group:
            group["param_names"] = list(once.values())
        for row in self.multipliers:
            row.append(1.0)

    def _rule_of(self, group: dict[str, Any]) -> Facts:
        return RULES[self.rule]

    def _carried(self) -> dict[str, Any]:
        """What torch's optimizer keeps in a group and this class need not: states pass both
        ways."""
        rule = RULES[self.rule]
        kept = {} if rule.takes is None else _torchs_defaults(rule.takes)
        return {key: value for key, value in kept.items() if key not in rule.keys}

    def _check_group(self, group: dict[str, Any], name: str) -> None:
        groups.check_settings(group, RULES[self.rule], name, type(self).__name__)

    def _listed(self) -> list[Tensor]:
        return list(itertools.chain.from_iterable([group["params"] for group in self.param_groups]))

    def _layout(self, param: Tensor) -> Layout:
        """How the state of a parameter is stored."""
        return Layout(RULES[self.rule], dtype_for(self.moment_dtype, param), self.master_weights)

    def _replicas_of(self, param: Tensor) -> list[Tensor]:
        if self.num_replicas == 1:
            return [param]
        if param not in self._sets:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} has no co-resident copies: call "
                "set_replicas again for added groups"
            )
        return self._sets[param]

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in _OWN}
        return {
            **super().__getstate__(),
            **own,
            "multipliers": [list(row) for row in self.multipliers],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Called with a whole optimizer by pickle and copy, and with `state` and `param_groups` by
        # load_state_dict.
        for i, group in enumerate(state["param_groups"]):
            name = f"parameter group {i} of the loaded state"
            for key, value in {**self._carried(), "maximize": False}.items():
                group.setdefault(key, value)
            if self._carried().get("decoupled_weight_decay"):
                # as torch.optim.AdamW, which also takes the state of an Adam
                group["decoupled_weight_decay"] = True
            if absent := [key for key in self._rule_of(group).keys if key not in group]:
                raise ValueError(
                    f"{name} lacks {', '.join(absent)}: it is not that of a {type(self).__name__}"
                )
            self._check_group(group, name)
        if "defaults" not in state:
            state = {**state, "state": self._loaded_state(state["state"])}
        super().__setstate__(state)
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """See torch.optim.Optimizer.state_dict.

        Where there are replicas of a parameter that has not been stepped yet, its state is that
        of a first step: torch's optimizer needs a whole one, and a distributed checkpoint loads
        what is there to be filled."""
        handle = self.register_state_dict_post_hook(
            lambda _, saved: self._complete(saved), prepend=True
        )  # others see what it has made
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def _complete(self, saved: dict[str, Any]) -> None:
        """Completes the state that torch has packed, by the parameters' numbers."""
        grouped = [(param, group) for group in self.param_groups for param in group["params"]]
        for i, (param, group) in enumerate(grouped):
            state = saved["state"].get(i, {})
            if "replica_params" in state and state.keys() <= set(REPLICA_KEYS):
                sets, keeps = self._replicas_of(param), self._rule_of(group).keeps_moments(group)
                state = {**state, **self._layout(param).missing(state, sets, keeps)}
                saved["state"][i] = state
            if are_coded(state) or "remainder" in state:
                saved["state"][i] = self._layout(param).saved(state, param)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of this optimizer or of torch's.

        See torch.optim.Optimizer.load_state_dict.

        Moments and masters keep their precision, whatever the parameter's dtype is. Co-resident
        replicas are written in place. A state of one replica is everyone's, up to the parameters
        themselves. A state of another number of replicas is everyone's if they are equal, as after
        a converge (one of two float32 replicas is compared with the model, which is to be loaded
        before); from the middle of a cycle it is refused by ValueError.
        """
        held: dict[str, Any] = {}

        def hold(_: Optimizer, final: dict[str, Any]) -> dict[str, Any]:
            # torch would cast floating state to the parameter's dtype: it gets the groups, and
            # `_loaded_state` takes the rest.
            held.update(final)
            return {**final, "state": {}}

        handle = self.register_load_state_dict_pre_hook(
            hold
        )  # the last one: it sees what others have made of the state
        self._held = held
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self._held = {}

    def _loaded_state(self, state: dict[Any, Any]) -> dict[Any, Any]:
        """The held state by parameter, in this optimizer's layout.

        Nothing is changed before all is checked.
        """
        made = defaultdict(dict, state)
        copies: list[tuple[Tensor, Tensor]] = []
        saved = self._held.get("param_groups", [])
        names = itertools.chain.from_iterable(group["params"] for group in saved)
        params = dict(zip(names, self._listed(), strict=True)) if saved else {}
        dropped = False
        for key, values in self._held.get("state", {}).items():
            param = params.get(key)
            if param is None:  # not a parameter's: carried, as torch does
                made[key] = values
                continue
            layout = self._layout(param)
            entries = layout.loaded(values, param, f"parameter {key}")
            dropped |= layout.master_key(param) is None and any(
                name in entries for name in MASTER_KEYS
            )
            ours = self._sets.get(param, [param])[1:]
            copies += zip(ours, replicas_for(entries, param, ours), strict=False)
            made[param] = entries
        if dropped:
            warnings.warn(
                "the loaded state has master weights, this optimizer keeps none: they are dropped",
                stacklevel=4,
            )
        with torch.no_grad():
            for destination, source in copies:
                destination.copy_(source)
        return made
