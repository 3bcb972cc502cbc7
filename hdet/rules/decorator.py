"""What is known of an update rule, said once: by its decorator and its function.

The optimizer's class, its arguments, checks and states, the kernels' texts and the rows of all
tables of tests follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from .trace import Function, Trace, trace

if TYPE_CHECKING:
    import torch


class StepSettings(NamedTuple):
    """Hyperparameters of one group for one step, as the rule's torch optimizer understands them.

    The rate of replica k is lr * multipliers[k] (Eq. 2). Decoupled decay (`DECOUPLED`) acts at the
    replica's rate, as stock AdamW decays at the rate it steps with, or at lr where `decay_at_base`
    is set; coupled decay (`COUPLED`) is added to the gradient. `lr` may be a one-element float32
    tensor on the plan's device, which is read there, without waiting.
    """

    lr: float | torch.Tensor
    multipliers: Sequence[float] = (1.0,)
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    decay_at_base: bool = False
    cautious_decay: bool = False
    """decoupled decay acts on those elements alone that the direction brings nearer to 0"""


TYPES = {name: type(default) for name, default in StepSettings._field_defaults.items()}


@dataclass(frozen=True, eq=False)
class Facts:
    """What is known of a rule beside its mathematics; `rule` explains it."""

    moments: tuple[str, ...]
    settings: Mapping[str, Any]
    takes: str | None = None
    kept_if: str | None = None

    @property
    def signed(self) -> tuple[bool, ...]:
        """Of each moment: has it a sign?"""
        return tuple(map(is_signed, self.moments))

    @property
    def required(self) -> tuple[str, ...]:
        """What a loaded state must have."""
        return self.moments if self.kept_if is None else ()

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """What a parameter group must have for a step: settings that are fields of StepSettings, or
        "betas", of which these have one each. All other settings must be off."""
        known = ("betas", *StepSettings._fields)
        return tuple(key for key in self.settings if key in known)

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """What `values` reads, by the names of StepSettings."""
        betas = [f"beta{i + 1}" for i in range(len(self.settings.get("betas", ())))]
        return (*betas, *(key for key in self.keys if key != "betas"), "maximize")

    @cached_property
    def values(self) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
        """Of a parameter group, as they are: numbers or tensors, in the order of `fields`."""
        plain = itemgetter(*(key for key in self.keys if key != "betas"), "maximize")
        if "betas" not in self.keys:
            return plain
        return lambda group: (*group["betas"], *plain(group))

    def keeps_moments(self, group: Mapping[str, Any]) -> bool:
        return self.kept_if is None or bool(group[self.kept_if] != 0)

    def check(self, values: Mapping[str, Any], whose: str) -> None:
        """Raises ValueError for a hyperparameter out of range. NaN fails every comparison.

        values: of StepSettings, as numbers; those of `fields` are looked at.
        """
        for name in self.fields:
            if name in values and (wrong := _why_not(name, values[name])):
                raise ValueError(f"{name}={values[name]} of {whose} must be {wrong}")
        momentum, dampening = values.get("momentum"), values.get("dampening")
        if values.get("nesterov") and (momentum == 0 or dampening != 0):
            raise ValueError(
                f"nesterov=True of {whose} needs momentum > 0 and dampening 0, got {momentum} and "
                f"{dampening}"
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class Rule(Facts):
    """An update rule."""

    name: str
    optimizer: str
    function: Function
    trace: Trace

    @property
    def coupled(self) -> bool:
        """Decay is part of the gradient, so that replicas with different parameters could not share
        moments."""
        return self.trace.couples

    @property
    def required(self) -> tuple[str, ...]:
        counts = self.trace.counts and self.kept_if is None
        return ("step", *super().required) if counts else super().required


def is_signed(moment: str) -> bool:
    """By a moment's name: averages of squares have no sign, and are rounded stochastically in
    bfloat16."""
    return not moment.endswith("_sq")


def _why_not(name: str, value: float) -> str | None:
    """What a number that is out of range must be."""
    if name.startswith("beta"):
        return None if 0 <= value < 1 else "in [0, 1)"
    if name == "dampening":
        return None if math.isfinite(value) else "finite"
    return None if 0 <= value < math.inf else "finite and not negative"


RULES: dict[str, Rule] = {}
"""by name, in the order of csrc/core/rules.h: Rule"""


def rule(
    optimizer: str,
    *,
    moments: tuple[str, ...] = (),
    takes: str | None = None,
    kept_if: str | None = None,
    like: Function | None = None,
    **settings: Any,
) -> Callable[[Function], Function]:
    """Enters a rule. Its function's docstring is that of the optimizer.

    Args:
        optimizer: the name of its class.
        moments: their names in a state. One that ends in "_sq" is never negative.
        takes: the optimizer of torch.optim whose options and states this one takes.
        kept_if: the setting without which, at 0, no moment is kept.
        like: another rule, from which all comes that is not said.
        settings: defaults of the optimizer's arguments, in their order: "betas", or fields of
            StepSettings. Others must be off: they stand where torch's optimizer has them.
    """

    def enter(function: Function) -> Function:
        facts: dict[str, Any] = {"moments": moments, "settings": settings}
        facts |= {"takes": takes, "kept_if": kept_if}
        if like is not None:
            base = RULES[like.__name__]
            facts = {key: x or getattr(base, key) for key, x in facts.items()}
            facts["settings"] = {**base.settings, **settings}
        found = trace(function, len(facts["moments"]))
        name = function.__name__
        RULES[name] = Rule(name=name, optimizer=optimizer, function=function, trace=found, **facts)
        return function

    return enter
