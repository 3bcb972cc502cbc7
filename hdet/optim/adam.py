"""FusedAdam: torch.optim.Adam in one kernel call; and what it shares with FusedAdamW."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from hdet.kernels.spec.interface import DECOUPLED

from . import group_checks as groups
from .fused import FusedOptimizer
from .step_plans import Hyper
from .stepper import Options


class AdamOptions(Options, total=False):
    """What torch.optim.Adam and AdamW take by name, and `Options`."""

    foreach: bool | None
    capturable: bool
    differentiable: bool
    fused: bool | None


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
        decoupled = self.rule in DECOUPLED
        if bool(group["decoupled_weight_decay"]) != decoupled:
            other = "Adam" if decoupled else "AdamW"
            raise ValueError(f"decoupled_weight_decay={not decoupled} of {name} is {other}: use Fused{other}")

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
        decoupled_weight_decay: bool = False,
        **options: Unpack[AdamOptions],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        super().__init__(params, defaults, decoupled_weight_decay=decoupled_weight_decay, **options)
