"""FusedSGD: torch.optim.SGD in one kernel call."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import groups
from .base import FusedOptimizer
from .plans import Hyper


class FusedSGD(FusedOptimizer):
    """SGDDOC"""

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
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: str | None = None,
        moment_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        max_grad_norm: float | None = None,
        zero_gradients: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "maximize": maximize,
                "foreach": foreach,
                "differentiable": differentiable,
                "fused": fused,
            },
            master_weights=master_weights,
            moment_dtype=moment_dtype,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
            max_grad_norm=max_grad_norm,
            zero_gradients=zero_gradients,
            backend=backend,
        )

    def _check_group(self, group: dict[str, Any], name: str) -> None:
        groups.check_not_negative(group, ("lr", "momentum", "weight_decay"), name)
        groups.check_off(group, ("differentiable",), name, type(self).__name__)
        if not math.isfinite(group["dampening"]):
            raise ValueError(f"dampening={group['dampening']} of {name} must be finite")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"nesterov=True of {name} needs momentum > 0 and dampening 0, got {group['momentum']} and {group['dampening']}"
            )

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        return group["lr"], group["momentum"], 0.0, 0.0, group["weight_decay"], group["dampening"], group["nesterov"], group["maximize"]

    def _keeps_moments(self, group: dict[str, Any]) -> bool:
        return group["momentum"] != 0
