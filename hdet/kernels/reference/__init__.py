"""The torch backend: every operation in torch's own calls, on any device.

The others are compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..checks import check_shares
from ..interface import Column
from ..numbers import join, store
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


class TorchCopyPlan:
    """A scaled copy of one set of tensors, of any floating dtypes and strides, to another. Also
    Triton's: a few calls for all tensors."""

    def __init__(
        self,
        sources: Sequence[Tensor],
        destinations: Sequence[Tensor],
        source_lowers: Column | None,
        masters: Column | None,
    ) -> None:
        nothing: Column = [None] * len(sources)
        self.sources = list(zip(sources, source_lowers or nothing, strict=True))
        self.destinations, self.masters = list(destinations), masters or nothing

    @torch.no_grad()
    def copy(self, scale: float = 1.0) -> None:
        values = [t if lower is None else join(t, lower) for t, lower in self.sources]
        if scale == 0:
            values = [torch.zeros_like(value) for value in values]
        elif scale != 1:
            wide = [v if v.dtype == torch.float64 else v.float() for v in values]
            values = list(torch._foreach_mul(wide, scale))
        if all(master is None for master in self.masters):
            torch._foreach_copy_(self.destinations, values)
            return
        for value, destination, master in zip(values, self.destinations, self.masters, strict=True):
            store(value, destination, master)


class TorchBackend:
    name = "torch"
    step_plan = TorchStepPlan
    average_plan = TorchAveragePlan
    copy_plan = TorchCopyPlan
