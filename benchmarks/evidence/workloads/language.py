"""Text: bytes of English and of Python's sources, words, and sentences of artificial languages."""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..problems import PROBLEMS, Batch
from ..problems.transformer import losses as window_losses
from ..problems.transformer import windows
from .kit import (
    Draw,
    Examples,
    Field,
    Transformer,
    each_place,
    encoder,
    for_muon,
    labelled,
    mlp,
)
from .text import CONTEXT, bytes_of, english, python

FIELD, BYTES = Field("language"), 256
WHAT = "the next byte of Python's sources"
FIELD.known(PROBLEMS["gpt-python"], WHAT, "adamw-0.95", "wsd", 1e-3)


# -- bytes of English: a llama, a mixture of experts, a GRU, dilated convolutions ------------------


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.gain, 1e-6)


def plain(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = plain(width, hidden), plain(width, hidden)
        self.down = plain(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Each position goes through the best of ``count`` experts, weighted by its gate.

    An expert that no position chooses has no gradient.
    """

    def __init__(self, width: int, hidden: int, count: int = 4) -> None:
        super().__init__()
        self.router = plain(width, count)
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
        self.qkv, self.out = plain(width, 3 * width), plain(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(seen.reshape(batch, time, width))
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


class ByteGRU(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.tokens, self.cells = nn.Embedding(BYTES, width), nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.cells(self.tokens(tokens))[0])


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


NEXT = "the next byte of English"
FIELD.add(
    "llama-bytes", NEXT, "adamw-0.999", "cosine", 1e-3,
    lambda: Llama(3, 96, 4), window_losses, bytes_of(english), size=8,
)  # fmt: skip
FIELD.add(
    "moe-bytes", NEXT, "adamw-0.95", "cosine", 1e-3,
    lambda: Llama(2, 48, 4, experts=True), window_losses, bytes_of(english), size=8, decay=0.1,
)  # fmt: skip
FIELD.add(
    "gru-bytes", NEXT, "adamw-0.999", "cosine", 1e-3,
    ByteGRU, window_losses, bytes_of(english, 32), size=8, decay=0.0,
)  # fmt: skip
FIELD.add(
    "tcn-bytes", NEXT, "adamw-0.999", "one-cycle", 1e-3,
    Dilated, window_losses, bytes_of(english, 32), size=8,
)  # fmt: skip


# -- gated linear recurrences (as in Mamba-2, arXiv 2405.21060), bytes of Python's sources ---------


class Gated(nn.Module):
    """h_t = a_t h_{t-1} + (1 - a_t) c_t, one a in (0, 1) for each head; parallel over time."""

    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        self.norm, self.into = nn.RMSNorm(width), nn.Linear(width, 2 * width)
        self.gates, self.out = nn.Linear(width, heads), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        (count, time, _), seen = x.shape, self.norm(x)
        candidate, out = self.into(seen).chunk(2, -1)
        gates = self.gates(seen).mT
        kept = F.logsigmoid(gates).cumsum(-1)
        later = ~x.new_ones(time, time, dtype=torch.bool).tril()
        weights = (kept[..., :, None] - kept[..., None, :]).masked_fill(later, -math.inf).exp()
        heads = candidate.view(count, time, gates.shape[1], -1).transpose(1, 2)
        state = weights @ (torch.sigmoid(-gates)[..., None] * heads)
        return x + self.out(F.silu(out) * state.transpose(1, 2).reshape(x.shape))


def gated_model(width: int = 64) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(BYTES, width), Gated(width), Gated(width), nn.Linear(width, BYTES)
    )


FIELD.add(
    "gated-linear-rnn-python", "the next byte, as in Mamba-2", "adamw-0.95", "wsd", 1e-3,
    gated_model, each_place, bytes_of(python, 48, "spare"), size=8, decay=0.1,
)  # fmt: skip


# -- an MLP with bf16 parameters: the byte after eight bytes of English ----------------------------

MLP_CONTEXT, MLP_BYTES = 8, 64


def _byte_mlp() -> nn.Module:
    tokens = nn.Embedding(BYTES, 24)
    return nn.Sequential(tokens, nn.Flatten(), mlp(24 * MLP_CONTEXT, 192, 192, BYTES)).bfloat16()


def _contexts(stream: str, seed: int, index: int) -> Batch:
    text = english()[stream == "validation"]
    x, y = windows(text, MLP_BYTES, MLP_CONTEXT, seed, stream, index)
    return x, y[:, -1]


def _float32_losses(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x).float(), y, reduction="none")


FIELD.add(
    "mlp-bytes-bf16", "the next byte, bf16 parameters", "adamw-0.95", "cosine", 1e-3,
    _byte_mlp, _float32_losses,
    Examples(
        lambda seed, step: _contexts("train", seed, step),
        lambda seed, step, number: _contexts("spare", seed, number),
        lambda: [_contexts("validation", 0, part) for part in range(32)],
    ),
    size=MLP_BYTES,
)  # fmt: skip


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
def _texts() -> tuple[Tensor, Tensor, Tensor]:
    """The training and the validation text as numbers of frequent words, the most frequent is 0;
    and how often each is a negative sample."""
    train, validation = (
        re.findall(r"[a-z]+", text.numpy().tobytes().decode(errors="ignore").lower())
        for text in english()
    )
    frequent = Counter(train).most_common(FREQUENT)
    number = {word: place for place, (word, _) in enumerate(frequent)}
    known, held_out = (
        torch.tensor([number[word] for word in words if word in number])
        for words in (train, validation)
    )
    return known, held_out, torch.bincount(known, minlength=FREQUENT).float() ** 0.75


def _skipgram_losses(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(*batch)
    return F.softplus(-logits[:, 0]) + F.softplus(logits[:, 1:]).sum(1)


@FIELD.workload(
    "skipgram-words", "word vectors of English", "adamw-0.999", "linear", 1e-3,
    SkipGram, _skipgram_losses, key="neighbours", size=128,
)  # fmt: skip
def _word_pairs(g: Draw, count: int) -> Batch:
    text, weights = _texts()["validation" in g.key], _texts()[2]
    place, apart = g.between(NEAR, len(text) - NEAR, count), g.between(1, NEAR + 1, count)
    side, many = g.below(2, count) * 2 - 1, count * NEGATIVES
    others = torch.multinomial(weights, many, replacement=True, generator=g.generator)
    near = text[place + side * apart][:, None]
    return text[place], torch.cat([near, others.view(count, NEGATIVES)], 1)


# -- a masked language model: the hidden third of texts of a second-order Markov chain -------------

SYMBOLS, TEXT = 12, 24


@cache
def _chain() -> Tensor:
    return torch.softmax(2 * Draw("masked", "chain").randn(SYMBOLS, SYMBOLS, SYMBOLS), -1)


def _masked_losses(model: nn.Module, batch: Batch) -> Tensor:
    tokens, wanted = batch
    losses = F.cross_entropy(model(tokens).transpose(1, 2), wanted, reduction="none")
    return losses.sum(1) / (wanted >= 0).sum(1)


@FIELD.workload(
    "masked-lm-markov", "hidden symbols of a Markov chain", "fused-muon", "cosine", 1e-3,
    lambda: Transformer(SYMBOLS + 1, TEXT, SYMBOLS, 48, 192, activation="gelu"),
    _masked_losses, key="masked", decay=for_muon,
)  # fmt: skip
def _masked(g: Draw, count: int) -> Batch:
    text = [g.below(SYMBOLS, count) for _ in range(2)]
    while len(text) < TEXT:
        text.append(g.choose(_chain()[text[-2], text[-1]]))
    whole, hidden = torch.stack(text, 1), g.rand(count, TEXT) < 0.3
    hidden[:, 0] = True
    return whole.masked_fill(hidden, SYMBOLS), whole.masked_fill(~hidden, -100)


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
def _dictionary(after: bool) -> Tensor:
    return torch.randperm(
        VOCABULARY, generator=Draw("translated", "dictionary", int(after)).generator
    )


@FIELD.workload(
    "seq2seq-translation", "artificial phrases", "fused-muon", "linear", 1e-3,
    Translator, each_place, key="translated", decay=for_muon,
)  # fmt: skip
def _translations(g: Draw, count: int) -> Batch:
    """A word's translation depends on which half of the vocabulary the word before it is in."""
    phrases = g.below(VOCABULARY, count, PHRASE)
    before = torch.cat([phrases[:, :1], phrases[:, :-1]], 1) < VOCABULARY // 2
    words = torch.where(before, _dictionary(False)[phrases], _dictionary(True)[phrases])
    turned = words.view(count, -1, PIECE).flip(-1).flatten(1)
    return phrases, torch.cat([torch.full((count, 1), VOCABULARY), turned[:, :-1]], 1), turned


# -- a transformer: the next word of sentences with a grammar and a topic, a finite text -----------

SORTS, EACH, TOPICS, SENTENCE = 40, 40, 8, 16
WORDS = SORTS * EACH


class _WordModel(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(0.02 * torch.randn(SENTENCE, width))
        nn.init.normal_(self.words.weight, std=0.1)
        self.layer = encoder(width, 3 * width, layers=1, activation="gelu")
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, WORDS)
        self.mask = nn.Transformer.generate_square_subsequent_mask(SENTENCE)

    def forward(self, words: Tensor) -> Tensor:
        x = self.layer(self.words(words) + self.places, mask=self.mask, is_causal=True)
        return self.out(self.norm(x))


@cache
def _grammar() -> tuple[Tensor, Tensor]:
    """Probabilities of the next sort, (sorts, sorts), and of a word, (sorts, topics, each)."""
    g = Draw("worded", "grammar")
    following = torch.softmax(2 * g.randn(SORTS, SORTS), 1)
    liked = g.randn(SORTS, TOPICS, EACH) - torch.arange(1.0, EACH + 1).log()
    return following, torch.softmax(liked, 2)


@FIELD.workload(
    "transformer-grammar", "the next word, seen 7 times", "adamw-0.95", "cosine", 1e-3,
    _WordModel, each_place, key="worded", size=8, decay=0.1, epochs=7,
)  # fmt: skip
def _text(g: Draw, count: int) -> Batch:
    """Each window has one topic; one word in ten repeats the word before the last one."""
    following, liked = _grammar()
    topic, sort = g.below(TOPICS, count), g.below(SORTS, count)
    said: list[Tensor] = []
    for place in range(SENTENCE + 1):
        sort = g.choose(following[sort])
        word = sort * EACH + g.choose(liked[sort, topic])
        same = g.rand(count) < 0.1
        said.append(torch.where(same, said[-2], word) if place > 1 else word)
        sort = said[-1] // EACH
    words = torch.stack(said, 1)
    return words[:, :-1], words[:, 1:]


# -- an MLP on embeddings: the tag of a word between two others ------------------------------------

TAGGED_WORDS, TAGS = 1500, 12


def _tagger(width: int = 24) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(TAGGED_WORDS, width), nn.Flatten(), mlp(3 * width, 96, TAGS, of=nn.GELU)
    )


@cache
def _tagging_rules() -> tuple[Tensor, Tensor, Tensor]:
    """Scores of a word's tags, its sort, and scores by the sorts of its two neighbours."""
    g = Draw("tagged", "parts")
    alone, sorts = 1.5 * g.randn(TAGGED_WORDS, TAGS), g.below(8, TAGGED_WORDS)
    return alone, sorts, 1.2 * g.randn(8, 8, TAGS)


@FIELD.workload(
    "mlp-word-tags", "the tag of a word among three", "lion", "wsd", 1e-4,
    _tagger, labelled, key="tagged", size=64,
)  # fmt: skip
def _word_triples(g: Draw, count: int) -> Batch:
    x = g.zipf(TAGGED_WORDS, count, 3)
    alone, sorts, around = _tagging_rules()
    noise = g.rand(count, TAGS).clamp(min=1e-6).log().neg().log().neg()
    return x, (alone[x[:, 1]] + around[sorts[x[:, 0]], sorts[x[:, 2]]] + noise).argmax(1)
