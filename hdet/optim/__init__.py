"""Fused optimizers: torch's arguments and state, stepped by hdet's kernels."""

from __future__ import annotations

from .adam import FusedAdam, FusedAdamW
from .fused import FusedOptimizer
from .lion import FusedLion
from .muon import FusedMuon
from .nadamw import FusedNAdamW
from .sgd import FusedSGD
from .split_params import hidden_matrices, hidden_matrix

__all__ = [
    "FusedAdam",
    "FusedAdamW",
    "FusedLion",
    "FusedMuon",
    "FusedNAdamW",
    "FusedOptimizer",
    "FusedSGD",
    "hidden_matrices",
    "hidden_matrix",
]
