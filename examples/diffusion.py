"""A diffusion model whose weights are averaged over time, in the optimizer's step.

    python examples/diffusion.py [STEPS]

Points of two rings, denoised by a small network (DDPM, Ho et al. 2020). Samples are drawn from the
average; its loss is lower than that of the weights, which the last steps' noise moves.
"""

import math
import sys

import torch
from torch import Tensor, nn

import hdet

LEVELS = 50
BETAS = torch.linspace(1e-3, 0.2, LEVELS)
KEPT = (1 - BETAS).cumprod(0)


class Denoiser(nn.Module):
    """Predicts the noise in a point at a level."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.level = nn.Embedding(LEVELS, width)
        self.first, self.second = nn.Linear(2, width), nn.Linear(width, width)
        self.last = nn.Linear(width, 2)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        hidden = nn.functional.silu(self.first(x) + self.level(level))
        return self.last(nn.functional.silu(self.second(hidden)))


def rings(count: int, generator: torch.Generator) -> Tensor:
    angle = 2 * math.pi * torch.rand(count, generator=generator)
    radius = 1.0 + torch.randint(0, 2, (count,), generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1)


def loss_of(model: nn.Module, x: Tensor, generator: torch.Generator) -> Tensor:
    level = torch.randint(0, LEVELS, (len(x),), generator=generator)
    noise = torch.randn(x.shape, generator=generator)
    kept = KEPT[level].unsqueeze(1)
    return (model(kept.sqrt() * x + (1 - kept).sqrt() * noise, level) - noise).square().mean()


@torch.no_grad()
def sample(model: nn.Module, count: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(count, 2, generator=generator)
    for level in reversed(range(LEVELS)):
        noise = model(x, torch.full((count,), level))
        x = (x - BETAS[level] / (1 - KEPT[level]).sqrt() * noise) / (1 - BETAS[level]).sqrt()
        if level:
            x += BETAS[level].sqrt() * torch.randn(x.shape, generator=generator)
    return x


def main(steps: int = 1500) -> tuple[float, float]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    model = Denoiser()
    optimizer = hdet.FusedAdamW(model.parameters(), lr=3e-3, ema=0.995)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, rings(128, draw), draw).backward()
        optimizer.step()

    @torch.no_grad()
    def held_out() -> float:
        generator = torch.Generator().manual_seed(2)
        return loss_of(model, rings(20_000, generator), generator).item()

    of_weights = held_out()
    with optimizer.averaged():  # to evaluate, to draw samples, to save the model
        of_average, drawn = held_out(), sample(model, 2000, draw)
    off = ((drawn.norm(dim=1) - 1).abs().minimum((drawn.norm(dim=1) - 2).abs())).mean()
    print(
        f"held-out loss: {of_weights:.4f} of the weights, {of_average:.4f} of their average; "
        f"samples are {off:.3f} off a ring"
    )
    return of_weights, of_average


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
