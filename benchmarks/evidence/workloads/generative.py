"""Generative models: autoencoders, diffusion, a normalising flow, a mixture density network."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..problems import Batch, digits
from .kit import Draw, Field, mlp
from .vision import on_digits

FIELD = Field("generative models")


def _images(g: Draw) -> Tensor:
    images = digits.data()[0]
    return images[g.below(len(images), digits.IMAGES)]


# -- a variational autoencoder, handwritten digits -------------------------------------------------


class Autoencoder(nn.Module):
    """images (batch, 64) in [0, 1] -> -ELBO (batch,) in nats, with noise of its own."""

    def __init__(self, width: int = 128, code: int = 8) -> None:
        super().__init__()
        self.inside = mlp(64, width, 2 * code, of=nn.SiLU)
        self.outside = mlp(code, width, 64, of=nn.SiLU)

    def forward(self, images: Tensor) -> Tensor:
        mean, spread = self.inside(images).chunk(2, 1)
        logits = self.outside(mean + torch.randn_like(mean) * (0.5 * spread).exp())
        rebuilt = F.binary_cross_entropy_with_logits(logits, images, reduction="none").sum(1)
        return rebuilt + 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(1)


def _bound(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch[0])


def _pictures() -> list[Batch]:
    """Each eight times, for as many draws of the noise."""
    return [(digits.data()[2].flatten(1).repeat(8, 1),)]


FIELD.add(
    "vae-digits", "digits", "adamw-0.95", "cosine", 1e-3, Autoencoder, _bound,
    on_digits(
        lambda seed, step: (_images(Draw("autoencoder", seed, step)).flatten(1),), _pictures
    ),
    decay=0.0,
)  # fmt: skip


# -- a diffusion denoiser, handwritten digits ------------------------------------------------------


class Denoiser(nn.Module):
    """images (batch, 64) with noise, times (batch,) in [0, 1] -> the noise (batch, 64)."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.frequencies = nn.Buffer(torch.exp(torch.linspace(0, 5, 16)))
        self.inside, self.time = nn.Linear(64, width), nn.Linear(32, width)
        self.out = nn.Linear(width, 64)
        self.body = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), mlp(width, 2 * width, width, of=nn.SiLU))
            for _ in range(3)
        )

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        phases = times[:, None] * self.frequencies
        x = self.inside(images) + self.time(torch.cat([phases.sin(), phases.cos()], 1))
        for block in self.body:
            x = x + block(x)
        return self.out(x)


def _noisy(images: Tensor, g: Draw) -> Batch:
    """(images with noise, times, noise) at random times; alpha-bar is cos^2 (improved DDPM)."""
    flat = 2 * images.flatten(1) - 1
    times, noise = g.rand(len(flat)), g.randn(*flat.shape)
    angle = 0.5 * torch.pi * times[:, None]
    return angle.cos() * flat + angle.sin() * noise, times, noise


def _noised(seed: int, step: int) -> Batch:
    g = Draw("diffusion", seed, step)
    return _noisy(_images(g), g)


def _noised_held_out() -> list[Batch]:
    return [_noisy(digits.data()[2].repeat(8, 1, 1, 1), Draw("diffusion", "validation"))]


def _noise_losses(model: nn.Module, batch: Batch) -> Tensor:
    images, times, noise = batch
    return (model(images, times) - noise).square().mean(1)


FIELD.add(
    "diffusion-digits", "digits, a denoiser", "adamw-0.999", "wsd", 1e-3,
    Denoiser, _noise_losses, on_digits(_noised, _noised_held_out), decay=0.0,
)  # fmt: skip


# -- a normalising flow (arXiv 1605.08803): the density of spirals in eight dimensions -------------

SPIRAL_SIZE = 8


class Flow(nn.Module):
    """x (batch, 8) -> log density (batch,)"""

    def __init__(self, width: int = 48, layers: int = 6) -> None:
        super().__init__()
        sizes = (SPIRAL_SIZE // 2, width, width, SPIRAL_SIZE)
        self.couplings = nn.ModuleList(mlp(*sizes, of=nn.SiLU) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        log_volume = x.new_zeros(len(x))
        for coupling in self.couplings:
            log_scale, shift = coupling(a).chunk(2, -1)
            log_scale = 2 * torch.tanh(log_scale / 2)
            a, b = b * log_scale.exp() + shift, a
            log_volume = log_volume + log_scale.sum(-1)
        normal = 0.5 * (a.square() + b.square()).sum(-1)
        return log_volume - normal - SPIRAL_SIZE / 2 * math.log(2 * math.pi)


@cache
def _rotation() -> Tensor:
    return torch.linalg.qr(Draw("flow", "turn").randn(SPIRAL_SIZE, SPIRAL_SIZE))[0]


def _flow_losses(model: nn.Module, batch: Batch) -> Tensor:
    return -model(batch[0])


@FIELD.workload(
    "flow-spirals", "a density in eight dimensions", "adamw-0.999", "one-cycle", 1e-3,
    Flow, _flow_losses, key="flow", size=64, decay=0.0,
)  # fmt: skip
def _spirals(g: Draw, count: int) -> Batch:
    t = 3 * math.pi * g.rand(count, 1).sqrt()
    arm = g.below(2, count, 1) * 2 - 1
    plane = arm * torch.cat([t.cos(), t.sin()], 1) * t / 4
    rest = g.randn(count, SPIRAL_SIZE - 2) * (0.3 + 0.2 * plane.norm(dim=1, keepdim=True))
    return (torch.cat([plane + 0.1 * g.randn(count, 2), rest], 1) @ _rotation(),)


# -- a vector-quantised autoencoder: a mixture of bent Gaussians; its loss rises at first ----------

PARTS, CODES, LATENT, MIXED, SIZE = 4, 64, 8, 60, 24


class Quantizer(nn.Module):
    """(batch, 24) -> (reconstruction, commitment and codebook's loss (batch,)).

    Latents have four parts, each replaced by the nearest of 64 codes, with straight-through
    gradients (van den Oord, Vinyals, Kavukcuoglu, arXiv 1711.00937).
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(SIZE, 128, PARTS * LATENT), mlp(PARTS * LATENT, 128, SIZE)
        self.codes = nn.Parameter(torch.empty(PARTS, CODES, LATENT).uniform_(-1 / CODES, 1 / CODES))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x).view(-1, PARTS, LATENT)
        nearest = (z.transpose(0, 1)[:, :, None] - self.codes[:, None]).square().sum(-1).argmin(-1)
        found = torch.stack([self.codes[part][nearest[part]] for part in range(PARTS)], 1)
        apart = 0.25 * (z - found.detach()).square() + (z.detach() - found).square()
        return self.decoder((z + (found - z).detach()).flatten(1)), apart.sum((1, 2)) / LATENT


def _reconstruction(model: nn.Module, batch: Batch) -> Tensor:
    [x] = batch
    again, apart = model(x)
    return (again - x).square().mean(1) + apart


@FIELD.workload(
    "vqvae-mixture", "the loss rises at first", "adamw-0.999", "cosine", 1e-3,
    Quantizer, _reconstruction, key="misleading", size=64,
)  # fmt: skip
def _mixture(g: Draw, count: int) -> Batch:
    common = Draw("misleading", "mixture")
    centers, bend = common.randn(MIXED, SIZE), common.randn(LATENT, SIZE)
    of = g.below(MIXED, count)
    return (centers[of] + 0.5 * torch.tanh(g.randn(count, LATENT) @ bend),)


# -- a mixture density network (Bishop 1994): y is one of three functions of x ---------------------

COMPONENTS = 6


def _mixture_losses(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    weight, center, log_spread = model(x).chunk(3, -1)
    off = (y[:, None] - center) * torch.exp(-log_spread)
    return -torch.logsumexp(
        weight.log_softmax(-1) - 0.5 * off.square() - log_spread - 0.5 * math.log(2 * math.pi), -1
    )


@FIELD.workload(
    "mixture-density-branches", "one of three functions", "adamw-0.95", "one-cycle", 1e-3,
    lambda: mlp(3, 64, 64, 3 * COMPONENTS, of=nn.SiLU), _mixture_losses, key="forked", size=64,
)  # fmt: skip
def _branches(g: Draw, count: int) -> Batch:
    x, branch = 4 * g.rand(count, 3) - 2, g.below(3, count)
    a, b, c = x.T
    branches = torch.stack([torch.sin(2 * a) * b, c.square() - 1, torch.cos(3 * b) + a], 1)
    spread = 0.05 + 0.1 * c.abs()
    return x, branches.gather(1, branch[:, None])[:, 0] + spread * g.randn(count)
