"""Images: handwritten digits (scikit-learn's, 8 x 8), strokes, shapes, textures, and pictures."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..problems import PROBLEMS, Batch, digits
from .kit import (
    FAR,
    Draw,
    Examples,
    Field,
    encoder,
    for_muon,
    labelled,
    mlp,
    rising,
    squares,
)

FIELD, CLASSES = Field("vision"), 10
NOISY_DIGITS = "digits with noise"
FIELD.known(PROBLEMS["cnn-digits"], NOISY_DIGITS, "adamw-0.95", "wsd", 1e-3)


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
        shapes = ((width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2))
        self.body = nn.Sequential(*(Residual(*shape) for shape in shapes))
        self.out = nn.Linear(4 * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.out(self.body(F.relu(self.norm(self.stem(images)))).mean((2, 3)))


class ViT(nn.Module):
    """images (batch, 1, 8, 8), as sixteen patches of 2 x 2 -> logits (batch, 10)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        self.body = encoder(width, 4 * width, activation="gelu")
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

        def plain(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.inside, self.out = plain(4, width), plain(width, CLASSES)
        self.mixed = nn.ModuleList(
            nn.Sequential(plain(size, 2 * size), nn.GELU(), plain(2 * size, size))
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
    batch: Callable[[int, int], Batch] = digits.batch,
    held_out: Callable[[], list[Batch]] = digits.held_out,
    spare_from: int = FAR,
) -> Examples:
    return Examples(batch, lambda seed, step, number: batch(seed, spare_from + number), held_out)


FIELD.add(
    "resnet-digits-sgd", NOISY_DIGITS, "sgd", "cosine", 0.1,
    ResNet, labelled, on_digits(), decay=5e-4,
)  # fmt: skip
FIELD.add(
    "vit-digits", NOISY_DIGITS, "adamw-0.999", "cosine", 1e-3,
    ViT, labelled, on_digits(), decay=0.05,
)  # fmt: skip
FIELD.add(
    "mixer-digits", NOISY_DIGITS, "muon", "one-cycle", 0.02, Mixer, labelled, on_digits()
)  # fmt: skip


# -- handwritten digits: weights of one bit, straight-through gradients (arXiv 1602.02830) ---------


class SignConv(nn.Conv2d):
    """A convolution with the signs of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        signs = torch.where(self.weight >= 0, 1.0, -1.0)
        return F.conv2d(x, self.weight + (signs - self.weight).detach(), None, padding=1)


def _binary_cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in ((1, 16), (16, 32), (32, 32)):
        layers += [SignConv(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b)]
        layers += [nn.Hardtanh(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, CLASSES))


FIELD.add(
    "binary-cnn-digits", "digits with noise, one-bit weights", "sgd", "cosine", 0.1,
    _binary_cnn, labelled, on_digits(spare_from=digits.STEPS), decay=1e-4, steps=digits.STEPS,
)  # fmt: skip


# -- convolutions: which of sixteen strokes is drawn on 12 x 12 dots, under noise ------------------

STROKES, STROKE_SIDE = 16, 12


def stroke_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(),
        mlp(24 * 9, 48, STROKES),
    )  # fmt: skip


@cache
def _templates(alphabet: str) -> Tensor:
    """(16, 12, 12), each a random walk of 18 dots."""
    g, walks = Draw("letters", alphabet), torch.zeros(STROKES, STROKE_SIDE, STROKE_SIDE)
    for walk in walks:
        place = g.between(3, 9, 2)
        for _ in range(18):
            walk[tuple(place.tolist())] = 1.0
            place = (place + g.between(-1, 2, 2)).clamp(1, STROKE_SIDE - 2)
    return walks


FIRST_STROKES = ("letters", "first")


@FIELD.workload(
    "cnn-strokes-rising-noise", "strokes under ever more noise", "adamw-0.999", "cosine", 1e-3,
    stroke_cnn, labelled, key=FIRST_STROKES, decay=0.0, varies=rising(0.0, 0.3, 0.7, 1.0),
)  # fmt: skip
@FIELD.workload(
    "cnn-strokes", "strokes under noise", "sgd", "one-cycle", 0.1,
    stroke_cnn, labelled, key=FIRST_STROKES,
)  # fmt: skip
def strokes(g: Draw, count: int, noise: float = 0.7) -> Batch:
    """The second part of the key says which alphabet they are from."""
    y, shift = g.below(STROKES, count), g.between(-1, 2, count, 2).tolist()
    letters = _templates(str(g.key[1]))[y]
    moved = [torch.roll(x, tuple(by), (0, 1)) for x, by in zip(letters, shift, strict=True)]
    return (torch.stack(moved) + noise * g.randn(count, STROKE_SIDE, STROKE_SIDE))[:, None], y


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
        self.down, self.deep = _block(1, width), _block(width, 2 * width)
        self.up, self.out = _block(3 * width, width), nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down(x)
        coarse = self.deep(F.max_pool2d(fine, 2))
        return self.out(self.up(torch.cat([fine, F.interpolate(coarse, scale_factor=2)], 1)))


@FIELD.workload(
    "unet-shapes", "segmentation of discs and bars", "sgd", "linear", 0.1,
    UNet, labelled, key="shapes", size=16, decay=5e-4,
)  # fmt: skip
def _shapes(g: Draw, count: int) -> Batch:
    y, x = torch.meshgrid(torch.arange(SHAPE_SIDE), torch.arange(SHAPE_SIDE), indexing="ij")
    center, size = g.between(2, SHAPE_SIDE - 2, 4, count, 1, 1), g.rand(2, count, 1, 1)
    disc = (y - center[0]).square() + (x - center[1]).square() < (2 + 3 * size[0]) ** 2
    bar = ((y - center[2]).abs() < 2) & ((x - center[3]).abs() < 2 + 4 * size[1])
    kind = torch.where(bar, 2, torch.where(disc, 1, 0))
    seen = (kind > 0).float() + 0.8 * g.randn(count, SHAPE_SIDE, SHAPE_SIDE)
    return seen[:, None], kind


# -- convolutions: which of twelve textures; one label in five is random, a finite set -------------

TEXTURES, TEXTURE_SIDE = 12, 16


def _texture_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, TEXTURES),
    )  # fmt: skip


@FIELD.workload(
    "cnn-textures", "20 % of the labels random, seen 5 times", "sgd", "one-cycle", 0.1,
    _texture_cnn, labelled, key="gratings", decay=5e-4, epochs=5,
)  # fmt: skip
def _textures(g: Draw, count: int) -> Batch:
    """Each texture has two waves, of random phase and contrast."""
    common = Draw("gratings", "waves")
    turn, pace = math.pi * common.rand(TEXTURES, 2), 0.5 + common.rand(TEXTURES, 2)
    kind = g.below(TEXTURES, count)
    down, across = (pace * turn.sin())[kind], (pace * turn.cos())[kind]
    phase, contrast = 2 * math.pi * g.rand(count, 2), 0.5 + g.rand(count, 2)
    down, across, phase, contrast = (x[:, :, None, None] for x in (down, across, phase, contrast))
    at = torch.arange(TEXTURE_SIDE)
    waves = down * at[:, None] + across * at + phase
    seen = (contrast * waves.sin()).sum(1, keepdim=True)
    named = g.wrong(kind, TEXTURES, 0.2)
    return seen + g.randn(*seen.shape), named


# -- how far a picture has moved, from a correlation of features (FlowNet, arXiv 1504.06852) -------

PICTURE_SIDE, FARTHEST = 8, 2
MOVES = (2 * FARTHEST + 1) ** 2


class _FlowNet(nn.Module):
    """Two pictures (batch, 2, side, side) -> logits of the shift (batch, 25)"""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, width, 5, padding=2), nn.GELU())
        self.layers = mlp(MOVES, 64, MOVES, of=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.features(x.flatten(0, 1)[:, None]).unflatten(0, (-1, 2)).unbind(1)
        inner = first[:, :, FARTHEST:-FARTHEST, FARTHEST:-FARTHEST]
        alike = inner.flatten(1)[:, None] @ F.unfold(second, PICTURE_SIDE - 2 * FARTHEST)
        return self.layers(alike[:, 0] / PICTURE_SIDE)


@FIELD.workload(
    "flownet-shifts", "how far a picture has moved", "fused-muon", "linear", 1e-3,
    _FlowNet, labelled, key="moved", size=16, decay=for_muon,
)  # fmt: skip
def _shifted(g: Draw, count: int) -> Batch:
    """Two parts of a smooth scene; each has its own noise and brightness."""
    wide = PICTURE_SIDE + 2 * FARTHEST
    scene = F.avg_pool2d(g.randn(count, 1, wide + 1, wide + 1), 2, 1)[:, 0] * 2
    move = g.below(MOVES, count)
    down, across = move // (2 * FARTHEST + 1), move % (2 * FARTHEST + 1)
    at, example = torch.arange(PICTURE_SIDE), torch.arange(count)[:, None, None]
    later = scene[example, (down[:, None] + at)[:, :, None], (across[:, None] + at)[:, None]]
    pictures = torch.stack([scene[:, FARTHEST:-FARTHEST, FARTHEST:-FARTHEST], later], 1)
    noise, light = g.randn(*pictures.shape), g.randn(count, 2, 1, 1)
    return pictures + 0.8 * noise + 0.5 * light, move


# -- a sine network (SIREN, arXiv 2006.09661): the brightness of a picture at coordinates ----------

SPOTS = 40


class Siren(nn.Module):
    """(batch, 2) in [-1, 1] -> (batch,)"""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, width) for a in (2, width, width))
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
    """Places, sizes, brightness."""
    g = Draw("painted", "spots")
    return 2 * g.rand(SPOTS, 2) - 1, 0.05 + 0.2 * g.rand(SPOTS), g.randn(SPOTS)


@FIELD.workload(
    "siren-picture", "brightness at coordinates", "adamw-0.999", "linear", 1e-3,
    Siren, squares, key="painted", size=128, decay=0.0,
)  # fmt: skip
def _picture(g: Draw, count: int) -> Batch:
    at, size, light = _spots()
    x = 2 * g.rand(count, 2) - 1
    away = (x[:, None] - at).square().sum(-1) / size.square()
    edges = torch.sign(torch.sin(9 * x[:, 0] + 4 * x[:, 1]))
    return x, (light * torch.exp(-away)).sum(-1) + 0.3 * edges


# -- an MLP on Fourier features of coordinates: the colours of a picture ---------------------------


class _FourierMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bands = nn.Buffer(3.0 * Draw("coordinates", "bands").randn(2, 24))
        self.layers = mlp(48, 96, 96, 96, 3)

    def forward(self, place: Tensor) -> Tensor:
        at = 2 * math.pi * place @ self.bands
        return self.layers(torch.cat([at.sin(), at.cos()], 1))


@cache
def _discs() -> tuple[Tensor, Tensor, Tensor]:
    """Middles, sizes, colours."""
    g = Draw("coordinates", "strokes")
    return g.rand(60, 2), 0.03 + 0.1 * g.rand(60), g.rand(60, 3)


def _colour_losses(model: nn.Module, batch: Batch) -> Tensor:
    return squares(model, batch).sum(1)


@FIELD.workload(
    "fourier-mlp-picture", "colours at coordinates", "fused-muon", "linear", 1e-3,
    _FourierMLP, _colour_losses, key="coordinates", size=128, decay=for_muon,
)  # fmt: skip
def _coloured_places(g: Draw, count: int) -> Batch:
    place = g.rand(count, 2)
    middles, sizes, colours = _discs()
    near = torch.sigmoid((sizes - torch.cdist(place, middles)) * 60)
    left = torch.cat([torch.ones(count, 1), (1 - near).cumprod(1)[:, :-1]], 1)
    return place, (near * left) @ colours
