"""Fused optimizers: torch's arguments and state, stepped by hdet's kernels."""

from __future__ import annotations

from . import classes
from .classes import *
from .fused import FusedOptimizer
from .muon import FusedMuon
from .newton_schulz import POLAR_EXPRESS
from .split_params import hidden_matrices, hidden_matrix

__all__ = ["POLAR_EXPRESS", "FusedMuon", "FusedOptimizer", "hidden_matrices", "hidden_matrix"]
__all__ += classes.__all__
