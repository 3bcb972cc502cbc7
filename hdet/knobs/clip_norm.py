"""The norm that gradients are clipped to, as a knob."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.optim import Optimizer

from ..core.spread import check_spread
from .bound import Bound
from .cells import AttributeCell
from .param_groups import Bounds, scale_of
from .scalar import Scalar

__all__ = ["ClipNorm"]


@dataclass(frozen=True)
class ClipNorm:
    """The norm that gradients are clipped to.

    ``value`` None: ``max_grad_norm`` of one of hdet's fused optimizers, which clips inside its step. A number: the loop clips by itself,
    ``clip_grad_norm_(parameters, ensemble.value("clip_norm"))`` inside ``with ensemble.explore():``. What replicas clip differently makes
    their moments differ, so ``moments`` is to be chosen also with shared gradients.
    """

    value: float | None = None
    spread: float = 0.3
    bounds: Bounds = None

    def __post_init__(self) -> None:
        check_spread(self.spread)
        scale_of(self.bounds)

    def bind(self, optimizer: Optimizer) -> list[Bound]:
        """Raises ValueError without a norm above 0 to begin with."""
        if self.value is not None:
            return Scalar(
                "clip_norm", spread=self.spread, bounds=self.bounds, valid_on_train_loss=True, on_gradients=True, value=self.value
            ).bind(optimizer)  # fmt: skip
        norm = getattr(optimizer, "max_grad_norm", None)
        if norm is None or not 0 < norm < math.inf:
            raise ValueError(
                f"ClipNorm: {type(optimizer).__name__} has max_grad_norm {norm!r}: give a fused optimizer one above 0, or pass ClipNorm(value) "
                'and clip by ensemble.value("clip_norm")'
            )
        cells = [AttributeCell(optimizer, "max_grad_norm")]
        return [Bound("clip_norm", self.spread, cells, scale_of(self.bounds), key="max_grad_norm", moments_diverge=True)]
