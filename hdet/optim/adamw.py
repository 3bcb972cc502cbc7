"""FusedAdamW: torch.optim.AdamW in one kernel call."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .adam import AdamFamily


class FusedAdamW(AdamFamily):
    """ADAMWDOC"""

    rule = "adamw"
    _carried: ClassVar[dict[str, Any]] = {**AdamFamily._carried, "decoupled_weight_decay": True}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: str | None = None,
        moment_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        decay_at: str = "replica",
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
            },
            master_weights=master_weights,
            moment_dtype=moment_dtype,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
            decay_at=decay_at,
            max_grad_norm=max_grad_norm,
            zero_gradients=zero_gradients,
            backend=backend,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            group["decoupled_weight_decay"] = True  # as torch.optim.AdamW, which also takes the state of an Adam
        super().__setstate__(state)
