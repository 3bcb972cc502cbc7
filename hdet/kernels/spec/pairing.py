"""The operations of pairs, as every backend has them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import arguments as checks
from .interface import Column

PAIRINGS = ("copy", "lerp", "swap")
"""in the order of csrc/core/plan.h: Pairing"""


class Pairing:
    """A PairPlan, for a backend that says how to do one operation: `_pair`."""

    def __init__(
        self,
        sources: Sequence[Tensor],
        destinations: Sequence[Tensor],
        source_lowers: Column | None,
        masters: Column | None,
    ) -> None:
        self.tensors = (
            sources,
            destinations,
            source_lowers,
            masters,
        )  # keeps alive what a plan's tables point to

    def copy(self, scale: float = 1.0) -> None:
        self._pair("copy", scale)

    def lerp(self, weight: float) -> None:
        if not 0 <= weight <= 1:
            raise ValueError(f"weight={weight} must be in [0, 1]; 1 copies")
        self._pair("lerp", weight)

    def swap(self) -> None:
        checks.check_swap(*self.tensors)
        self._pair("swap", 1.0)

    def _pair(self, pairing: str, scale: float) -> None:
        raise NotImplementedError
