"""The torch backend: every operation in torch's own calls, on any device.

The others are compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..spec import rounding
from ..spec.interface import Column
from ..spec.pairing import Pairing
from ..spec.settings import check_shares
from .rules import Many, global_norm, running_average, store, value_of, values_of, weighted_sum
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


class TorchPairPlan(Pairing):
    """Operations between two sets of tensors of any floating dtypes and strides."""

    @torch.no_grad()
    def _pair(self, pairing: str, scale: float) -> None:
        sources, destinations, *others = self.tensors
        lowers, masters = (other or [None] * len(sources) for other in others)
        one_pair = {"copy": _copy, "lerp": _lerp, "swap": _swap}[pairing]
        for source, destination, lower, master in zip(
            sources, destinations, lowers, masters, strict=True
        ):
            one_pair(source, destination, lower, master, scale)


def _copy(
    source: Tensor, destination: Tensor, lower: Tensor | None, master: Tensor | None, scale: float
) -> None:
    value = source if lower is None else rounding.join(source, lower)
    if scale == 0:
        value = torch.zeros_like(value)
    elif scale != 1:
        value = (value if value.dtype == torch.float64 else value.float()) * scale
    store(value, destination, master)


def _lerp(
    source: Tensor, destination: Tensor, lower: Tensor | None, master: Tensor | None, weight: float
) -> None:
    towards, old = value_of(source, lower), value_of(destination, master)
    w = torch.tensor(weight, dtype=torch.float32, device="cpu")
    store(running_average(Many([old]), Many([towards]), w).tensors[0], destination, master)


def _swap(
    source: Tensor, destination: Tensor, lower: Tensor | None, master: Tensor | None, _: float
) -> None:
    for one, other in ((source, destination), (lower, master)):
        if one is not None and other is not None:
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)


class TorchNormPlan:
    """The global norm of one set of tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    @torch.no_grad()
    def norm(self) -> Tensor:
        return global_norm(self.tensors).float()


class TorchBackend:
    name = "torch"
    step_plan = TorchStepPlan
    average_plan = TorchAveragePlan
    pair_plan = TorchPairPlan
    norm_plan = TorchNormPlan
