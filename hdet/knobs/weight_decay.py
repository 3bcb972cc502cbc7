"""Weight decay as a knob."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from ..core.spread import check_spread
from ..kernels.spec.interface import COUPLED
from .bound import Bound, GroupKnob, ProductKnob
from .param_groups import Bounds, Groups, check_groups, choose, require_key, scale_of

__all__ = ["WeightDecay"]


@dataclass(frozen=True)
class WeightDecay:
    """Weight decay as a knob, of the groups that have one above 0; ``groups`` and ``bounds`` as for `LearningRate`. Names: ``"weight_decay"``.

    ``product``: what is explored is rate * decay, which is what AdamW shrinks a weight by in a step (decay alone would be entangled with
    the rate: each replica's rate moves both). Where the rate is multiplied by rho_1 the decay is by rho_2 / rho_1, and the same for
    corrections, so that a higher rate does not decay more. It needs a `LearningRate` in the same Ensemble. With
    ``decay_at="base"`` of a fused optimizer no replica's rate enters decay, and only corrections are divided.

    Training losses are no honest judge of it: it needs a `ProbeController` with ``held_out=True``. Where decay is part of the gradient
    (torch's Adam without decoupled_weight_decay, SGD with momentum, RMSprop ...) replicas' moments differ, and ``moments`` is to be chosen.
    """

    spread: float = 0.3
    groups: Groups = None
    product: bool = False
    bounds: Bounds = None

    def __post_init__(self) -> None:
        check_spread(self.spread)
        check_groups(self.groups)
        scale_of(self.bounds)
        if not isinstance(self.product, bool):
            raise ValueError(f"product must be True or False, got {self.product!r}")
        if self.product and self.bounds is not None:
            raise ValueError(f"bounds is {self.bounds!r} with product=True, where the decay follows the rate: leave one of them out")

    def bind(self, optimizer: Optimizer) -> list[Bound]:
        """The knobs of this optimizer's parameter groups.

        Raises:
            ValueError: a group that does not exist or has no decay, or one outside of the bounds.
        """
        require_key(optimizer, "weight_decay", "WeightDecay")
        chosen = choose(
            optimizer, self.groups, "weight_decay", lambda group: float(group["weight_decay"]) > 0, "it is multiplied, so begin above 0"
        )
        kind = ProductKnob if self.product else GroupKnob
        return [
            kind(
                name, self.spread, optimizer, "weight_decay", indices, scale_of(self.bounds),
                valid_on_train_loss=False, moments_diverge=any(_is_coupled(optimizer, i) for i in indices),
            )
            for name, indices in chosen
        ]  # fmt: skip


def _is_coupled(optimizer: Optimizer, index: int) -> bool:
    """Does decay go into the moments, as far as is known? Of other libraries' optimizers it is not, and most are decoupled."""
    group = optimizer.param_groups[index]
    if group.get("decoupled_weight_decay", False):
        return False
    if hasattr(optimizer, "rule"):
        return optimizer.rule in COUPLED and (optimizer.rule != "sgd" or group["momentum"] != 0)
    coupled = (torch.optim.Adam, torch.optim.Adamax, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.RAdam)
    with_momentum = isinstance(optimizer, torch.optim.SGD) and group["momentum"] != 0
    return with_momentum or isinstance(optimizer, (*coupled, torch.optim.RMSprop))
