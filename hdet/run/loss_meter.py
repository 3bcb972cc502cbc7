"""The losses of a running cycle: added up on the device, read by nobody until the cycle ends."""

from __future__ import annotations

import math
from numbers import Real

import torch

__all__ = ["LossMeter"]


class LossMeter:
    """Weighted sum of scalar losses in float64 on ``device``; `add` never waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._total = torch.zeros(2, dtype=torch.float64, device=device)  # (sum of weight * loss, sum of tensor weights)
        self._weight = 0.0

    def add(self, loss: torch.Tensor | float, weight: torch.Tensor | float = 1.0) -> None:
        """Add one loss (0-d or one-element tensor, or a number) with its weight (micro-batches, tokens). Weight 0 counts nothing.

        Raises:
            ValueError: a loss that is not one floating-point number; a weight that is negative or NaN (the sign of a
                tensor is not looked at: that would wait for the device).
        """
        if isinstance(loss, torch.Tensor):
            if loss.numel() != 1 or not loss.is_floating_point():
                raise ValueError(
                    f"loss must be one floating-point number, got a {loss.dtype} tensor of shape {tuple(loss.shape)}: pass loss.mean()"
                )
            loss = loss.detach().reshape(())
        elif not isinstance(loss, Real):  # numpy's scalars too
            raise ValueError(f"loss must be a scalar tensor or a number, got {type(loss).__name__}")
        if isinstance(weight, torch.Tensor):
            if weight.numel() != 1:
                raise ValueError(f"weight must be one number, got a tensor of shape {tuple(weight.shape)}")
            weight = weight.detach().reshape(()).to(self._total)
            self._total[1].add_(weight)
            self._total[0].add_(torch.where(weight == 0, 0.0, weight * loss))
            return
        if not isinstance(weight, (int, float)):
            raise ValueError(f"weight must be a number or a one-element tensor, got {type(weight).__name__}")
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"weight must be a number >= 0, got {weight!r}")
        self._weight += weight
        if weight == 0:
            return  # nothing of it counts, not even a NaN
        if isinstance(loss, torch.Tensor) and loss.device != self._total.device:
            loss = loss.to(self._total.device, non_blocking=True)
        self._total[0].add_(loss, alpha=weight) if isinstance(loss, torch.Tensor) else self._total[0].add_(loss * weight)

    def stats(self) -> torch.Tensor:
        """(2,) float64 on the device: weighted sum and weight. A weight that is NaN makes the sum NaN and is 0 itself."""
        total, weight = self._total[0], self._total[1] + self._weight
        return torch.stack([torch.where(weight.isnan(), weight, total), weight.nan_to_num(0.0, posinf=math.inf)])

    def reset(self) -> None:
        self._total.zero_()
        self._weight = 0.0
