"""What is known of an update rule, said once: by its decorator and its function.

The optimizer's class, its arguments, checks and states, the kernels' texts and the rows of all
tables of tests follow from it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter, itemgetter
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
    beta3: float = 0.0
    alpha: float = 0.0
    t_alpha: float = 0.0
    t_beta3: float = 0.0
    gamma: float = 0.0
    average: float = 0.0
    """schedule-free: this step's share"""


@dataclass(frozen=True, eq=False)
class Facts:
    """What is known of a rule beside its mathematics; `rule` explains it."""

    moments: tuple[str, ...]
    settings: Mapping[str, Any]
    takes: str | None = None
    kept_if: str | None = None
    exact: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()
    first_step: int = 1

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
        """What `values` reads, by the names of StepSettings; lr is the first."""
        betas = [f"beta{i + 1}" for i in range(len(self.settings.get("betas", ())))]
        return (*(key for key in self.keys if key != "betas"), "maximize", *self.computed, *betas)

    @cached_property
    def values(self) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
        """Of a parameter group, as they are: numbers or tensors, in the order of `fields`."""
        plain = itemgetter(*(key for key in self.fields if not key.startswith("beta")))
        if "betas" not in self.keys:
            return plain
        return lambda group: (*plain(group), *group["betas"])

    @cached_property
    def read(self) -> Callable[[StepSettings], tuple[Any, ...]]:
        """The same of StepSettings."""
        return attrgetter(*self.fields)

    @cached_property
    def arrange(self) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """From `values` without lr, decay_at_base, cautious_decay, and the defaults of StepSettings
        to its fields after the multipliers."""
        known = (*self.fields[1:], "decay_at_base", "cautious_decay")
        names = list(StepSettings._field_defaults)
        return itemgetter(
            *(known.index(x) if x in known else len(known) + names.index(x) for x in names[1:])
        )

    @cached_property
    def always(self) -> Kind:
        return Kind(self, True)

    def kind(self, group: Mapping[str, Any]) -> Kind:
        return self.always if self.kept_if is None else Kind(self, self.keeps_moments(group))

    def keeps_moments(self, group: Mapping[str, Any]) -> bool:
        return self.kept_if is None or bool(group[self.kept_if] != 0)

    @cached_property
    def ranges(self) -> tuple[tuple[str, float, float, str], ...]:
        """Of each of `fields`: its name, and what `_range` says."""
        return tuple((name, *_range(name)) for name in self.fields)

    @cached_property
    def nesterov(self) -> Callable[[Sequence[float]], tuple[float, ...]] | None:
        """Of `values` what Nesterov's momentum as torch's SGD has it relies on."""
        names = ("nesterov", "momentum", "dampening")
        known = all(name in self.fields for name in names)
        return itemgetter(*map(self.fields.index, names)) if known else None

    def check(self, values: Sequence[float], whose: str) -> None:
        """Raises ValueError for a hyperparameter out of range, of `values` as numbers. NaN fails
        every comparison."""
        for (name, least, limit, words), value in zip(self.ranges, values, strict=True):
            if not least <= value < limit:
                raise ValueError(f"{name}={value} of {whose} must be {words}")
        if self.nesterov is not None:
            nesterov, momentum, dampening = self.nesterov(values)
            if nesterov and (momentum == 0 or dampening != 0):
                raise ValueError(
                    f"nesterov=True of {whose} needs momentum > 0 and dampening 0, got {momentum} "
                    f"and {dampening}"
                )


@dataclass(frozen=True, eq=False, kw_only=True)
class Rule(Facts):
    """An update rule."""

    name: str
    optimizer: str | None
    function: Function
    trace: Trace
    base: str = "FusedOptimizer"
    gives_parameter: bool = False
    generic: bool = False

    @property
    def coupled(self) -> bool:
        """Decay is part of the gradient, so that replicas with different parameters could not share
        moments."""
        return self.trace.couples

    @property
    def required(self) -> tuple[str, ...]:
        counts = (self.trace.counts or self.first_step > 1) and self.kept_if is None
        return ("step", *super().required) if counts else super().required


def is_signed(moment: str) -> bool:
    """By a moment's name: averages of squares have no sign, and are rounded stochastically in
    bfloat16."""
    return not moment.endswith("_sq")


class Kind(NamedTuple):
    """What of a parameter group its plan relies on."""

    rule: Facts
    keeps_moments: bool
    reads: str = ""
    """as which matrices, of Muon's"""


def _range(name: str) -> tuple[float, float, str]:
    """The least value, what is above all, and what a number must be."""
    if name.startswith("beta"):
        return 0.0, 1.0, "in [0, 1)"
    if name == "dampening":
        return -sys.float_info.max, math.inf, "finite"
    return 0.0, math.inf, "finite and not negative"


RULES: dict[str, Rule] = {}
"""by name, in the order of the C++: enum Rule of rules.h, which the build prints"""


def rule(
    optimizer: str | None,
    *,
    moments: tuple[str, ...] = (),
    exact: tuple[str, ...] = (),
    weights: tuple[str, ...] = (),
    computed: tuple[str, ...] = (),
    base: str | None = None,
    gives_parameter: bool = False,
    first_step: int = 1,
    generic: bool = False,
    takes: str | None = None,
    kept_if: str | None = None,
    like: Function | None = None,
    **settings: Any,
) -> Callable[[Function], Function]:
    """Enters a rule. Its function's docstring is that of the optimizer.

    Args:
        optimizer: the name of its class. None: it is a part of one.
        moments: their names in a state. One that ends in "_sq" is never negative.
        exact: of these those that are float32 whatever `moment_dtype` is; not the first one.
        weights: of the exact ones those that begin as the parameter, not as 0.
        computed: fields of StepSettings that are no arguments: the optimizer's class computes them.
        base: the class, of hdet.optim, that the optimizer's is made of; FusedOptimizer if none.
        gives_parameter: the function gives the new parameter in the place of a direction. It steps
            one replica, whose rate is h.rate.
        first_step: the first one that changes the parameter, by decay or direction. In those before
            it the direction must be finite.
        generic: on CUDA it has the kernels that all such rules share, and adds nothing to the time
            of an install.
        takes: the optimizer of torch.optim whose options and states this one takes.
        kept_if: the setting without which, at 0, no moment is kept.
        like: another rule, from which all comes that is not said.
        settings: defaults of the optimizer's arguments, in their order: "betas", or fields of
            StepSettings. Others must be off: they stand where torch's optimizer has them.
    """

    def enter(function: Function) -> Function:
        facts: dict[str, Any] = {"moments": moments, "settings": settings}
        facts |= {"takes": takes, "kept_if": kept_if, "exact": exact, "weights": weights}
        facts |= {"computed": computed, "gives_parameter": gives_parameter, "generic": generic}
        facts |= {"first_step": first_step, "base": base or "FusedOptimizer"}
        if like is not None:
            model = RULES[like.__name__]
            facts = {key: x or getattr(model, key) for key, x in facts.items()}
            facts["settings"] = {**model.settings, **settings}
        found = trace(function, len(facts["moments"]))
        name = function.__name__
        RULES[name] = Rule(name=name, optimizer=optimizer, function=function, trace=found, **facts)
        return function

    return enter
