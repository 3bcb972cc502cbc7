"""The torch backend: every operation in torch's own calls, on any device.

The others are compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..checks import check_shares
from ..copies import TorchCopyPlan
from ..interface import Column
from ..numbers import store
from .arithmetic import values_of, weighted_sum
from .step import TorchStepPlan


class TorchAveragePlan:
    """The weighted mean of K co-resident sets (Eq. 3)."""

    def __init__(
        self, params: Sequence[Sequence[Tensor]], masters: Sequence[Column] | None
    ) -> None:
        self.params = params
        self.masters: Sequence[Column] = (
            [[None] * len(row) for row in params] if masters is None else masters
        )

    @torch.no_grad()
    def average(self, weights: Sequence[float]) -> None:
        check_shares(weights, len(self.params))
        values = [values_of(*pair) for pair in zip(self.params, self.masters, strict=True)]
        mean = weighted_sum(values, torch.tensor(weights, dtype=torch.float32, device="cpu"))
        for params, masters in zip(self.params, self.masters, strict=True):
            for value, param, master in zip(mean.tensors, params, masters, strict=True):
                store(value, param, master)


class TorchBackend:
    name = "torch"
    step_plan = TorchStepPlan
    average_plan = TorchAveragePlan
    copy_plan = TorchCopyPlan
