"""Fused optimizers: torch's arguments and state, stepped by hdet's kernels."""

from __future__ import annotations

from .adam import FusedAdam, FusedAdamW
from .fused import FusedOptimizer
from .lion import FusedLion
from .sgd import FusedSGD

__all__ = ["FusedAdam", "FusedAdamW", "FusedLion", "FusedOptimizer", "FusedSGD"]
