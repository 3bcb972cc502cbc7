"""The fifth test half: a gated linear recurrence on Python's sources, masked tokens, shapes in noise, a normalizing flow, words and their neighbours,
sounds without an alignment, and phrases by another rule from weights that have been trained on the first."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.cli.job.data import sample_batch

from ..problems.digits import seeded
from ..problems.problem import Batch, Problem, drawn, mean_loss
from ..problems.transformer import corpus
from .generated import Key, labelled, next_token, pretrained, problem
from .groups import decaying_matrices, hidden_matrices
from .text import english

# -- gated: bytes of Python's sources, by linear recurrences with a gate for each head (Mamba-2's form, arXiv 2405.21060) ----------------

SPAN, READ = 48, 8


class Gated(nn.Module):
    """h_t = a_t h_{t-1} + (1 - a_t) c_t with one a in (0, 1) for each head, all times at once."""

    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        self.norm, self.into, self.gates = nn.RMSNorm(width), nn.Linear(width, 2 * width), nn.Linear(width, heads)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        (count, time, _), seen = x.shape, self.norm(x)
        candidate, out = self.into(seen).chunk(2, -1)
        gates = self.gates(seen).mT
        kept = F.logsigmoid(gates).cumsum(-1)
        weights = (kept[..., :, None] - kept[..., None, :]).masked_fill(~x.new_ones(time, time, dtype=torch.bool).tril(), -math.inf).exp()
        heads = candidate.view(count, time, gates.shape[1], -1).transpose(1, 2)
        state = weights @ (torch.sigmoid(-gates)[..., None] * heads)
        return x + self.out(F.silu(out) * state.transpose(1, 2).reshape(x.shape))


class GatedModel(nn.Module):
    """tokens (batch, time) -> logits (batch, time, 256)"""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.body, self.out = nn.Embedding(256, width), nn.Sequential(Gated(width), Gated(width)), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.body(self.tokens(tokens)))


def _sources(seed: int, step: int, stream: str = "train") -> Batch:
    return sample_batch(corpus().train, READ, SPAN, seed=seed, stream=stream, index=step)


@cache
def _unread() -> list[Batch]:
    return [sample_batch(corpus().validation, 64, SPAN, seed=0, stream="validation", index=i) for i in range(8)]


GATED = Problem(
    name="gated",
    steps=1500,
    batch_size=READ,
    build=drawn(GatedModel),
    groups=lambda model: decaying_matrices(model, 0.1),
    batch=_sources,
    spare=lambda seed, step, number: _sources(seed, number, "spare"),
    losses=next_token,
    validate=lambda model: mean_loss(model, next_token, _unread()),
)

# -- masked: the hidden third of a text of a Markov chain of the second order ----------------------------------------------------------

SYMBOLS, PLACES = 12, 24


class Filler(nn.Module):
    """tokens (batch, 24), the last symbol is the mask -> logits (batch, 24, 12)"""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(SYMBOLS + 1, width), nn.Parameter(0.02 * torch.randn(PLACES, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True, activation="gelu")
        self.body, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(width, SYMBOLS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.body(self.tokens(tokens) + self.positions))


@cache
def _chain() -> Tensor:
    return torch.softmax(2 * torch.randn(SYMBOLS, SYMBOLS, SYMBOLS, generator=seeded("masked", "chain")), -1)


def _masked(key: Key, count: int) -> Batch:
    generator = seeded("masked", *key)
    text = [torch.randint(SYMBOLS, (count,), generator=generator) for _ in range(2)]
    while len(text) < PLACES:
        text.append(torch.multinomial(_chain()[text[-2], text[-1]], 1, generator=generator)[:, 0])
    whole, hidden = torch.stack(text, 1), torch.rand(count, PLACES, generator=generator) < 0.3
    hidden[:, 0] = True
    return whole.masked_fill(hidden, SYMBOLS), whole.masked_fill(~hidden, -100)


def _hidden_alone(model: nn.Module, batch: Batch) -> Tensor:
    tokens, wanted = batch
    return F.cross_entropy(model(tokens).transpose(1, 2), wanted, reduction="none").sum(1) / (wanted >= 0).sum(1)


# -- shapes: which dots belong to discs, which to bars, and which to nothing -----------------------------------------------------------

SIDE = 16


def _block(into: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(into, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU())


class Outliner(nn.Module):
    """(batch, 1, 16, 16) -> logits (batch, 3, 16, 16): a U-Net of two levels."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down, self.deep, self.up = _block(1, width), _block(width, 2 * width), _block(3 * width, width)
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down(x)
        coarse = self.deep(F.max_pool2d(fine, 2))
        return self.out(self.up(torch.cat([fine, F.interpolate(coarse, scale_factor=2)], 1)))


def _shapes(key: Key, count: int) -> Batch:
    generator = seeded("shapes", *key)
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    center, size = torch.randint(2, SIDE - 2, (4, count, 1, 1), generator=generator), torch.rand(2, count, 1, 1, generator=generator)
    disc = (y - center[0]).square() + (x - center[1]).square() < (2 + 3 * size[0]) ** 2
    bar = ((y - center[2]).abs() < 2) & ((x - center[3]).abs() < 2 + 4 * size[1])
    kind = torch.where(bar, 2, torch.where(disc, 1, 0))
    seen = (kind > 0).float() + 0.8 * torch.randn(count, SIDE, SIDE, generator=generator)
    return seen[:, None], kind


def _dots(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none").mean((1, 2))


# -- flow: the density of spirals, turned into eight dimensions (affine couplings, arXiv 1605.08803) ------------------------------------

WIDE = 8


class Flow(nn.Module):
    """x (batch, 8) -> log density (batch,)"""

    def __init__(self, width: int = 48, layers: int = 6) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDE // 2, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, WIDE))
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
        return log_volume - 0.5 * (a.square() + b.square()).sum(-1) - WIDE / 2 * math.log(2 * math.pi)


@cache
def _turn() -> Tensor:
    return torch.linalg.qr(torch.randn(WIDE, WIDE, generator=seeded("flow", "turn")))[0]


def _spirals(key: Key, count: int) -> Batch:
    generator = seeded("flow", *key)
    t = 3 * math.pi * torch.rand(count, 1, generator=generator).sqrt()
    arm = torch.randint(2, (count, 1), generator=generator) * 2 - 1
    plane = arm * torch.cat([t.cos(), t.sin()], 1) * t / 4
    rest = torch.randn(count, WIDE - 2, generator=generator) * (0.3 + 0.2 * plane.norm(dim=1, keepdim=True))
    return (torch.cat([plane + 0.1 * torch.randn(count, 2, generator=generator), rest], 1) @ _turn(),)


def _improbable(model: nn.Module, batch: Batch) -> Tensor:
    return -model(batch[0])


# -- neighbours: the words that stand near a word (skip-gram with negative samples, arXiv 1310.4546) -----------------------------------

NEAR, NOT_NEAR, USUAL = 4, 5, 2000


class Words(nn.Module):
    """word (batch,), others (batch, n) -> logits (batch, n)"""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words, self.around = nn.Embedding(USUAL, width), nn.Embedding(USUAL, width)
        nn.init.normal_(self.words.weight, std=0.1)
        nn.init.zeros_(self.around.weight)

    def forward(self, word: Tensor, others: Tensor) -> Tensor:
        return torch.einsum("bd,bnd->bn", self.words(word), self.around(others))


@cache
def _texts() -> tuple[Tensor, Tensor]:
    """The usual words of the training and the validation text, as numbers, the most frequent first."""
    split = [re.findall(r"[a-z]+", text.numpy().tobytes().decode(errors="ignore").lower()) for text in english()]
    number = {word: place for place, (word, _) in enumerate(Counter(split[0]).most_common(USUAL))}
    train, held_out = (torch.tensor([number[word] for word in words if word in number]) for words in split)
    return train, held_out


@cache
def _weights() -> Tensor:
    return torch.bincount(_texts()[0], minlength=USUAL).float() ** 0.75


def _neighbours(key: Key, count: int) -> Batch:
    generator = seeded("neighbours", *key)
    text = _texts()[key[0] == "validation"]
    place, apart = (
        torch.randint(NEAR, len(text) - NEAR, (count,), generator=generator),
        torch.randint(1, NEAR + 1, (count,), generator=generator),
    )
    side = torch.randint(2, (count,), generator=generator) * 2 - 1
    others = torch.multinomial(_weights(), count * NOT_NEAR, replacement=True, generator=generator).view(count, NOT_NEAR)
    return text[place], torch.cat([text[place + side * apart][:, None], others], 1)


def _near_or_not(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(*batch)
    return F.softplus(-logits[:, 0]) + F.softplus(logits[:, 1:]).sum(1)


# -- spoken: which signs were sounded, each for some time, and nobody says when (CTC) --------------------------------------------------

SIGNS, SOUNDED, TICKS, BANDS = 6, 4, 32, 8


class Listener(nn.Module):
    """sounds (batch, 8, 32) -> log-probabilities (batch, 32, 7), where 0 is the blank"""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(BANDS, width, 5, padding=2), nn.ReLU(), nn.Conv1d(width, width, 5, padding=2), nn.ReLU())
        self.body, self.out = nn.GRU(width, width, batch_first=True, bidirectional=True), nn.Linear(2 * width, SIGNS + 1)

    def forward(self, sounds: Tensor) -> Tensor:
        return self.out(self.body(self.first(sounds).mT)[0]).log_softmax(-1)


@cache
def _sounds() -> Tensor:
    return 1.5 * torch.randn(SIGNS + 1, BANDS, generator=seeded("spoken", "sounds"))


def _spoken(key: Key, count: int) -> Batch:
    """Each of four signs lasts for 3 to 7 ticks; after them there is silence."""
    generator = seeded("spoken", *key)
    signs = torch.randint(1, SIGNS + 1, (count, SOUNDED), generator=generator)
    ends = torch.randint(3, 8, (count, SOUNDED), generator=generator).cumsum(1)
    at = (torch.arange(TICKS)[None, :, None] >= ends[:, None, :]).sum(-1)
    now = torch.cat([signs, torch.zeros(count, 1, dtype=torch.long)], 1).gather(1, at)
    return (_sounds()[now] + torch.randn(count, TICKS, BANDS, generator=generator)).mT, signs


def _unaligned(model: nn.Module, batch: Batch) -> Tensor:
    sounds, signs = batch
    count = len(sounds)
    lengths = torch.full((count,), TICKS), torch.full((count,), SOUNDED)
    return F.ctc_loss(model(sounds).transpose(0, 1), signs, *lengths, reduction="none", zero_infinity=True) / SOUNDED


# -- retold: which of ten things a phrase says, by a rule; from weights trained on another rule -----------------------------------------

VOCABULARY, PHRASE, SAID = 30, 10, 10


class Phrases(nn.Module):
    """tokens (batch, 10) -> logits (batch, 10): a transformer, whose first place reads the whole."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Parameter(0.02 * torch.randn(PHRASE, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(width, SAID)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.body(self.tokens(tokens) + self.positions)[:, 0])


@cache
def _meanings(rule: str) -> Tensor:
    return torch.randint(SAID, (VOCABULARY, VOCABULARY), generator=seeded("retold", rule))


def _phrases(key: Key, count: int, rule: str = "first") -> Batch:
    """What a phrase says is in its first token and the one at the place that the first names."""
    generator = seeded("retold", rule, *key)
    tokens = torch.randint(VOCABULARY, (count, PHRASE), generator=generator)
    named = tokens.gather(1, 1 + tokens[:, :1] % (PHRASE - 1))[:, 0]
    said = _meanings("first")[tokens[:, 0], named]
    if rule == "second":  # a third of what is said has another name
        other = torch.arange(SAID)
        other[: SAID // 3] = other[: SAID // 3].roll(1)
        said = other[said]
    return tokens, said


MASKED = replace(problem("masked", drawn(Filler), _masked, _hidden_alone), groups=hidden_matrices)
SHAPES = problem("shapes", drawn(Outliner), _shapes, _dots, size=16, decay=5e-4)
FLOW = problem("flow", drawn(Flow), _spirals, _improbable, size=64, decay=0.0)
NEIGHBOURS = problem("neighbours", drawn(Words), _neighbours, _near_or_not, size=128)
SPOKEN = problem("spoken", drawn(Listener), _spoken, _unaligned, size=16)
RETOLD = problem("retold", pretrained(Phrases, _phrases), lambda key, count: _phrases(key, count, "second"), labelled)
