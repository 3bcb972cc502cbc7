"""FusedLion: Lion in one kernel call. torch has none of its own."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from . import group_checks as groups
from .fused import FusedOptimizer, Options
from .step_plans import Hyper


class FusedLion(FusedOptimizer):
    """Lion (Chen et al. 2023, Algorithm 2). One moment, and every element moves by the rate or not
    at all.

    With gradient g and rate r = lr * multiplier (Eq. 2)::

        u = sign(beta1 * m + (1 - beta1) * g)       sign(0) = sign(NaN) = 0
        m = beta2 * m + (1 - beta2) * g             exp_avg
        p = p * (1 - r * weight_decay) - r * u

    Args:
        lr: of the size of a step; a third to a tenth of AdamW's is usual, with a weight_decay
            larger by as much.
        betas: (of the direction, of the average).
        decay_at: as FusedAdamW.
        others: as FusedOptimizer.

    Raises ValueError or TypeError as FusedAdamW.

    Two replicas of one parameter, at half and at one and a half times the rate:

    >>> parameter = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = hdet.FusedLion([parameter], lr=0.25)
    >>> optimizer.set_replicas(2, lambda p: [p, p.detach().clone()])
    >>> optimizer.multipliers = [[0.5], [1.5]]
    >>> parameter.grad = torch.ones(1)
    >>> optimizer.step()
    >>> [optimizer.replica_parameters(k)[0].item() for k in range(2)]
    [0.875, 0.625]
    >>> optimizer.average_replicas([0.5, 0.5])
    >>> [optimizer.replica_parameters(k)[0].item() for k in range(2)]
    [0.75, 0.75]
    """

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
        decay_at: str = "replica",
        **options: Unpack[Options],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults, decay_at=decay_at, **options)

    def _check_group(self, group: dict[str, Any], name: str) -> None:
        groups.check_not_negative(group, ("lr", "weight_decay"), name)
        groups.check_betas(group, name)

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        beta1, beta2 = group["betas"]
        return group["lr"], beta1, beta2, 0.0, group["weight_decay"], 0.0, False, group["maximize"]
