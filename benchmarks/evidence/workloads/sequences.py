"""Sequences: an encoder that sorts numbers, and dilated convolutions over bytes of English."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..problems.digits import seeded
from ..problems.problem import Batch, Problem, drawn, mean_loss
from .groups import decaying_matrices
from .language import BYTES, language

NUMBERS, LENGTH, LISTS = 32, 12, 32
BACK = 32
"""bytes that the convolutions see"""


class Sorter(nn.Module):
    """numbers (batch, time) -> logits (batch, time, 32): at each place the number that stands there in the sorted list."""

    def __init__(self, width: int = 32, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.numbers, self.positions = nn.Embedding(NUMBERS, width), nn.Parameter(0.02 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.body, self.out = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.Linear(width, NUMBERS)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.out(self.body(self.numbers(numbers) + self.positions))


class Dilated(nn.Module):
    """tokens (batch, time) -> logits (batch, time, 256): causal convolutions over 2, 4, 8, 16 and 32 bytes."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(BYTES, width), nn.Linear(width, BYTES)
        self.body = nn.ModuleList(nn.Conv1d(width, width, 2, dilation=2**i) for i in range(5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens).transpose(1, 2)
        for conv in self.body:
            x = x + F.gelu(conv(F.pad(x, (conv.dilation[0], 0))))
        return self.out(x.transpose(1, 2))


def _lists(key: tuple[object, ...], count: int) -> Batch:
    numbers = torch.randint(NUMBERS, (count, LENGTH), generator=seeded("sorting", *key))
    return numbers, numbers.sort(1).values


def _losses(model: nn.Module, batch: Batch) -> Tensor:
    numbers, ordered = batch
    return F.cross_entropy(model(numbers).transpose(1, 2), ordered, reduction="none").mean(1)


SORTING = Problem(
    name="sorting",
    steps=1500,
    batch_size=LISTS,
    build=drawn(Sorter),
    groups=lambda model: decaying_matrices(model, 0.01),
    batch=lambda seed, step: _lists((seed, step), LISTS),
    spare=lambda seed, step, number: _lists((seed, "spare", number), LISTS),
    losses=_losses,
    validate=lambda model: mean_loss(model, _losses, [_lists(("validation",), 2048)]),
)
CONVOLUTIONS = language("convolutions", drawn(Dilated), context=BACK, decay=0.01)
