"""The usual two parameter groups."""

from __future__ import annotations

from typing import Any

from torch import nn


def decaying_matrices(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Matrices and kernels decay, vectors do not; what is not trained is left out."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"name": "matrices", "params": [p for p in trained if p.dim() > 1], "weight_decay": decay},
        {"name": "vectors", "params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
