"""What mislead a scan: a stream that comes in blocks, 25 batches of each of six domains in turn; and a quantizer's loss, which rises at first."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..problems.digits import seeded
from ..problems.problem import Batch, drawn
from .generated import Key, problem, squares

DOMAINS, BLOCK, INPUTS, WAVES = 6, 25, 16, 32
PARTS, CODES, LATENT, MIXED, SIZE = 4, 64, 8, 60, 24


@functools.cache
def _teacher() -> tuple[Tensor, Tensor, Tensor]:
    """(inputs, waves), what each domain adds to the common target (domains, waves), and where its inputs lie (domains, inputs)."""
    generator = torch.Generator().manual_seed(1)  # the adversary's
    waves, own, common, at = (
        torch.randn(shape, generator=generator) for shape in ((INPUTS, WAVES), (DOMAINS, WAVES), (WAVES,), (DOMAINS, INPUTS))
    )
    return 0.375 * waves, 0.25 * torch.cat([own, common[None]]), at


def _streamed(key: Key, count: int, domain: int | None = None) -> Batch:
    """Of one domain; None: of all."""
    generator = seeded("misleading", *key)
    waves, own, at = _teacher()
    of = torch.randint(DOMAINS, (count,), generator=generator) if domain is None else torch.full((count,), domain)
    x = torch.randn(count, INPUTS, generator=generator) + at[of]
    y = (torch.sin(x @ waves) * (own[-1] + own[of])).sum(1)
    return x, y + 0.1 * torch.randn(count, generator=generator)


def _regressor() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1), nn.Flatten(0))


class Quantizer(nn.Module):
    """(batch, 24) -> (reconstruction, commitment and codebook's loss (batch,)): latents of four parts, each moved to the next of 64 codes, with gradients
    passed straight through (van den Oord, Vinyals, Kavukcuoglu, arXiv 1711.00937)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(SIZE, 128), nn.ReLU(), nn.Linear(128, PARTS * LATENT))
        self.decoder = nn.Sequential(nn.Linear(PARTS * LATENT, 128), nn.ReLU(), nn.Linear(128, SIZE))
        self.codes = nn.Parameter(torch.empty(PARTS, CODES, LATENT).uniform_(-1 / CODES, 1 / CODES))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x).view(-1, PARTS, LATENT)
        nearest = (z.transpose(0, 1)[:, :, None] - self.codes[:, None]).square().sum(-1).argmin(-1)
        found = torch.stack([self.codes[part][nearest[part]] for part in range(PARTS)], 1)
        apart = 0.25 * (z - found.detach()).square() + (z.detach() - found).square()
        return self.decoder((z + (found - z).detach()).flatten(1)), apart.sum((1, 2)) / LATENT


def _mixture(key: Key, count: int) -> Batch:
    generator, common = seeded("misleading", *key), seeded("misleading", "mixture")
    centers, bend = torch.randn(MIXED, SIZE, generator=common), torch.randn(LATENT, SIZE, generator=common)
    of = torch.randint(MIXED, (count,), generator=generator)
    return (centers[of] + 0.5 * torch.tanh(torch.randn(count, LATENT, generator=generator) @ bend),)


def _reconstruction(model: nn.Module, batch: Batch) -> Tensor:
    [x] = batch
    again, apart = model(x)
    return (again - x).square().mean(1) + apart


BLOCKS = replace(
    problem("blocks", drawn(_regressor), _streamed, squares),
    batch=lambda seed, step: _streamed((seed, step), 32, step // BLOCK % DOMAINS),
    spare=lambda seed, step, number: _streamed((seed, "spare", number), 32, step // BLOCK % DOMAINS),
)
QUANTIZED = problem("quantized", drawn(Quantizer), _mixture, _reconstruction, 64)
