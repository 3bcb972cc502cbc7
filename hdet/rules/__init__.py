"""All update rules, one function each, and what the host says to them in a step.

A rule turns the gradient into a direction u, which all replicas share, and new moments. Replica k
then steps, in all rules alike, by its rate r = lr * multipliers[k] (Eq. 2)::

    p = p * (1 - r * weight_decay) - r * u      a rule that does not read p: decoupled decay
    p = p - r * u                               a rule that does: its decay is part of the gradient

After a change: python csrc/generate.py, which prints csrc/core/rules.h and triton_kernels/rules.py,
and build again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .trace import (
    Function,
    Settings,
    Tensor,
    Trace,
    add_weighted,
    average,
    choose,
    root,
    sign,
    sqrt,
    trace,
    where,
)

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
    """SGD: the momentum"""
    beta2: float = 0.0
    eps: float = 0.0
    weight_decay: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    decay_at_base: bool = False
    cautious_decay: bool = False
    """decoupled decay acts on those elements alone that the direction brings nearer to 0"""


class Rule(NamedTuple):
    """What is known of an update rule."""

    name: str
    moments: tuple[str, ...]
    """their names in a state"""
    kept_if: str | None
    """the setting without which, at 0, no moment is kept"""
    trace: Trace

    @property
    def coupled(self) -> bool:
        """Decay is part of the gradient, so that replicas with different parameters could not share
        moments."""
        return self.trace.couples


RULES: dict[str, Rule] = {}
"""by name, in the order of csrc/core/rules.h: Rule"""


def rule(*moments: str, kept_if: str | None = None) -> Callable[[Function], Function]:
    """Enters a rule that keeps these moments, one or two."""

    def enter(function: Function) -> Function:
        name = function.__name__
        RULES[name] = Rule(name, moments, kept_if, trace(function, len(moments)))
        return function

    return enter


def _spread(h: Settings, v: Tensor) -> Tensor:
    """Of the gradients around 0, with Adam's correction."""
    return root(v) * (1 / sqrt(1 - h.beta2**h.step)) + h.eps


@rule("exp_avg", "exp_avg_sq")
def adamw(h: Settings, g: Tensor, p: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """AdamW (Loshchilov and Hutter 2019, Algorithm 2), in the order of torch.optim.AdamW."""
    m = average(m, g, h.beta1)
    v = h.beta2 * v + (1 - h.beta2) * g * g
    return m / _spread(h, v) / (1 - h.beta1**h.step), m, v


@rule("exp_avg", "exp_avg_sq")
def adam(h: Settings, g: Tensor, p: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Adam (Kingma and Ba 2015) with L2 regularisation in the gradient, as torch.optim.Adam."""
    return adamw(h, add_weighted(g, h.weight_decay, p), p, m, v)


@rule("momentum_buffer", kept_if="beta1")
def sgd(h: Settings, g: Tensor, p: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    """SGD with momentum, dampening and Nesterov momentum, as torch.optim.SGD, which fills the
    buffer with the first gradient as it is, and without momentum has no buffer to dampen."""
    g = add_weighted(g, h.weight_decay, p)
    share = where(h.step <= 1, 1, where(h.beta1, 1 - h.dampening, 1))
    m = add_weighted(share * g, h.beta1, m)
    return choose(h.nesterov, g + h.beta1 * m, m), m


@rule("exp_avg")
def lion(h: Settings, g: Tensor, p: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    """Lion (Chen et al. 2023, Algorithm 2)."""
    return sign(average(m, g, h.beta1)), average(m, g, h.beta2)


@rule("exp_avg", "exp_avg_sq")
def nadamw(h: Settings, g: Tensor, p: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """AdamW with Nesterov's look ahead (Choi et al. 2019, Table 1), as AlgoPerf's baselines."""
    _, m, v = adamw(h, g, p, m, v)
    return average(m, g, h.beta1) / _spread(h, v) / (1 - h.beta1**h.step), m, v


COUPLED = tuple(name for name, rule in RULES.items() if rule.coupled)
DECOUPLED = tuple(name for name, rule in RULES.items() if not rule.coupled)
DIGEST = hashlib.sha256(repr((StepSettings._fields, RULES)).encode()).hexdigest()[:16]
"""of all that is printed, for a module to say of which rules it was made"""
