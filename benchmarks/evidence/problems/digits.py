"""Handwritten digits (scikit-learn's, 8 x 8), each shifted and blurred by noise afresh in every
batch; a small convolutional classifier."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from .problem import Batch, Problem, drawn, seeded

STEPS, IMAGES = 600, 32
NOISE = 0.3
"""standard deviation of what is added to pixels in [0, 1]"""


class Classifier(nn.Module):
    """Two convolutions, two linear layers, no normalisation: a rate that is too high ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.hidden, self.out = nn.Linear(32 * 4 * 4, 64), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.conv1(images))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.out(F.relu(self.hidden(x.flatten(1))))


@cache
def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, held-out images and labels; split at random once and for all."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, held_out = order[:1297], order[1297:]
    return images[train], labels[train], images[held_out], labels[held_out]


def disturbed(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shifted by up to one pixel each way, and noisy."""
    padded = F.pad(images, (1, 1, 1, 1))
    down, right = (torch.randint(3, (len(images),), generator=generator) for _ in range(2))
    rows = (down[:, None] + torch.arange(8))[:, :, None]
    columns = (right[:, None] + torch.arange(8))[:, None, :]
    shifted = padded[torch.arange(len(images))[:, None, None], 0, rows, columns].unsqueeze(1)
    return shifted + NOISE * torch.randn(shifted.shape, generator=generator)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"name": "weights", "params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.01},
        {"name": "biases", "params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]


def batch(seed: int, step: int) -> Batch:
    images, labels, _, _ = data()
    generator = seeded("train", seed, step)
    chosen = torch.randint(len(images), (IMAGES,), generator=generator)
    return disturbed(images[chosen], generator), labels[chosen]


def losses(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


@cache
def held_out() -> list[Batch]:
    """The 500 other images, each disturbed four times: the task of training, on other
    handwriting."""
    _, _, images, labels = data()
    return [(disturbed(images.repeat(4, 1, 1, 1), seeded("validation")), labels.repeat(4))]


DIGITS = Problem(
    name="cnn-digits",
    steps=STEPS,
    batch_size=IMAGES,
    build=drawn(Classifier),
    groups=groups,
    batch=batch,
    spare=lambda seed, step, number: batch(seed, STEPS + number),
    losses=losses,
    held_out=held_out,
)
