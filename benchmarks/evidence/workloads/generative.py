"""Generative models: autoencoders, diffusion, a normalising flow, a mixture density network."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..problems import digits
from ..problems.digits import seeded
from ..problems.problem import Batch, drawn, mean_loss
from .generated import Key, problem
from .vision import IMAGES, on_digits

# -- a variational autoencoder, handwritten digits -------------------------------------------------


class Autoencoder(nn.Module):
    """images (batch, 64) in [0, 1] -> -ELBO (batch,) in nats, with noise of its own."""

    def __init__(self, width: int = 128, code: int = 8) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, 2 * code))
        self.outside = nn.Sequential(nn.Linear(code, width), nn.SiLU(), nn.Linear(width, 64))

    def forward(self, images: Tensor) -> Tensor:
        mean, spread = self.inside(images).chunk(2, 1)
        logits = self.outside(mean + torch.randn_like(mean) * (0.5 * spread).exp())
        rebuilt = F.binary_cross_entropy_with_logits(logits, images, reduction="none").sum(1)
        return rebuilt + 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(1)


def _pictures(seed: int, step: int) -> Batch:
    images, _, _, _ = digits.data()
    return (
        images[
            torch.randint(
                len(images), (IMAGES,), generator=digits.seeded("autoencoder", seed, step)
            )
        ].flatten(1),
    )


def _bound(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch[0])


def _validated_bound(model: nn.Module) -> float:
    """The mean over 8 draws of the noise for each picture, the same draws every time."""
    pictures = digits.data()[2].flatten(1).repeat(8, 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return mean_loss(model, _bound, [(pictures,)])


VAE_DIGITS = on_digits("vae-digits", Autoencoder, 0.0, _pictures, _bound, _validated_bound)


# -- a diffusion denoiser, handwritten digits ------------------------------------------------------


class Denoiser(nn.Module):
    """images (batch, 64) with noise, times (batch,) in [0, 1] -> the noise (batch, 64)."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.frequencies = nn.Buffer(torch.exp(torch.linspace(0, 5, 16)))
        self.inside, self.time, self.out = (
            nn.Linear(64, width),
            nn.Linear(32, width),
            nn.Linear(width, 64),
        )
        self.body = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 2 * width),
                nn.SiLU(),
                nn.Linear(2 * width, width),
            )
            for _ in range(3)
        )

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        phases = times[:, None] * self.frequencies
        x = self.inside(images) + self.time(torch.cat([phases.sin(), phases.cos()], 1))
        for block in self.body:
            x = x + block(x)
        return self.out(x)


def _noisy(images: Tensor, generator: torch.Generator) -> Batch:
    """(images with noise, times, noise) at random times; alpha-bar is cos^2 (improved DDPM)."""
    flat = 2 * images.flatten(1) - 1
    times, noise = (
        torch.rand(len(flat), generator=generator),
        torch.randn(flat.shape, generator=generator),
    )
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


DIFFUSION_DIGITS = on_digits(
    "diffusion-digits",
    Denoiser,
    0.0,
    _noised,
    _noise_losses,
    lambda model: mean_loss(model, _noise_losses, [_noised_held_out()]),
)


# -- a normalising flow (arXiv 1605.08803): the density of spirals in eight dimensions -------------

SPIRAL_SIZE = 8


class Flow(nn.Module):
    """x (batch, 8) -> log density (batch,)"""

    def __init__(self, width: int = 48, layers: int = 6) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(
            nn.Sequential(
                nn.Linear(SPIRAL_SIZE // 2, width),
                nn.SiLU(),
                nn.Linear(width, width),
                nn.SiLU(),
                nn.Linear(width, SPIRAL_SIZE),
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        log_volume = x.new_zeros(len(x))
        for coupling in self.couplings:
            log_scale, shift = coupling(a).chunk(2, -1)
            log_scale = 2 * torch.tanh(log_scale / 2)
            a, b = b * log_scale.exp() + shift, a
            log_volume = log_volume + log_scale.sum(-1)
        return (
            log_volume
            - 0.5 * (a.square() + b.square()).sum(-1)
            - SPIRAL_SIZE / 2 * math.log(2 * math.pi)
        )


@cache
def _rotation() -> Tensor:
    return torch.linalg.qr(torch.randn(SPIRAL_SIZE, SPIRAL_SIZE, generator=seeded("flow", "turn")))[
        0
    ]


def _spirals(key: Key, count: int) -> Batch:
    generator = seeded("flow", *key)
    t = 3 * math.pi * torch.rand(count, 1, generator=generator).sqrt()
    arm = torch.randint(2, (count, 1), generator=generator) * 2 - 1
    plane = arm * torch.cat([t.cos(), t.sin()], 1) * t / 4
    rest = torch.randn(count, SPIRAL_SIZE - 2, generator=generator) * (
        0.3 + 0.2 * plane.norm(dim=1, keepdim=True)
    )
    return (
        torch.cat([plane + 0.1 * torch.randn(count, 2, generator=generator), rest], 1)
        @ _rotation(),
    )


def _flow_losses(model: nn.Module, batch: Batch) -> Tensor:
    return -model(batch[0])


FLOW_SPIRALS = problem("flow-spirals", drawn(Flow), _spirals, _flow_losses, size=64, decay=0.0)


# -- a vector-quantised autoencoder: a mixture of bent Gaussians; its loss rises at first ----------

PARTS, CODES, LATENT, MIXED, SIZE = 4, 64, 8, 60, 24


class Quantizer(nn.Module):
    """(batch, 24) -> (reconstruction, commitment and codebook's loss (batch,)).

    Latents have four parts, each replaced by the nearest of 64 codes, with straight-through
    gradients (van den Oord, Vinyals, Kavukcuoglu, arXiv 1711.00937).
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(SIZE, 128), nn.ReLU(), nn.Linear(128, PARTS * LATENT)
        )
        self.decoder = nn.Sequential(
            nn.Linear(PARTS * LATENT, 128), nn.ReLU(), nn.Linear(128, SIZE)
        )
        self.codes = nn.Parameter(torch.empty(PARTS, CODES, LATENT).uniform_(-1 / CODES, 1 / CODES))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x).view(-1, PARTS, LATENT)
        nearest = (z.transpose(0, 1)[:, :, None] - self.codes[:, None]).square().sum(-1).argmin(-1)
        found = torch.stack([self.codes[part][nearest[part]] for part in range(PARTS)], 1)
        apart = 0.25 * (z - found.detach()).square() + (z.detach() - found).square()
        return self.decoder((z + (found - z).detach()).flatten(1)), apart.sum((1, 2)) / LATENT


def _mixture(key: Key, count: int) -> Batch:
    generator, common = seeded("misleading", *key), seeded("misleading", "mixture")
    centers, bend = (
        torch.randn(MIXED, SIZE, generator=common),
        torch.randn(LATENT, SIZE, generator=common),
    )
    of = torch.randint(MIXED, (count,), generator=generator)
    return (centers[of] + 0.5 * torch.tanh(torch.randn(count, LATENT, generator=generator) @ bend),)


def _reconstruction(model: nn.Module, batch: Batch) -> Tensor:
    [x] = batch
    again, apart = model(x)
    return (again - x).square().mean(1) + apart


VQVAE_MIXTURE = problem("vqvae-mixture", drawn(Quantizer), _mixture, _reconstruction, 64)


# -- a mixture density network (Bishop 1994): y is one of three functions of x ---------------------

COMPONENTS = 6


def _branches(key: Key, count: int) -> Batch:
    generator = seeded("forked", *key)
    x, branch = (
        4 * torch.rand(count, 3, generator=generator) - 2,
        torch.randint(3, (count,), generator=generator),
    )
    branches = torch.stack(
        [torch.sin(2 * x[:, 0]) * x[:, 1], x[:, 2].square() - 1, torch.cos(3 * x[:, 1]) + x[:, 0]],
        1,
    )
    spread = 0.05 + 0.1 * x[:, 2].abs()
    return x, branches.gather(1, branch[:, None])[:, 0] + spread * torch.randn(
        count, generator=generator
    )


def _mixture_losses(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    weight, center, log_spread = model(x).chunk(3, -1)
    off = (y[:, None] - center) * torch.exp(-log_spread)
    return -torch.logsumexp(
        weight.log_softmax(-1) - 0.5 * off.square() - log_spread - 0.5 * math.log(2 * math.pi), -1
    )


MIXTURE_DENSITY_BRANCHES = problem(
    "mixture-density-branches",
    drawn(
        lambda: nn.Sequential(
            nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 3 * COMPONENTS)
        )
    ),
    _branches,
    _mixture_losses,
    size=64,
)
