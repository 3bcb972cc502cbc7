"""The torch backend: the same operations in torch's own multi-tensor calls. Works on every device; the others are compared with it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .checks import check_gradients, check_settings
from .interface import AdamWSettings, AdamWTensors


class TorchAdamWPlan:
    """An AdamW step in the order of torch.optim.AdamW, with the multiplier inside."""

    def __init__(self, tensors: AdamWTensors) -> None:
        self.tensors = tensors
        self.leaders = tensors.leaders()
        self.members: list[list[int]] = [[] for _ in self.leaders]
        for i, row in enumerate(tensors.rows):
            self.members[row].append(i)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], settings: Sequence[AdamWSettings]) -> None:
        check_gradients(gradients, self.tensors.params)
        check_settings(settings, len(self.leaders))
        for members, leader, row in zip(self.members, self.leaders, settings, strict=True):
            self._step_row(members, gradients, row, leader.item() + 1)
        torch._foreach_add_(list(self.tensors.steps), 1)

    def _step_row(self, members: list[int], gradients: Sequence[Tensor], row: AdamWSettings, step: float) -> None:
        params = [self.tensors.params[i] for i in members]
        exp_avgs = [self.tensors.exp_avgs[i] for i in members]
        exp_avg_sqs = [self.tensors.exp_avg_sqs[i] for i in members]
        grads = [gradients[i] for i in members]
        if row.maximize:
            grads = list(torch._foreach_neg(grads))
        lr = row.lr * row.multiplier  # Eq. 2
        torch._foreach_mul_(params, 1 - lr * row.weight_decay)
        torch._foreach_lerp_(exp_avgs, grads, 1 - row.beta1)
        torch._foreach_mul_(exp_avg_sqs, row.beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - row.beta2)
        denominators = torch._foreach_sqrt(exp_avg_sqs)
        torch._foreach_div_(denominators, math.sqrt(1 - row.beta2**step))
        torch._foreach_add_(denominators, row.eps)
        torch._foreach_addcdiv_(params, exp_avgs, denominators, -lr / (1 - row.beta1**step))


class TorchCopyPlan:
    """A scaled copy between tensors of any floating dtypes and strides."""

    def __init__(self, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
        self.sources, self.destinations = list(sources), list(destinations)

    @torch.no_grad()
    def copy(self, scale: float) -> None:
        if scale == 0:
            torch._foreach_zero_(self.destinations)
            return
        torch._foreach_copy_(self.destinations, self.sources)
        if scale != 1:
            torch._foreach_mul_(self.destinations, scale)


class TorchBackend:
    name = "torch"

    def copy_plan(self, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> TorchCopyPlan:
        return TorchCopyPlan(sources, destinations)

    def adamw_plan(self, tensors: AdamWTensors) -> TorchAdamWPlan:
        return TorchAdamWPlan(tensors)

    @torch.no_grad()
    def average_(self, replicas: Sequence[Sequence[Tensor]], weights: Sequence[float]) -> None:
        for tensors in zip(*replicas, strict=True):
            mean = torch.full_like(tensors[0], -0.0)
            for tensor, weight in zip(tensors, weights, strict=True):
                if weight != 0:
                    mean.add_(tensor, alpha=weight)
            for tensor in tensors:
                tensor.copy_(mean)
