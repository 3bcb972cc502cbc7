"""The usual two parameter groups: by what decays, and by what Muon trains."""

from __future__ import annotations

from typing import Any

from torch import nn

import hdet


def decaying_matrices(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Matrices and kernels decay, vectors do not; what is not trained is left out."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"name": "matrices", "params": [p for p in trained if p.dim() > 1], "weight_decay": decay},
        {"name": "vectors", "params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def hidden_matrices(model: nn.Module) -> list[dict[str, Any]]:
    """Those that Muon trains, and the rest."""
    hidden = hdet.hidden_matrices(model)
    return [
        {"params": [p for n, p in model.named_parameters() if hidden(n, p) == use], "use_muon": use}
        for use in (True, False)
    ]
