"""What misled a scan: a stream that comes in blocks, 25 batches of each of six domains in turn; and a quantizer's loss, which rises at first. What misled
a trial anew: plateaus with noise at the best rate, of a parity, and of a regression of which almost all inputs say nothing. And what misled a rise: first
steps that learn only how frequent classes are, of a hundred kinds, and of clicks on things that have numbers of their own and come again."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..problems.digits import seeded
from ..problems.problem import Batch, drawn
from .generated import Key, either, labelled, problem, sines, squares

DOMAINS, BLOCK, INPUTS, WAVES = 6, 25, 16, 32
BITS, IDLE, TELLING = 150, 300, 20
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


def _wide() -> nn.Module:
    net = nn.Sequential(nn.Linear(BITS, 256), nn.ReLU(), nn.Linear(256, 1), nn.Flatten(0))
    for layer in net[:3:2]:
        nn.init.normal_(layer.weight, std=layer.in_features**-0.5)  # type: ignore[arg-type, operator]
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return net


def _parity(key: Key, count: int) -> Batch:
    x = torch.randint(2, (count, BITS), generator=seeded("misleading", "bits", *key)) * 2.0 - 1
    return x, (x[:, :3].prod(1) > 0).float()


def _line() -> nn.Module:
    net = nn.Sequential(nn.Linear(IDLE + TELLING, 1), nn.Flatten(0))
    nn.init.zeros_(net[0].weight)  # type: ignore[arg-type]
    nn.init.zeros_(net[0].bias)  # type: ignore[arg-type]
    return net


def _stretched(key: Key, count: int) -> Batch:
    x = torch.randn(count, IDLE + TELLING, generator=seeded("misleading", "line", *key))
    return torch.cat([x[:, :IDLE], 0.05 * x[:, IDLE:]], 1), x[:, IDLE:].sum(1) / TELLING**0.5


CLASSES, ROWS, USERS, THINGS, SEEN = 100, 60_000, 6000, 3000, 64
BODY = ("misleading", "body")


def _waving(x: Tensor) -> Tensor:
    waves, weights = sines(BODY, INPUTS)
    return 1.4 * torch.sin(x @ waves) @ weights


def _kinds(key: Key, count: int) -> Batch:
    """Of 100, as frequent as words are (Zipf)."""
    generator, common = seeded("misleading", "kinds", *key), seeded("misleading", "kinds")
    x = torch.randn(count, INPUTS, generator=generator)
    known = torch.sin(x @ sines(BODY, INPUTS)[0])[:, :INPUTS] @ (0.375 * torch.randn(INPUTS, CLASSES, generator=common))
    noise = -torch.rand(count, CLASSES, generator=generator).clamp(1e-9, 1 - 1e-7).log().neg().log()
    return x, (known - 1.2 * torch.arange(1.0, CLASSES + 1).log() + noise).argmax(1)


def _of_kinds() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))


class Clicks(nn.Module):
    """Chance of a click, of a user, a thing and 16 features."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.things = nn.Embedding(USERS, 8), nn.Embedding(THINGS, 8)
        for table in (self.users, self.things):
            nn.init.normal_(table.weight, std=0.01)
        self.layers = nn.Sequential(nn.Linear(INPUTS + 16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))

    def forward(self, batch: Batch) -> Tensor:
        return self.layers(torch.cat([self.users(batch[0]), self.things(batch[1]), batch[2]], 1))


def _seen(generator: torch.Generator, count: int) -> Batch:
    common = seeded("misleading", "clicks")
    of_user, of_thing = (0.3 * torch.randn(many, generator=common) for many in (USERS, THINGS))
    user, thing = (torch.randint(many, (count,), generator=generator) for many in (USERS, THINGS))
    x = torch.randn(count, INPUTS, generator=generator)
    chance = torch.sigmoid(-2.5 + 1.2 * _waving(x) + of_user[user] + of_thing[thing])
    return user, thing, x, (torch.rand(count, generator=generator) < chance).float()


@functools.cache
def _rows() -> Batch:
    return _seen(seeded("misleading", "clicks", "rows"), ROWS)


@functools.cache
def _order(seed: int, epoch: int) -> Tensor:
    return torch.randperm(ROWS, generator=seeded("misleading", "clicks", seed, epoch))


def _clicks(key: Key, count: int) -> Batch:
    return _seen(seeded("misleading", "clicks", *key), count)


def _again(seed: int, step: int) -> Batch:
    """60 000 rows, in another order each time."""
    epoch, at = divmod(step, ROWS // SEEN)
    chosen = _order(seed, epoch)[at * SEEN : (at + 1) * SEEN]
    return tuple(column[chosen] for column in _rows())


def _clicked(model: nn.Module, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch), batch[3], reduction="none")


BLOCKS = replace(
    problem("blocks", drawn(_regressor), _streamed, squares),
    batch=lambda seed, step: _streamed((seed, step), 32, step // BLOCK % DOMAINS),
    spare=lambda seed, step, number: _streamed((seed, "spare", number), 32, step // BLOCK % DOMAINS),
)
QUANTIZED = problem("quantized", drawn(Quantizer), _mixture, _reconstruction, 64)
BITS_UNTOLD = problem("bits", drawn(_wide), _parity, either, size=64, decay=0.0)
STRETCHED = problem("stretched", drawn(_line), _stretched, squares, decay=0.0)
KINDS = problem("kinds", drawn(_of_kinds), _kinds, labelled, size=64, decay=0.0)
CLICKS = replace(problem("clicks", drawn(Clicks), _clicks, _clicked, size=SEEN), batch=_again)
