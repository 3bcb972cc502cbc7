"""AdamW and the weighted mean in float64, written from the equations alone. Shares nothing with hdet."""

from __future__ import annotations

import torch
from torch import Tensor


def adamw(param: Tensor, gradients: list[Tensor], lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> Tensor:
    """The parameter, in float64, after one step for each gradient, starting without momentum (Loshchilov and Hutter, Algorithm 2)."""
    theta = param.double()
    first = torch.zeros_like(theta)
    second = torch.zeros_like(theta)
    for t, gradient in enumerate(gradients, start=1):
        g = gradient.double()
        first = beta1 * first + (1 - beta1) * g
        second = beta2 * second + (1 - beta2) * g**2
        corrected_first = first / (1 - beta1**t)
        corrected_second = second / (1 - beta2**t)
        theta = theta - lr * (corrected_first / (corrected_second**0.5 + eps) + weight_decay * theta)
    return theta


def weighted_mean(rows: list[Tensor], weights: list[float]) -> Tensor:
    """sum w_k row_k / sum w_k in float64, over the rows whose weight is not 0."""
    total = sum(weights)
    mean = torch.zeros_like(rows[0], dtype=torch.float64)
    for row, weight in zip(rows, weights, strict=True):
        if weight:
            mean += weight / total * row.double()
    return mean
