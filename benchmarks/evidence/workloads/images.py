"""On scikit-learn's handwritten digits (8 x 8): a residual network with BatchNorm, a vision transformer, a mixer of matrices alone, a diffusion
denoiser, and a variational autoencoder."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..problems import digits
from ..problems.problem import Batch, Problem, drawn, mean_loss
from .groups import decaying_matrices

IMAGES, CLASSES = 32, 10


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
        self.body = nn.Sequential(Residual(width, width, 1), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2))
        self.out = nn.Linear(4 * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.out(self.body(F.relu(self.norm(self.stem(images)))).mean((2, 3)))


class ViT(nn.Module):
    """images (batch, 1, 8, 8), as sixteen patches of 2 x 2 -> logits (batch, 10)."""

    def __init__(self, width: int = 32, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.out(self.norm(self.body(x)).mean(1))


class Mixer(nn.Module):
    """images (batch, 1, 8, 8), as sixteen patches of 2 x 2 -> logits (batch, 10). An MLP-Mixer without biases and gains: Muon trains all of it."""

    def __init__(self, width: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(4, width, bias=False), nn.Linear(width, CLASSES, bias=False)
        self.mixed = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 2 * size, bias=False), nn.GELU(), nn.Linear(2 * size, size, bias=False))
            for _ in range(layers)
            for size in (16, width)
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.inside(F.unfold(images, 2, stride=2).transpose(1, 2))
        for across, within in zip(self.mixed[::2], self.mixed[1::2], strict=True):
            x = x + across(F.rms_norm(x, x.shape[-1:]).transpose(1, 2)).transpose(1, 2)
            x = x + within(F.rms_norm(x, x.shape[-1:]))
        return self.out(F.rms_norm(x, x.shape[-1:]).mean(1))


class Autoencoder(nn.Module):
    """images (batch, 64) in [0, 1] -> -ELBO (batch,) in nats; it draws its own noise."""

    def __init__(self, width: int = 128, code: int = 8) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, 2 * code))
        self.outside = nn.Sequential(nn.Linear(code, width), nn.SiLU(), nn.Linear(width, 64))

    def forward(self, images: Tensor) -> Tensor:
        mean, spread = self.inside(images).chunk(2, 1)
        logits = self.outside(mean + torch.randn_like(mean) * (0.5 * spread).exp())
        rebuilt = F.binary_cross_entropy_with_logits(logits, images, reduction="none").sum(1)
        return rebuilt + 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(1)


class Denoiser(nn.Module):
    """images (batch, 64) with noise, times (batch,) in [0, 1] -> the noise (batch, 64)."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.frequencies = nn.Buffer(torch.exp(torch.linspace(0, 5, 16)))
        self.inside, self.time, self.out = nn.Linear(64, width), nn.Linear(32, width), nn.Linear(width, 64)
        self.body = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(3)
        )

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        phases = times[:, None] * self.frequencies
        x = self.inside(images) + self.time(torch.cat([phases.sin(), phases.cos()], 1))
        for block in self.body:
            x = x + block(x)
        return self.out(x)


def _noisy(images: Tensor, generator: torch.Generator) -> Batch:
    """(images with noise, times, noise) at times of their own; alpha-bar is cos^2, as in improved DDPM."""
    flat = 2 * images.flatten(1) - 1
    times, noise = torch.rand(len(flat), generator=generator), torch.randn(flat.shape, generator=generator)
    angle = 0.5 * torch.pi * times[:, None]
    return angle.cos() * flat + angle.sin() * noise, times, noise


def _noised(seed: int, step: int) -> Batch:
    images, _, _, _ = digits.data()
    generator = digits.seeded("diffusion", seed, step)
    return _noisy(images[torch.randint(len(images), (IMAGES,), generator=generator)], generator)


@cache
def _noised_held_out() -> Batch:
    _, _, images, _ = digits.data()
    return _noisy(images.repeat(8, 1, 1, 1), digits.seeded("diffusion", "validation"))


def _noise_losses(model: nn.Module, batch: Batch) -> Tensor:
    images, times, noise = batch
    return (model(images, times) - noise).square().mean(1)


def _on_digits(
    name: str, kind: type[nn.Module], decay: float, batch: Callable[[int, int], Batch], losses: Callable[[nn.Module, Batch], Tensor],
    validate: Callable[[nn.Module], float],
) -> Problem:  # fmt: skip
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
    return _on_digits(name, kind, decay, digits.batch, digits.losses, lambda model: mean_loss(model, digits.losses, [digits.held_out()]))


def _pictures(seed: int, step: int) -> Batch:
    images, _, _, _ = digits.data()
    return (images[torch.randint(len(images), (IMAGES,), generator=digits.seeded("autoencoder", seed, step))].flatten(1),)


def _bound(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch[0])


def _validated_bound(model: nn.Module) -> float:
    """Over 8 draws of the noise for each picture, the same each time."""
    pictures = digits.data()[2].flatten(1).repeat(8, 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return mean_loss(model, _bound, [(pictures,)])


RESNET, VIT, MIXER = _classifier("resnet", ResNet, 5e-4), _classifier("vit", ViT, 0.05), _classifier("mixer", Mixer, 0.01)
AUTOENCODER = _on_digits("autoencoder", Autoencoder, 0.0, _pictures, _bound, _validated_bound)
DIFFUSION = _on_digits(
    "diffusion", Denoiser, 0.0, _noised, _noise_losses, lambda model: mean_loss(model, _noise_losses, [_noised_held_out()])
)
