"""Fused optimizers: torch's arguments and state, stepped by hdet's kernels."""

from __future__ import annotations

from .adamw import FusedAdamW

__all__ = ["FusedAdamW"]
