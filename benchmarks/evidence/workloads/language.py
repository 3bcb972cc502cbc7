"""Text: bytes of English and of Python's sources, words, and sentences of artificial languages."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.bytes.data import sample_batch

from ..problems.digits import seeded
from ..problems.problem import Batch, Problem, drawn, mean_loss
from ..problems.transformer import corpus
from ..problems.transformer import losses as window_losses
from .generated import Key, finite, labelled, next_token, problem, zipf
from .groups import decaying_matrices, hidden_matrices
from .text import CONTEXT, WINDOWS, english, held_out, windows

BYTES = 256


# -- bytes of English: a llama, a mixture of experts, a GRU, dilated convolutions ------------------


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.gain, 1e-6)


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(*shape, bias=False)
            for shape in ((width, hidden), (width, hidden), (hidden, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Each position goes through the best of ``count`` experts, weighted by its gate.

    An expert that no position chooses has no gradient.
    """

    def __init__(self, width: int, hidden: int, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(SwiGLU(width, hidden) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, weight[rows, None] * expert(flat[rows]))
        return out.view_as(x)


class Layer(nn.Module):
    """Pre-norm attention without biases, and a block that follows it."""

    def __init__(self, width: int, heads: int, after: nn.Module) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2, self.after = RMSNorm(width), RMSNorm(width), after
        self.qkv, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(batch, time, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(batch, time, width)
        )
        return x + self.after(self.norm2(x))


class Llama(nn.Module):
    """tokens (batch, time) -> logits (batch, time, 256).

    Tied embeddings and learned positions; all matrices are drawn with standard deviation 0.02.
    """

    def __init__(self, layers: int, width: int, heads: int, *, experts: bool = False) -> None:
        super().__init__()
        hidden = 8 * width // 3
        self.tokens, self.positions = nn.Embedding(BYTES, width), nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(
            Layer(width, heads, Experts(width, hidden // 2) if experts else SwiGLU(width, hidden))
            for _ in range(layers)
        )
        self.norm = RMSNorm(width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.tokens.weight)


class Recurrent(nn.Module):
    """A GRU over bytes, with torch's own initialisation."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.tokens, self.cells, self.out = (
            nn.Embedding(BYTES, width),
            nn.GRU(width, width, batch_first=True),
            nn.Linear(width, BYTES),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.cells(self.tokens(tokens))[0])


RECEPTIVE_FIELD = 32
"""Bytes that the dilated convolutions see."""


class Dilated(nn.Module):
    """tokens (batch, time) -> logits (batch, time, 256): causal, over 2, 4, 8, 16 and 32 bytes."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(BYTES, width), nn.Linear(width, BYTES)
        self.body = nn.ModuleList(nn.Conv1d(width, width, 2, dilation=2**i) for i in range(5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens).transpose(1, 2)
        for conv in self.body:
            x = x + F.gelu(conv(F.pad(x, (conv.dilation[0], 0))))
        return self.out(x.transpose(1, 2))


def language(name: str, build: object, context: int = CONTEXT, decay: float = 0.01) -> Problem:
    return Problem(
        name=name,
        steps=1500,
        batch_size=WINDOWS,
        build=build,  # type: ignore[arg-type]
        groups=lambda model: decaying_matrices(model, decay),
        batch=lambda seed, step: windows(seed, step, context),
        spare=lambda seed, step, number: windows(seed, 10_000_000 + number, context),
        losses=window_losses,
        validate=lambda model: mean_loss(model, window_losses, held_out(context)),
    )


LLAMA_BYTES = language("llama-bytes", drawn(lambda: Llama(3, 96, 4)))
MOE_BYTES = language("moe-bytes", drawn(lambda: Llama(2, 48, 4, experts=True)), decay=0.1)
GRU_BYTES = language("gru-bytes", drawn(Recurrent), context=32, decay=0.0)
TCN_BYTES = language("tcn-bytes", drawn(Dilated), context=RECEPTIVE_FIELD, decay=0.01)


# -- gated linear recurrences (as in Mamba-2, arXiv 2405.21060), bytes of Python's sources ---------

PYTHON_CONTEXT, PYTHON_WINDOWS = 48, 8


class Gated(nn.Module):
    """h_t = a_t h_{t-1} + (1 - a_t) c_t, one a in (0, 1) for each head; parallel over time."""

    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        self.norm, self.into, self.gates = (
            nn.RMSNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, heads),
        )
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        (count, time, _), seen = x.shape, self.norm(x)
        candidate, out = self.into(seen).chunk(2, -1)
        gates = self.gates(seen).mT
        kept = F.logsigmoid(gates).cumsum(-1)
        weights = (
            (kept[..., :, None] - kept[..., None, :])
            .masked_fill(~x.new_ones(time, time, dtype=torch.bool).tril(), -math.inf)
            .exp()
        )
        heads = candidate.view(count, time, gates.shape[1], -1).transpose(1, 2)
        state = weights @ (torch.sigmoid(-gates)[..., None] * heads)
        return x + self.out(F.silu(out) * state.transpose(1, 2).reshape(x.shape))


class GatedModel(nn.Module):
    """tokens (batch, time) -> logits (batch, time, 256)"""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.body, self.out = (
            nn.Embedding(256, width),
            nn.Sequential(Gated(width), Gated(width)),
            nn.Linear(width, 256),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.body(self.tokens(tokens)))


def _python(seed: int, step: int, stream: str = "train") -> Batch:
    return sample_batch(
        corpus().train, PYTHON_WINDOWS, PYTHON_CONTEXT, seed=seed, stream=stream, index=step
    )


@cache
def _held_out_python() -> list[Batch]:
    return [
        sample_batch(corpus().validation, 64, PYTHON_CONTEXT, seed=0, stream="validation", index=i)
        for i in range(8)
    ]


GATED_LINEAR_RNN_PYTHON = Problem(
    name="gated-linear-rnn-python",
    steps=1500,
    batch_size=PYTHON_WINDOWS,
    build=drawn(GatedModel),
    groups=lambda model: decaying_matrices(model, 0.1),
    batch=_python,
    spare=lambda seed, step, number: _python(seed, number, "spare"),
    losses=next_token,
    validate=lambda model: mean_loss(model, next_token, _held_out_python()),
)


# -- an MLP with bf16 parameters: the byte after eight bytes of English ----------------------------

MLP_CONTEXT, MLP_BYTES = 8, 64


def _byte_mlp() -> nn.Module:
    body = nn.Sequential(
        nn.Embedding(256, 24),
        nn.Flatten(),
        nn.Linear(24 * MLP_CONTEXT, 192),
        nn.ReLU(),
        nn.Linear(192, 192),
        nn.ReLU(),
    )
    return nn.Sequential(body, nn.Linear(192, 256)).bfloat16()


def _contexts(stream: str, seed: int, index: int) -> Batch:
    x, y = sample_batch(
        english()[stream == "validation"],
        MLP_BYTES,
        MLP_CONTEXT,
        seed=seed,
        stream=stream,
        index=index,
    )
    return x, y[:, -1]


def _float32_losses(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x).float(), y, reduction="none")


MLP_BYTES_BF16 = Problem(
    name="mlp-bytes-bf16",
    steps=1500,
    batch_size=MLP_BYTES,
    build=drawn(_byte_mlp),
    groups=lambda model: decaying_matrices(model, 0.01),
    batch=lambda seed, step: _contexts("train", seed, step),
    spare=lambda seed, step, number: _contexts("spare", seed, number),
    losses=_float32_losses,
    validate=lambda model: mean_loss(
        model, _float32_losses, [_contexts("validation", 0, part) for part in range(32)]
    ),
)


# -- skip-gram with negative samples (arXiv 1310.4546), words of English ---------------------------

NEAR, NEGATIVES, FREQUENT = 4, 5, 2000


class SkipGram(nn.Module):
    """word (batch,), others (batch, n) -> logits (batch, n)"""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words, self.around = nn.Embedding(FREQUENT, width), nn.Embedding(FREQUENT, width)
        nn.init.normal_(self.words.weight, std=0.1)
        nn.init.zeros_(self.around.weight)

    def forward(self, word: Tensor, others: Tensor) -> Tensor:
        return torch.einsum("bd,bnd->bn", self.words(word), self.around(others))


@cache
def _texts() -> tuple[Tensor, Tensor]:
    """The training and the validation text as numbers of frequent words, the most frequent is 0."""
    split = [
        re.findall(r"[a-z]+", text.numpy().tobytes().decode(errors="ignore").lower())
        for text in english()
    ]
    number = {
        word: place for place, (word, _) in enumerate(Counter(split[0]).most_common(FREQUENT))
    }
    train, held_out = (
        torch.tensor([number[word] for word in words if word in number]) for words in split
    )
    return train, held_out


@cache
def _negative_weights() -> Tensor:
    return torch.bincount(_texts()[0], minlength=FREQUENT).float() ** 0.75


def _word_pairs(key: Key, count: int) -> Batch:
    generator = seeded("neighbours", *key)
    text = _texts()[key[0] == "validation"]
    place, apart = (
        torch.randint(NEAR, len(text) - NEAR, (count,), generator=generator),
        torch.randint(1, NEAR + 1, (count,), generator=generator),
    )
    side = torch.randint(2, (count,), generator=generator) * 2 - 1
    others = torch.multinomial(
        _negative_weights(), count * NEGATIVES, replacement=True, generator=generator
    ).view(count, NEGATIVES)
    return text[place], torch.cat([text[place + side * apart][:, None], others], 1)


def _skipgram_losses(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(*batch)
    return F.softplus(-logits[:, 0]) + F.softplus(logits[:, 1:]).sum(1)


SKIPGRAM_WORDS = problem("skipgram-words", drawn(SkipGram), _word_pairs, _skipgram_losses, size=128)


# -- a masked language model: the hidden third of texts of a second-order Markov chain -------------

SYMBOLS, TEXT = 12, 24


class MaskedModel(nn.Module):
    """tokens (batch, 24), the last symbol is the mask -> logits (batch, 24, 12)"""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(SYMBOLS + 1, width),
            nn.Parameter(0.02 * torch.randn(TEXT, width)),
        )
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.body, self.out = (
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Linear(width, SYMBOLS),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.body(self.tokens(tokens) + self.positions))


@cache
def _chain() -> Tensor:
    return torch.softmax(
        2 * torch.randn(SYMBOLS, SYMBOLS, SYMBOLS, generator=seeded("masked", "chain")), -1
    )


def _masked(key: Key, count: int) -> Batch:
    generator = seeded("masked", *key)
    text = [torch.randint(SYMBOLS, (count,), generator=generator) for _ in range(2)]
    while len(text) < TEXT:
        text.append(torch.multinomial(_chain()[text[-2], text[-1]], 1, generator=generator)[:, 0])
    whole, hidden = torch.stack(text, 1), torch.rand(count, TEXT, generator=generator) < 0.3
    hidden[:, 0] = True
    return whole.masked_fill(hidden, SYMBOLS), whole.masked_fill(~hidden, -100)


def _masked_losses(model: nn.Module, batch: Batch) -> Tensor:
    tokens, wanted = batch
    return F.cross_entropy(model(tokens).transpose(1, 2), wanted, reduction="none").sum(1) / (
        wanted >= 0
    ).sum(1)


MASKED_LM_MARKOV = replace(
    problem("masked-lm-markov", drawn(MaskedModel), _masked, _masked_losses), groups=hidden_matrices
)


# -- an encoder and a decoder: word-by-word translation, each three words in reverse order ---------

VOCABULARY, PHRASE, PIECE = 24, 12, 3


class Translator(nn.Module):
    """phrases, shifted translations (batch, 12) -> logits (batch, 12, 24)"""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.read, self.said = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY + 1, width)
        self.places = nn.Parameter(0.02 * torch.randn(PHRASE, width))
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.encoder = nn.TransformerEncoderLayer(width, 4, 2 * width, **options)
        self.decoder = nn.TransformerDecoderLayer(width, 4, 2 * width, **options)
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, phrases: Tensor, said: Tensor) -> Tensor:
        memory = self.encoder(self.read(phrases) + self.places)
        later = torch.full((PHRASE, PHRASE), -math.inf, device=said.device).triu(1)
        return self.out(self.decoder(self.said(said) + self.places, memory, tgt_mask=later))


@cache
def _dictionary() -> Tensor:
    return torch.stack(
        [
            torch.randperm(VOCABULARY, generator=seeded("translated", "dictionary", after))
            for after in range(2)
        ]
    )


def _translations(key: Key, count: int) -> Batch:
    """A word's translation depends on which half of the vocabulary the word before it is in."""
    phrases = torch.randint(VOCABULARY, (count, PHRASE), generator=seeded("translated", *key))
    before = torch.cat([phrases[:, :1], phrases[:, :-1]], 1) < VOCABULARY // 2
    words = torch.where(before, _dictionary()[0][phrases], _dictionary()[1][phrases])
    turned = words.view(count, -1, PIECE).flip(-1).flatten(1)
    return phrases, torch.cat([torch.full((count, 1), VOCABULARY), turned[:, :-1]], 1), turned


def _word_losses(model: nn.Module, batch: Batch) -> Tensor:
    phrases, said, wanted = batch
    return F.cross_entropy(model(phrases, said).transpose(1, 2), wanted, reduction="none").mean(1)


SEQ2SEQ_TRANSLATION = replace(
    problem("seq2seq-translation", drawn(Translator), _translations, _word_losses),
    groups=hidden_matrices,
)


# -- a transformer: the next word of sentences with a grammar and a topic, a finite text -----------

SORTS, EACH, TOPICS, SENTENCE = 40, 40, 8, 16
WORDS = SORTS * EACH


class _WordModel(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.words, self.places = (
            nn.Embedding(WORDS, width),
            nn.Parameter(0.02 * torch.randn(SENTENCE, width)),
        )
        nn.init.normal_(self.words.weight, std=0.1)
        self.layer = nn.TransformerEncoderLayer(
            width, 4, 3 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, WORDS)
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(SENTENCE), persistent=False
        )

    def forward(self, words: Tensor) -> Tensor:
        return self.out(
            self.norm(
                self.layer(self.words(words) + self.places, src_mask=self.mask, is_causal=True)
            )
        )


@cache
def _grammar() -> tuple[Tensor, Tensor]:
    """Probabilities of the next sort, (sorts, sorts), and of a word, (sorts, topics, each)."""
    generator = seeded("worded", "grammar")
    following = torch.softmax(2 * torch.randn(SORTS, SORTS, generator=generator), 1)
    liked = (
        torch.randn(SORTS, TOPICS, EACH, generator=generator) - torch.arange(1.0, EACH + 1).log()
    )
    return following, torch.softmax(liked, 2)


def _text(key: Key, count: int) -> Batch:
    """Each window has one topic; one word in ten repeats the word before the last one."""
    generator = seeded("worded", *key)
    following, liked = _grammar()
    topic, sort = (
        torch.randint(TOPICS, (count,), generator=generator),
        torch.randint(SORTS, (count,), generator=generator),
    )
    said: list[Tensor] = []
    for place in range(SENTENCE + 1):
        sort = torch.multinomial(following[sort], 1, generator=generator)[:, 0]
        word = sort * EACH + torch.multinomial(liked[sort, topic], 1, generator=generator)[:, 0]
        same = torch.rand(count, generator=generator) < 0.1
        said.append(torch.where(same, said[-2], word) if place > 1 else word)
        sort = said[-1] // EACH
    words = torch.stack(said, 1)
    return words[:, :-1], words[:, 1:]


TRANSFORMER_GRAMMAR = finite(
    problem("transformer-grammar", drawn(_WordModel), _text, next_token, size=8, decay=0.1),
    _text,
    epochs=7,
    key="worded",
)


# -- an MLP on embeddings: the tag of a word between two others ------------------------------------

TAGGED_WORDS, TAGS = 1500, 12


class _Tagger(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.words = nn.Embedding(TAGGED_WORDS, width)
        self.layers = nn.Sequential(nn.Linear(3 * width, 96), nn.GELU(), nn.Linear(96, TAGS))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.words(x).flatten(1))


@cache
def _tagging_rules() -> tuple[Tensor, Tensor, Tensor]:
    """Scores of a word's tags, its sort, and scores by the sorts of its two neighbours."""
    generator = seeded("tagged", "parts")
    alone, sorts = (
        1.5 * torch.randn(TAGGED_WORDS, TAGS, generator=generator),
        torch.randint(8, (TAGGED_WORDS,), generator=generator),
    )
    return alone, sorts, 1.2 * torch.randn(8, 8, TAGS, generator=generator)


def _word_triples(key: Key, count: int) -> Batch:
    generator = seeded("tagged", *key)
    x = zipf(generator, TAGGED_WORDS, count, 3)
    alone, sorts, around = _tagging_rules()
    noise = torch.rand(count, TAGS, generator=generator).clamp(min=1e-6).log().neg().log().neg()
    return x, (alone[x[:, 1]] + around[sorts[x[:, 0]], sorts[x[:, 2]]] + noise).argmax(1)


MLP_WORD_TAGS = problem("mlp-word-tags", drawn(_Tagger), _word_triples, labelled, size=64)
