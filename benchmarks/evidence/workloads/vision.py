"""Images: handwritten digits (scikit-learn's, 8 x 8), strokes, shapes, textures, and pictures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..problems import digits
from ..problems.digits import seeded
from ..problems.problem import Batch, Problem, drawn, mean_loss
from .generated import Key, finite, labelled, problem, squares
from .groups import decaying_matrices, hidden_matrices
from .staged import staged

IMAGES, CLASSES = 32, 10


# -- handwritten digits: a residual network with BatchNorm, a vision transformer, an MLP-Mixer -----


class Residual(nn.Module):
    def __init__(self, inside: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.short = nn.Conv2d(inside, out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.short(x))


class ResNet(nn.Module):
    """images (batch, 1, 8, 8) -> logits (batch, 10)."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.body = nn.Sequential(
            Residual(width, width, 1),
            Residual(width, 2 * width, 2),
            Residual(2 * width, 4 * width, 2),
        )
        self.out = nn.Linear(4 * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.out(self.body(F.relu(self.norm(self.stem(images)))).mean((2, 3)))


class ViT(nn.Module):
    """images (batch, 1, 8, 8), as sixteen patches of 2 x 2 -> logits (batch, 10)."""

    def __init__(self, width: int = 32, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(
            width,
            heads,
            4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.out(self.norm(self.body(x)).mean(1))


class Mixer(nn.Module):
    """images (batch, 1, 8, 8), as sixteen patches of 2 x 2 -> logits (batch, 10).

    An MLP-Mixer without biases and gains, so that Muon trains all of it.
    """

    def __init__(self, width: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.inside, self.out = (
            nn.Linear(4, width, bias=False),
            nn.Linear(width, CLASSES, bias=False),
        )
        self.mixed = nn.ModuleList(
            nn.Sequential(
                nn.Linear(size, 2 * size, bias=False),
                nn.GELU(),
                nn.Linear(2 * size, size, bias=False),
            )
            for _ in range(layers)
            for size in (16, width)
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.inside(F.unfold(images, 2, stride=2).transpose(1, 2))
        for across, within in zip(self.mixed[::2], self.mixed[1::2], strict=True):
            x = x + across(F.rms_norm(x, x.shape[-1:]).transpose(1, 2)).transpose(1, 2)
            x = x + within(F.rms_norm(x, x.shape[-1:]))
        return self.out(F.rms_norm(x, x.shape[-1:]).mean(1))


def on_digits(
    name: str,
    kind: type[nn.Module],
    decay: float,
    batch: Callable[[int, int], Batch],
    losses: Callable[[nn.Module, Batch], Tensor],
    validate: Callable[[nn.Module], float],
) -> Problem:
    return Problem(
        name=name,
        steps=1500,
        batch_size=IMAGES,
        build=drawn(kind),
        groups=lambda model: decaying_matrices(model, decay),
        batch=batch,
        spare=lambda seed, step, number: batch(seed, 10_000_000 + number),
        losses=losses,
        validate=validate,
    )


def _classifier(name: str, kind: type[nn.Module], decay: float) -> Problem:
    return on_digits(
        name,
        kind,
        decay,
        digits.batch,
        digits.losses,
        lambda model: mean_loss(model, digits.losses, [digits.held_out()]),
    )


RESNET_DIGITS_SGD = _classifier("resnet-digits-sgd", ResNet, 5e-4)
VIT_DIGITS = _classifier("vit-digits", ViT, 0.05)
MIXER_DIGITS = _classifier("mixer-digits", Mixer, 0.01)


# -- handwritten digits: weights of one bit, straight-through gradients (arXiv 1602.02830) ---------


class SignConv(nn.Conv2d):
    """A convolution with the signs of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        signs = torch.where(self.weight >= 0, 1.0, -1.0)
        return F.conv2d(x, self.weight + (signs - self.weight).detach(), None, padding=1)


def _binary_cnn() -> nn.Module:
    blocks = [(1, 16), (16, 32), (32, 32)]
    layers = [
        layer
        for a, b in blocks
        for layer in (
            SignConv(a, b, 3, padding=1, bias=False),
            nn.BatchNorm2d(b),
            nn.Hardtanh(),
            nn.MaxPool2d(2),
        )
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 10))


BINARY_CNN_DIGITS = replace(
    digits.DIGITS,
    name="binary-cnn-digits",
    build=drawn(_binary_cnn),
    groups=lambda model: decaying_matrices(model, 1e-4),
)


# -- convolutions: which of sixteen strokes is drawn on 12 x 12 dots, under noise ------------------

STROKES, STROKE_SIDE = 16, 12


def stroke_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Linear(24 * 9, 48),
        nn.ReLU(),
        nn.Linear(48, STROKES),
    )


@cache
def _templates(alphabet: str) -> Tensor:
    """(16, 12, 12), each a random walk of 18 dots."""
    generator, walks = seeded("letters", alphabet), torch.zeros(STROKES, STROKE_SIDE, STROKE_SIDE)
    for walk in walks:
        place = torch.randint(3, 9, (2,), generator=generator)
        for _ in range(18):
            walk[tuple(place.tolist())] = 1.0
            place = (place + torch.randint(-1, 2, (2,), generator=generator)).clamp(
                1, STROKE_SIDE - 2
            )
    return walks


def strokes(key: Key, count: int, alphabet: str = "first", noise: float = 0.7) -> Batch:
    generator = seeded("letters", alphabet, *key)
    y, shift = (
        torch.randint(STROKES, (count,), generator=generator),
        torch.randint(-1, 2, (count, 2), generator=generator).tolist(),
    )
    drawn_at = torch.stack(
        [
            torch.roll(_templates(alphabet)[letter], tuple(by), (0, 1))
            for letter, by in zip(y.tolist(), shift, strict=True)
        ]
    )
    return (drawn_at + noise * torch.randn(count, STROKE_SIDE, STROKE_SIDE, generator=generator))[
        :, None
    ], y


NOISES = (0.0, 0.3, 0.7, 1.0)
"""Standard deviation of the noise in each stage."""
CNN_STROKES = problem("cnn-strokes", drawn(stroke_cnn), strokes, labelled)
CNN_STROKES_RISING_NOISE = staged(
    "cnn-strokes-rising-noise",
    drawn(stroke_cnn),
    lambda key, count, stage: strokes(key, count, noise=NOISES[stage]),
    labelled,
)


# -- a U-Net: which pixels belong to discs, to bars, and to nothing (segmentation) -----------------

SHAPE_SIDE = 16


def _block(into: int, out: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(into, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()
    )


class UNet(nn.Module):
    """(batch, 1, 16, 16) -> logits (batch, 3, 16, 16): a U-Net of two levels."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down, self.deep, self.up = (
            _block(1, width),
            _block(width, 2 * width),
            _block(3 * width, width),
        )
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down(x)
        coarse = self.deep(F.max_pool2d(fine, 2))
        return self.out(self.up(torch.cat([fine, F.interpolate(coarse, scale_factor=2)], 1)))


def _shapes(key: Key, count: int) -> Batch:
    generator = seeded("shapes", *key)
    y, x = torch.meshgrid(torch.arange(SHAPE_SIDE), torch.arange(SHAPE_SIDE), indexing="ij")
    center, size = (
        torch.randint(2, SHAPE_SIDE - 2, (4, count, 1, 1), generator=generator),
        torch.rand(2, count, 1, 1, generator=generator),
    )
    disc = (y - center[0]).square() + (x - center[1]).square() < (2 + 3 * size[0]) ** 2
    bar = ((y - center[2]).abs() < 2) & ((x - center[3]).abs() < 2 + 4 * size[1])
    kind = torch.where(bar, 2, torch.where(disc, 1, 0))
    seen = (kind > 0).float() + 0.8 * torch.randn(
        count, SHAPE_SIDE, SHAPE_SIDE, generator=generator
    )
    return seen[:, None], kind


def _pixel_losses(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none").mean((1, 2))


UNET_SHAPES = problem("unet-shapes", drawn(UNet), _shapes, _pixel_losses, size=16, decay=5e-4)


# -- convolutions: which of twelve textures; one label in five is random, a finite set -------------

TEXTURES, TEXTURE_SIDE = 12, 16


def _texture_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, TEXTURES),
    )  # fmt: skip


def _textures(key: Key, count: int) -> Batch:
    """Each texture has two waves, of random phase and contrast."""
    generator, common = seeded("gratings", *key), seeded("gratings", "waves")
    turn, pace = (
        math.pi * torch.rand(TEXTURES, 2, generator=common),
        0.5 + torch.rand(TEXTURES, 2, generator=common),
    )
    kind = torch.randint(TEXTURES, (count,), generator=generator)
    down, across = (pace * turn.sin())[kind], (pace * turn.cos())[kind]
    phase, contrast = (
        2 * math.pi * torch.rand(count, 2, generator=generator),
        0.5 + torch.rand(count, 2, generator=generator),
    )
    at = torch.arange(TEXTURE_SIDE)
    waves = (
        down[:, :, None, None] * at[:, None]
        + across[:, :, None, None] * at
        + phase[:, :, None, None]
    )
    seen = (contrast[:, :, None, None] * waves.sin()).sum(1, keepdim=True)
    named = torch.where(
        torch.rand(count, generator=generator) < 0.2,
        torch.randint(TEXTURES, (count,), generator=generator),
        kind,
    )
    return seen + torch.randn(seen.shape, generator=generator), named


CNN_TEXTURES = finite(
    problem("cnn-textures", drawn(_texture_cnn), _textures, labelled, decay=5e-4),
    _textures,
    epochs=5,
    key="gratings",
)


# -- how far a picture has moved, from a correlation of features (FlowNet, arXiv 1504.06852) -------

PICTURE_SIDE, FARTHEST = 8, 2
MOVES = (2 * FARTHEST + 1) ** 2


class _FlowNet(nn.Module):
    """Two pictures (batch, 2, side, side) -> logits of the shift (batch, 25)"""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, width, 5, padding=2), nn.GELU())
        self.layers = nn.Sequential(nn.Linear(MOVES, 64), nn.GELU(), nn.Linear(64, MOVES))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.features(x.flatten(0, 1)[:, None]).unflatten(0, (-1, 2)).unbind(1)
        inner = first[:, :, FARTHEST:-FARTHEST, FARTHEST:-FARTHEST]
        alike = inner.flatten(1)[:, None] @ F.unfold(second, PICTURE_SIDE - 2 * FARTHEST)
        return self.layers(alike[:, 0] / PICTURE_SIDE)


def _shifted(key: Key, count: int) -> Batch:
    """Two parts of a smooth scene; each has its own noise and brightness."""
    generator = seeded("moved", *key)
    wide = PICTURE_SIDE + 2 * FARTHEST
    scene = (
        F.avg_pool2d(torch.randn(count, 1, wide + 1, wide + 1, generator=generator), 2, 1)[:, 0] * 2
    )
    move = torch.randint(MOVES, (count,), generator=generator)
    down, across = move // (2 * FARTHEST + 1), move % (2 * FARTHEST + 1)
    at, example = torch.arange(PICTURE_SIDE), torch.arange(count)[:, None, None]
    later = scene[example, (down[:, None] + at)[:, :, None], (across[:, None] + at)[:, None]]
    pictures = torch.stack([scene[:, FARTHEST:-FARTHEST, FARTHEST:-FARTHEST], later], 1)
    noise, light = (
        torch.randn(pictures.shape, generator=generator),
        torch.randn(count, 2, 1, 1, generator=generator),
    )
    return pictures + 0.8 * noise + 0.5 * light, move


FLOWNET_SHIFTS = replace(
    problem("flownet-shifts", drawn(_FlowNet), _shifted, labelled, size=16), groups=hidden_matrices
)


# -- a sine network (SIREN, arXiv 2006.09661): the brightness of a picture at coordinates ----------

SPOTS = 40


class Siren(nn.Module):
    """(batch, 2) in [-1, 1] -> (batch,)"""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(2, width), nn.Linear(width, width), nn.Linear(width, width)]
        )
        self.out = nn.Linear(width, 1)
        nn.init.uniform_(self.layers[0].weight, -0.5, 0.5)
        for layer in self.layers[1:]:
            nn.init.uniform_(layer.weight, -math.sqrt(6 / width) / 20, math.sqrt(6 / width) / 20)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(20 * layer(x))
        return self.out(x)[:, 0]


@cache
def _spots() -> tuple[Tensor, Tensor, Tensor]:
    generator = seeded("painted", "spots")
    at, size = (
        2 * torch.rand(SPOTS, 2, generator=generator) - 1,
        0.05 + 0.2 * torch.rand(SPOTS, generator=generator),
    )
    return at, size, torch.randn(SPOTS, generator=generator)


def _picture(key: Key, count: int) -> Batch:
    at, size, light = _spots()
    x = 2 * torch.rand(count, 2, generator=seeded("painted", *key)) - 1
    away = (x[:, None] - at).square().sum(-1) / size.square()
    return x, (light * torch.exp(-away)).sum(-1) + 0.3 * torch.sign(
        torch.sin(9 * x[:, 0] + 4 * x[:, 1])
    )


SIREN_PICTURE = problem("siren-picture", drawn(Siren), _picture, squares, size=128, decay=0.0)


# -- an MLP on Fourier features of coordinates: the colours of a picture ---------------------------


class _FourierMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "bands", 3.0 * torch.randn(2, 24, generator=seeded("coordinates", "bands"))
        )
        self.layers = nn.Sequential(
            nn.Linear(48, 96),
            nn.ReLU(),
            nn.Linear(96, 96),
            nn.ReLU(),
            nn.Linear(96, 96),
            nn.ReLU(),
            nn.Linear(96, 3),
        )

    def forward(self, place: Tensor) -> Tensor:
        at = 2 * math.pi * place @ self.bands
        return self.layers(torch.cat([at.sin(), at.cos()], 1))


@cache
def _discs() -> tuple[Tensor, Tensor, Tensor]:
    generator = seeded("coordinates", "strokes")
    return (
        torch.rand(60, 2, generator=generator),
        0.03 + 0.1 * torch.rand(60, generator=generator),
        torch.rand(60, 3, generator=generator),
    )


def _coloured_places(key: Key, count: int) -> Batch:
    place = torch.rand(count, 2, generator=seeded("coordinates", *key))
    middles, sizes, colours = _discs()
    near = torch.sigmoid((sizes - torch.cdist(place, middles)) * 60)
    left = torch.cat([torch.ones(count, 1), (1 - near).cumprod(1)[:, :-1]], 1)
    return place, (near * left) @ colours


def _colour_losses(model: nn.Module, batch: Batch) -> Tensor:
    return squares(model, batch).sum(1)


FOURIER_MLP_PICTURE = replace(
    problem("fourier-mlp-picture", drawn(_FourierMLP), _coloured_places, _colour_losses, size=128),
    groups=hidden_matrices,
)
