"""From a byte model that was trained here on Python's sources to its English: all weights, or low-rank adapters."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR

from ..problems.problem import Problem, mean_loss
from ..problems.transformer import TRANSFORMER
from ..problems.transformer import losses as window_losses
from .groups import decaying_matrices
from .text import WINDOWS, held_out, windows

RANK = 4
PRETRAINING = 2000


@cache
def pretrained() -> dict[str, Tensor]:
    """Weights after `PRETRAINING` steps on sources at the best rate of that problem."""
    model = TRANSFORMER.build(0)
    optimizer = torch.optim.AdamW(TRANSFORMER.groups(model), lr=1e-2, betas=(0.9, 0.95))
    schedule = OneCycleLR(optimizer, 1e-2, total_steps=PRETRAINING, pct_start=0.1, cycle_momentum=False)
    for step in range(PRETRAINING):
        TRANSFORMER.losses(model, TRANSFORMER.batch(0, step)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.state_dict()


class Adapted(nn.Module):
    """A frozen matrix and an update of rank `RANK`, which begins at 0."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Buffer(frozen.weight.detach().clone())
        self.down = nn.Parameter(torch.randn(RANK, frozen.in_features) / math.sqrt(frozen.in_features))
        self.up = nn.Parameter(torch.zeros(frozen.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + 2 * F.linear(F.linear(x, self.down), self.up)


def _model(seed: int) -> nn.Module:
    model = TRANSFORMER.build(seed)
    model.load_state_dict(pretrained())
    return model


def _adapted(seed: int) -> nn.Module:
    model = _model(seed)
    torch.manual_seed(seed)
    model.requires_grad_(False)
    for block in model.blocks:
        for name, module in list(block.named_children()):
            if isinstance(module, nn.Linear):
                setattr(block, name, Adapted(module))
    return model


def _problem(name: str, build: object) -> Problem:
    return Problem(
        name=name,
        steps=1500,
        batch_size=WINDOWS,
        build=build,  # type: ignore[arg-type]
        groups=lambda model: decaying_matrices(model, 0.0),
        batch=windows,
        spare=lambda seed, step, number: windows(seed, 10_000_000 + number),
        losses=window_losses,
        validate=lambda model: mean_loss(model, window_losses, held_out()),
    )


FINETUNING, ADAPTERS = _problem("finetuning", _model), _problem("adapters", _adapted)
