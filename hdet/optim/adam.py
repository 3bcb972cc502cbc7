"""FusedAdam: torch.optim.Adam in one kernel call; and what it shares with FusedAdamW."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import group_checks as groups
from .fused import FusedOptimizer
from .step_plans import Hyper


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
    """Adam (Kingma and Ba 2015) as torch.optim.Adam computes it: same arguments, results and state.

    As FusedAdamW, but decay is part of the gradient, g + weight_decay * p, and so of the moments. Replicas that share moments
    (`set_replicas`) therefore need weight_decay 0. decoupled_weight_decay=True is refused: that is FusedAdamW.

    Raises ValueError or TypeError as FusedAdamW.

    With a gradient scaler, whose scale is too large for the first step:

    >>> model = torch.nn.Linear(8, 1)
    >>> optimizer = hdet.FusedAdam(model.parameters(), lr=1e-3)
    >>> scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    >>> for _ in range(2):
    ...     optimizer.zero_grad()
    ...     scaler.scale(model(torch.ones(4, 8)).square().mean() + 8 * model.bias.sum()).backward()
    ...     _ = scaler.step(optimizer)
    ...     print(optimizer.step_skipped.item())
    ...     scaler.update(1.0)
    1.0
    0.0
    >>> optimizer.state[model.bias]["step"].item()
    1.0
    """

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
