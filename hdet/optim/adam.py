"""FusedAdam and FusedAdamW: torch.optim.Adam and AdamW in one kernel call."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from hdet.rules import DECOUPLED

from . import group_checks as groups
from .fused import FusedOptimizer, Options
from .step_plans import Hyper


class AdamOptions(Options, total=False):
    """What torch.optim.Adam and AdamW take by name, and `Options`."""

    foreach: bool | None
    capturable: bool
    differentiable: bool
    fused: bool | None


def adam_hyper(group: dict[str, Any]) -> Hyper:
    """What a step of Adam or AdamW reads from a group."""
    beta1, beta2 = group["betas"]
    lr, eps, decay = group["lr"], group["eps"], group["weight_decay"]
    return lr, beta1, beta2, eps, decay, 0.0, False, group["maximize"]


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
            raise ValueError(
                f"decoupled_weight_decay={not decoupled} of {name} is {other}: use Fused{other}"
            )

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        return adam_hyper(group)


class FusedAdam(AdamFamily):
    """Adam (Kingma and Ba 2015) as torch.optim.Adam computes it: same arguments, results and state.

    As FusedAdamW, but decay is part of the gradient, g + weight_decay * p, and so of the moments.
    Replicas that share moments (`set_replicas`) therefore need weight_decay 0.
    decoupled_weight_decay=True is refused: that is FusedAdamW.

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
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
        }
        super().__init__(params, defaults, decoupled_weight_decay=decoupled_weight_decay, **options)


class FusedAdamW(AdamFamily):
    """AdamW (Loshchilov and Hutter 2019, Algorithm 2) as torch.optim.AdamW computes it: same
    arguments, results and state.

    With gradient g, step count t and rate r = lr * multiplier (Eq. 2)::

        m = beta1 * m + (1 - beta1) * g             exp_avg
        v = beta2 * v + (1 - beta2) * g^2           exp_avg_sq
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
        p = p * (1 - r * weight_decay) - r * u

    Args:
        decay_at: "replica": decay acts at r, the rate the replica steps with, as stock AdamW at
            that rate would. "base": at lr, so that all replicas decay alike and differ along u
            only.
        others: as torch.optim.AdamW and FusedOptimizer.

    Raises ValueError or TypeError, before anything is changed, for arguments out of range or NaN,
    amsgrad, differentiable, and in a step for tensors that cannot be used (sparse, with gaps, of
    another dtype, overlapping), by name.

    A bfloat16 model with exact float32 weights behind it, clipped gradients, and a schedule:

    >>> model = torch.nn.Linear(8, 1).bfloat16()
    >>> optimizer = hdet.FusedAdamW(
    ...     model.parameters(), lr=3e-4, master_weights="split", max_grad_norm=1.0
    ... )
    >>> scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    >>> for _ in range(3):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(4, 8, dtype=torch.bfloat16)).square().mean().backward()
    ...     optimizer.step()
    ...     scheduler.step()
    >>> sorted(optimizer.state[model.weight])
    ['exp_avg', 'exp_avg_sq', 'remainder', 'step']
    >>> optimizer.grad_norm.item() > 0, optimizer.step_skipped.item()
    (True, 0.0)
    """

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
        decay_at: str = "replica",
        **options: Unpack[AdamOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
        }
        super().__init__(params, defaults, decay_at=decay_at, **options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            group["decoupled_weight_decay"] = (
                True  # as torch.optim.AdamW, which also takes the state of an Adam
            )
        super().__setstate__(state)
