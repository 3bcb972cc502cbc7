"""The eighth test half: times of which some are cut short, two views that belong together, values in their own units, symbols without their places,
what belonged to a key, a picture by its coordinates, two tasks at once, and rare cases."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..problems.digits import seeded
from ..problems.problem import Batch, drawn
from .generated import Key, contrast, labelled, problem, sines, squares
from .groups import hidden_matrices

WIDE = 16


def _target(name: str, x: Tensor, out: int = 1) -> Tensor:
    """(examples, out), of mean 0 and variance near 1."""
    waves, weights = sines((name, "waves"), WIDE, 32, 0.4, (out,), 16)
    return torch.sin(x @ waves) @ weights


def _layers(out: int, wide: int = WIDE) -> nn.Module:
    return nn.Sequential(nn.Linear(wide, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, out))


# -- censored: in which of twelve months something happens, if it does before one stops to look ------------------------------------------

MONTHS = 12


def _censored(key: Key, count: int) -> Batch:
    generator = seeded("censored", *key)
    x = torch.randn(count, WIDE, generator=generator)
    chance = torch.sigmoid(_target("censored", x) * 1.5 - 2)
    happens = torch.rand(count, MONTHS, generator=generator) < chance
    month = torch.where(happens.any(1), happens.int().argmax(1), MONTHS)
    looked = torch.randint(MONTHS // 2, MONTHS + 1, (count,), generator=generator)
    at = torch.arange(MONTHS)
    return x, ((at <= month[:, None]) & (at < looked[:, None])).float(), (at == month[:, None]).float()


def _hazard(model: nn.Module, batch: Batch) -> Tensor:
    x, at_risk, event = batch
    return (F.binary_cross_entropy_with_logits(model(x), event, reduction="none") * at_risk).sum(1)


# -- matched: which picture belongs to which text (CLIP's loss, arXiv 2103.00020) -------------------------------------------------------


class _Matched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = _layers(16, 24), _layers(16, 20)
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.scale.exp() * F.normalize(self.one(a), dim=-1) @ F.normalize(self.other(b), dim=-1).T


def _views(key: Key, count: int) -> Batch:
    generator, maps = seeded("matched", *key), seeded("matched", "maps")
    hidden = torch.randn(count, 8, generator=generator)
    views = [torch.tanh(hidden @ torch.randn(8, wide, generator=maps)) for wide in (24, 20)]
    return tuple(view + 0.5 * torch.randn(view.shape, generator=generator) for view in views)


# -- unscaled: values in their own units, far from 0 ------------------------------------------------------------------------------------


def _unscaled(key: Key, count: int) -> Batch:
    generator = seeded("unscaled", *key)
    x = torch.randn(count, WIDE, generator=generator)
    return x, 40 + 8 * _target("unscaled", x)[:, 0] + torch.randn(count, generator=generator)


def _off(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return (model(x)[:, 0] - y).abs()


# -- spelled: four symbols of a sound, without their places (connectionist temporal classification) -------------------------------------

SYMBOLS, FRAMES, SPELLED = 8, 28, 4


def _hears() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(12, 48, 5, padding=2), nn.GELU(), nn.Conv1d(48, 48, 5, padding=2), nn.GELU(), nn.Conv1d(48, SYMBOLS + 1, 5, padding=2)
    )


def _sound(key: Key, count: int) -> Batch:
    generator = seeded("spelled", *key)
    symbols = torch.randint(1, SYMBOLS + 1, (count, SPELLED), generator=generator)
    long = torch.randint(4, 8, (count, SPELLED), generator=generator)
    ends = long.cumsum(1)
    place = (torch.arange(FRAMES)[None, :, None] >= ends[:, None]).sum(2).clamp(max=SPELLED - 1)
    voices = torch.randn(SYMBOLS + 1, 12, generator=seeded("spelled", "voices"))
    heard = voices[symbols.gather(1, place)] + 0.8 * torch.randn(count, FRAMES, 12, generator=generator)
    return heard.transpose(1, 2), symbols


def _spelling(model: nn.Module, batch: Batch) -> Tensor:
    x, symbols = batch
    said = F.log_softmax(model(x), 1).permute(2, 0, 1)
    count = len(symbols)
    lengths = torch.full((count,), FRAMES), torch.full((count,), SPELLED)
    return F.ctc_loss(said, symbols, *lengths, reduction="none") / SPELLED


# -- recalled: what came after this key? ------------------------------------------------------------------------------------------------

KEYS, HELD = 16, 6


class _Recalled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(2 * KEYS, 32), nn.Parameter(0.02 * torch.randn(2 * HELD + 1, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(32, KEYS)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.embed(x) + self.place)[:, -1])


def _held(key: Key, count: int) -> Batch:
    generator = seeded("recalled", *key)
    keys = torch.rand(count, KEYS, generator=generator).argsort(1)[:, :HELD]
    values = torch.randint(KEYS, (count, HELD), generator=generator)
    asked = torch.randint(HELD, (count, 1), generator=generator)
    told = torch.stack([keys, KEYS + values], 2).flatten(1)
    return torch.cat([told, keys.gather(1, asked)], 1), values.gather(1, asked)[:, 0]


# -- drawn by coordinates: the colours of a picture at places in it ----------------------------------------------------------------------


class _Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bands", 3.0 * torch.randn(2, 24, generator=seeded("coordinates", "bands")))
        self.layers = nn.Sequential(
            nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 3)
        )

    def forward(self, place: Tensor) -> Tensor:
        at = 2 * math.pi * place @ self.bands
        return self.layers(torch.cat([at.sin(), at.cos()], 1))


@cache
def _strokes() -> tuple[Tensor, Tensor, Tensor]:
    generator = seeded("coordinates", "strokes")
    return torch.rand(60, 2, generator=generator), 0.03 + 0.1 * torch.rand(60, generator=generator), torch.rand(60, 3, generator=generator)


def _places(key: Key, count: int) -> Batch:
    place = torch.rand(count, 2, generator=seeded("coordinates", *key))
    middles, sizes, colours = _strokes()
    near = torch.sigmoid((sizes - torch.cdist(place, middles)) * 60)
    left = torch.cat([torch.ones(count, 1), (1 - near).cumprod(1)[:, :-1]], 1)
    return place, (near * left) @ colours


def _colours(model: nn.Module, batch: Batch) -> Tensor:
    return squares(model, batch).sum(1)


# -- both: a class and a value, of one body ----------------------------------------------------------------------------------------------


def _both(key: Key, count: int) -> Batch:
    generator = seeded("both", *key)
    x = torch.randn(count, WIDE, generator=generator)
    known = _target("both", x, 6)
    noise = torch.rand(count, 5, generator=generator).clamp(min=1e-6).log().neg().log().neg()
    return x, (2 * known[:, :5] + noise).argmax(1), known[:, 5] + 0.3 * torch.randn(count, generator=generator)


def _two_tasks(model: nn.Module, batch: Batch) -> Tensor:
    x, kind, value = batch
    said = model(x)
    return F.cross_entropy(said[:, :5], kind, reduction="none") + 2.0 * (said[:, 5] - value).square()


# -- rare: one case in fifty, with the focal loss (arXiv 1708.02002) ----------------------------------------------------------------------


def _rare(key: Key, count: int) -> Batch:
    generator = seeded("rare", *key)
    x = torch.randn(count, WIDE, generator=generator)
    return x, (torch.rand(count, generator=generator) < torch.sigmoid(3 * _target("rare", x)[:, 0] - 6)).float()


def _focal(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    plain = F.binary_cross_entropy_with_logits(model(x)[:, 0], y, reduction="none")
    return (1 - torch.exp(-plain)).square() * plain


CENSORED = problem("censored", drawn(lambda: _layers(MONTHS)), _censored, _hazard, size=64)
MATCHED = problem("matched", drawn(_Matched), _views, contrast, size=64)
UNSCALED = problem("unscaled", drawn(lambda: _layers(1)), _unscaled, _off, size=64)
SPELT = problem("spelled", drawn(_hears), _sound, _spelling)
RECALLED = problem("recalled", drawn(_Recalled), _held, labelled)
COORDINATES = replace(problem("coordinates", drawn(_Picture), _places, _colours, size=128), groups=hidden_matrices)
BOTH = problem("both", drawn(lambda: _layers(6)), _both, _two_tasks, size=64, decay=1e-4)
RARE = problem("rare", drawn(lambda: _layers(1)), _rare, _focal, size=128)
