"""FusedSGD: torch.optim.SGD in one kernel call."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from . import group_checks as groups
from .fused import FusedOptimizer, Options
from .step_plans import Hyper


class SGDOptions(Options, total=False):
    """What torch.optim.SGD takes by name, and `Options`."""

    foreach: bool | None
    differentiable: bool
    fused: bool | None


class FusedSGD(FusedOptimizer):
    """SGD with momentum, dampening and Nesterov momentum as torch.optim.SGD computes it: same
    arguments and results.

    With gradient g and rate r = lr * multiplier (Eq. 2)::

        g = g + weight_decay * p
        b = momentum * b + (1 - dampening) * g      momentum_buffer; in its first step b = g
        p = p - r * (g + momentum * b if nesterov else b)

    The state has a `step` beside torch's `momentum_buffer`, which a group without momentum does not
    have. torch's states, which have no step, load: a buffer that is there counts as one step.
    Replicas that share the buffer (`set_replicas`) need weight_decay 0.

    Raises ValueError or TypeError as FusedAdamW; nesterov needs momentum > 0 and dampening 0.

    A run that torch.optim.SGD began:

    >>> model = torch.nn.Linear(8, 1)
    >>> before = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> optimizer = hdet.FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> model(torch.ones(4, 8)).sum().backward()
    >>> before.step()
    >>> optimizer.load_state_dict(before.state_dict())
    >>> optimizer.step()
    >>> round(optimizer.state[model.bias]["momentum_buffer"].item(), 4)  # 0.9 * 4 + 4
    7.6
    """

    rule = "sgd"
    _keys = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
    _moments = ("momentum_buffer",)
    _required = ()
    _carried: ClassVar[dict[str, Any]] = {"foreach": None, "differentiable": False, "fused": None}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        **options: Unpack[SGDOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, **options)

    def _check_group(self, group: dict[str, Any], name: str) -> None:
        groups.check_not_negative(group, ("lr", "momentum", "weight_decay"), name)
        groups.check_off(group, ("differentiable",), name, type(self).__name__)
        if not math.isfinite(group["dampening"]):
            raise ValueError(f"dampening={group['dampening']} of {name} must be finite")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"nesterov=True of {name} needs momentum > 0 and dampening 0, got "
                f"{group['momentum']} and {group['dampening']}"
            )

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        return (
            group["lr"],
            group["momentum"],
            0.0,
            0.0,
            group["weight_decay"],
            group["dampening"],
            group["nesterov"],
            group["maximize"],
        )

    def _keeps_moments(self, group: dict[str, Any]) -> bool:
        return group["momentum"] != 0
