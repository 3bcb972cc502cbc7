"""FusedAdam: torch.optim.Adam in one kernel call; and what it shares with FusedAdamW."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import groups
from .base import FusedOptimizer
from .plans import Hyper


class AdamFamily(FusedOptimizer):
    """Two moments: exp_avg and exp_avg_sq."""

    _keys = ("lr", "betas", "eps", "weight_decay")
    _moments = ("exp_avg", "exp_avg_sq")
    _required = ("step", "exp_avg", "exp_avg_sq")
    _carried: ClassVar[dict[str, Any]] = {
        "amsgrad": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": False,
    }

    def _check_group(self, group: dict[str, Any], name: str) -> None:
        groups.check_not_negative(group, ("lr", "eps", "weight_decay"), name)
        groups.check_betas(group, name)
        groups.check_off(group, ("amsgrad", "differentiable"), name, type(self).__name__)

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        beta1, beta2 = group["betas"]
        return group["lr"], beta1, beta2, group["eps"], group["weight_decay"], 0.0, False, group["maximize"]


class FusedAdam(AdamFamily):
    """ADAMDOC"""

    rule = "adam"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
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
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "maximize": maximize,
                "foreach": foreach,
                "capturable": capturable,
                "differentiable": differentiable,
                "fused": fused,
                "decoupled_weight_decay": decoupled_weight_decay,
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
        super()._check_group(group, name)
        if group["decoupled_weight_decay"]:
            raise ValueError(f"decoupled_weight_decay=True of {name} is AdamW: use FusedAdamW")
