"""Copies in torch's calls, for backends without a kernel of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .interface import Column
from .numbers import join, store


class TorchCopyPlan:
    """A scaled copy of one set of tensors, of any floating dtypes and strides, to another."""

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
