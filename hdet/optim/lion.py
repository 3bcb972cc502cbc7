"""FusedLion: Lion in one kernel call. torch has none of its own."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import groups
from .base import FusedOptimizer
from .plans import Hyper


class FusedLion(FusedOptimizer):
    """LIONDOC"""

    rule = "lion"
    _keys = ("lr", "betas", "weight_decay")
    _moments = ("exp_avg",)
    _required = ("exp_avg",)
    _carried: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
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
            {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize},
            master_weights=master_weights,
            moment_dtype=moment_dtype,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
            decay_at=decay_at,
            max_grad_norm=max_grad_norm,
            zero_gradients=zero_gradients,
            backend=backend,
        )

    def _check_group(self, group: dict[str, Any], name: str) -> None:
        groups.check_not_negative(group, ("lr", "weight_decay"), name)
        groups.check_betas(group, name)

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        beta1, beta2 = group["betas"]
        return group["lr"], beta1, beta2, 0.0, group["weight_decay"], 0.0, False, group["maximize"]
