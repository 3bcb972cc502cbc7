"""Sequences other than text: sound, series, events, control, and lists of symbols or numbers."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from ..problems import Batch
from .kit import (
    Draw,
    Field,
    Recurrent,
    Transformer,
    each_place,
    labelled,
    mean_squares,
    mlp,
    rising,
    squares,
)

FIELD = Field("sequences")

# -- transformers: sort twelve numbers; nested brackets; six pairs of key and value, then a key ----

NUMBERS, LENGTH = 32, 12


@FIELD.workload(
    "transformer-sorting", "sorting twelve numbers", "lion", "linear", 1e-4,
    lambda: Transformer(NUMBERS, LENGTH, NUMBERS, norm_first=False),
    each_place, key="sorting", part=2048,
)  # fmt: skip
def _lists(g: Draw, count: int) -> Batch:
    numbers = g.below(NUMBERS, count, LENGTH)
    return numbers, numbers.sort(1).values


BRACKETS, DEPTH = 4, 32


@FIELD.workload(
    "transformer-brackets", "nested brackets of four kinds", "adamw-0.95", "cosine", 1e-3,
    lambda: Transformer(2 * BRACKETS + 1, DEPTH, 2 * BRACKETS + 1, causal=True),
    each_place, key="brackets", size=16,
)  # fmt: skip
def _brackets(g: Draw, count: int) -> Batch:
    """Token 2k opens kind k, 2k + 1 closes it; token 8 begins a text.

    Closing brackets always match; opening ones are of a random kind.
    """
    opens, kinds = g.rand(count, DEPTH) < 0.55, g.below(BRACKETS, count, DEPTH)
    texts = []
    for row, drawn_kinds in zip(opens.tolist(), kinds.tolist(), strict=True):
        stack, text = [], [2 * BRACKETS]
        for opening, kind in zip(row, drawn_kinds, strict=True):
            if opening or not stack:
                stack.append(kind)
                text.append(2 * kind)
            else:
                text.append(2 * stack.pop() + 1)
        texts.append(text)
    tokens = torch.tensor(texts)
    return tokens[:, :-1], tokens[:, 1:]


KEYS, PAIRS = 16, 6


@FIELD.workload(
    "transformer-recall", "the value that belongs to a key", "adamw-0.95", "linear", 1e-3,
    lambda: Transformer(2 * KEYS, 2 * PAIRS + 1, KEYS, inner=64, activation="gelu", read=-1),
    labelled, key="recalled",
)  # fmt: skip
def _key_value_pairs(g: Draw, count: int) -> Batch:
    keys = g.rand(count, KEYS).argsort(1)[:, :PAIRS]
    values, asked = g.below(KEYS, count, PAIRS), g.below(PAIRS, count, 1)
    told = torch.stack([keys, KEYS + values], 2).flatten(1)
    return torch.cat([told, keys.gather(1, asked)], 1), values.gather(1, asked)[:, 0]


# -- a GRU: the sum of the two marked numbers of twenty (the adding problem) -----------------------


@FIELD.workload(
    "gru-adding", "the sum of two marked numbers", "adamw-0.999", "cosine", 1e-3,
    lambda: nn.Sequential(Recurrent(nn.GRU, 2, 1), nn.Flatten(0)), squares, key="marked",
)  # fmt: skip
def _marked_numbers(g: Draw, count: int, length: int = 20) -> Batch:
    numbers, marks = g.rand(count, length), torch.zeros(count, length)
    marks.scatter_(1, g.rand(count, length).topk(2).indices, 1.0)
    return torch.stack([numbers, marks], -1), (numbers * marks).sum(1)


# -- a recurrence without gates: three bits, to be remembered for ever longer times ----------------

BITS = 3


def _memory() -> nn.Module:
    """(batch, time, 4) -> logits (batch, 8)"""
    model = Recurrent(nn.RNN, 4, 2**BITS)
    nn.init.orthogonal_(model.body.weight_hh_l0)  # type: ignore[arg-type]
    return model


@FIELD.workload(
    "rnn-memory-rising-length", "three bits over ever longer times", "adamw-0.999", "cosine", 1e-3,
    _memory, labelled, key="harder", decay=0.0, varies=rising(5, 10, 20, 30),
)  # fmt: skip
def _bits(g: Draw, count: int, length: int) -> Batch:
    """The bits come first, then noise, and a mark at the end."""
    bits, x = g.below(2, count, BITS), torch.zeros(count, length, 4)
    x[:, :BITS, 0], x[:, :BITS, 2], x[:, -1, 3] = 2.0 * bits - 1, 1.0, 1.0
    x[:, :, 1] = 0.5 * g.randn(count, length)
    return x, (bits * torch.tensor([1, 2, 4])).sum(1)


# -- an LSTM: the next values of two coupled oscillators with noise --------------------------------


def _gaussian_losses(model: nn.Module, batch: Batch) -> Tensor:
    """The model gives means and log deviations of the next values (batch, time, 4)."""
    values, following = batch
    mean, log_deviation = model(values).chunk(2, -1)
    log_deviation = log_deviation.clamp(-6, 6)
    off = ((following - mean) / log_deviation.exp()).square()
    return (0.5 * off + log_deviation + 0.5 * math.log(2 * math.pi)).mean((1, 2))


@FIELD.workload(
    "lstm-oscillators", "the next values of two oscillators", "adamw-0.999", "cosine", 1e-3,
    lambda: Recurrent(nn.LSTM, 2, 4, last=False), _gaussian_losses, key="series",
)  # fmt: skip
def _series(g: Draw, count: int, times: int = 24) -> Batch:
    x, v = g.randn(count, 2), g.randn(count, 2)
    strength, seen = 0.5 + g.rand(count, 1), []
    for _ in range(times + 1):
        v = 0.98 * v - 0.3 * (strength * torch.sin(x) + 0.5 * (x - x.flip(1)))
        x = x + 0.3 * v
        seen.append(x + 0.05 * g.randn(count, 2))
    values = torch.stack(seen, 1)
    return values[:, :-1], values[:, 1:]


# -- an MLP, applied step by step: the states of a driven pendulum ---------------------------------


class Pendulum(nn.Module):
    """first states (batch, 2), pushes (batch, 16) -> states (batch, 16, 2)"""

    def __init__(self) -> None:
        super().__init__()
        self.change = mlp(3, 48, 48, 2, of=nn.Tanh)

    def forward(self, state: Tensor, pushes: Tensor) -> Tensor:
        states = []
        for push in pushes.unbind(1):
            state = state + self.change(torch.cat([state, push[:, None]], 1))
            states.append(state)
        return torch.stack(states, 1)


@FIELD.workload(
    "mlp-pendulum", "a driven pendulum", "adamw-0.95", "wsd", 1e-3,
    Pendulum, mean_squares, key="swung",
)  # fmt: skip
def _swings(g: Draw, count: int, steps: int = 16, time: float = 0.25) -> Batch:
    angle, speed = (3 * g.rand(count) - 1.5 for _ in range(2))
    first, pushes, states = torch.stack([angle, speed], 1), g.randn(count, steps), []
    for push in pushes.unbind(1):
        for _ in range(5):
            speed = speed + time / 5 * (push - torch.sin(2 * angle) - 0.2 * speed)
            angle = angle + time / 5 * speed
        states.append(torch.stack([angle, speed], 1))
    return first, pushes, torch.stack(states, 1)


# -- a GRU: which event comes next, and when, where events excite others (a Hawkes process) --------

EVENTS, EVENT_STEPS, EVENT_DECAY = 5, 16, 4.0


class _EventModel(nn.Module):
    """Log gaps and kinds of events (batch, time) -> (batch, time, 5 + 9).

    Logits of the next kind; weights, means and log widths of three log-normals of the next gap.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.kinds, self.body = nn.Embedding(EVENTS, 8), nn.GRU(9, width, batch_first=True)
        self.out = nn.Linear(width, EVENTS + 9)

    def forward(self, gaps: Tensor, kinds: Tensor) -> Tensor:
        return self.out(self.body(torch.cat([gaps[..., None], self.kinds(kinds)], 2))[0])


@cache
def _excitation() -> Tensor:
    """How much an event raises the rate of each kind: it causes 0.8 events on average."""
    weights = torch.softmax(2 * Draw("awaited", "brings").randn(EVENTS, EVENTS), 1)
    return 0.8 * EVENT_DECAY * weights


def _event_losses(model: nn.Module, batch: Batch) -> Tensor:
    gaps, kinds = batch
    what, weights, middles, widths = model(gaps[:, :-1], kinds[:, :-1]).split([EVENTS, 3, 3, 3], 2)
    widths = widths.clamp(-4, 4)
    off = (gaps[:, 1:, None] - middles) * torch.exp(-widths)
    when = torch.logsumexp(
        F.log_softmax(weights, 2) - widths - 0.5 * off.square() - 0.5 * math.log(2 * math.pi), 2
    )
    return (F.cross_entropy(what.transpose(1, 2), kinds[:, 1:], reduction="none") - when).mean(1)


@FIELD.workload(
    "gru-hawkes", "the next event and its time", "adamw-0.95", "one-cycle", 1e-3,
    _EventModel, _event_losses, key="awaited",
)  # fmt: skip
def _events(g: Draw, count: int) -> Batch:
    excited, gaps, kinds = torch.zeros(count, EVENTS), [], []
    waits = torch.empty(EVENT_STEPS + 1, count, 1).exponential_(generator=g.generator)
    for wait, part in zip(waits, g.rand(EVENT_STEPS + 1, count, 1), strict=True):
        rates = 0.1 + excited
        gap = wait / rates.sum(1, keepdim=True)
        kind = (part * rates.sum(1, keepdim=True) > rates.cumsum(1)).sum(1).clamp(max=EVENTS - 1)
        excited = excited * torch.exp(-EVENT_DECAY * gap) + _excitation()[kind]
        gaps.append(gap[:, 0])
        kinds.append(kind)
    return torch.stack(gaps, 1).clamp(min=1e-4).log(), torch.stack(kinds, 1)


# -- a conditional random field: the states of a machine, from its gauges --------------------------

STATES, MACHINE_STEPS, GAUGES, GAUGE_SPAN = 5, 8, 3, 5


class _RandomField(nn.Module):
    """Gauges (batch, ticks, gauges) -> scores of states (batch, ticks, states) and transitions."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.layers = mlp(GAUGE_SPAN * GAUGES, width, width, STATES, of=nn.GELU)
        self.goes = nn.Parameter(torch.zeros(STATES, STATES))

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        around = F.pad(seen, (0, 0, GAUGE_SPAN // 2, GAUGE_SPAN // 2)).unfold(1, GAUGE_SPAN, 1)
        return self.layers(around.flatten(2)), self.goes


@cache
def _machine() -> tuple[Tensor, Tensor, Tensor]:
    """Transition probabilities (states, states), and the gauges' dynamics in each state:

    matrices (states, gauges, gauges) and offsets (states, gauges).
    """
    g = Draw("stated", "machine")
    goes = torch.softmax(1.5 * g.randn(STATES, STATES) + 2 * torch.eye(STATES), 1)
    return goes, 0.5 * g.randn(STATES, GAUGES, GAUGES), g.randn(STATES, GAUGES)


def _path_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Negative log-likelihood of the path of states, per tick."""
    seen, states = batch
    scores, goes = model(seen)
    right = scores.gather(2, states[..., None]).sum((1, 2))
    right = right + goes[states[:, :-1], states[:, 1:]].sum(1)
    every, *others = scores.unbind(1)
    for score in others:
        every = torch.logsumexp(every[:, :, None] + goes, 1) + score
    return (torch.logsumexp(every, 1) - right) / MACHINE_STEPS


@FIELD.workload(
    "crf-states", "the states of a machine", "adamw-0.999", "one-cycle", 1e-3,
    _RandomField, _path_losses, key="stated",
)  # fmt: skip
def _machine_runs(g: Draw, count: int) -> Batch:
    goes, on, where = _machine()
    state, gauges = g.below(STATES, count), g.randn(count, GAUGES)
    noise, chosen = g.randn(MACHINE_STEPS, count, GAUGES), g.rand(MACHINE_STEPS, count, 1)
    states, seen = [], []
    for pushed, part in zip(noise, chosen, strict=True):
        state = (part > goes.cumsum(1)[state]).sum(1).clamp(max=STATES - 1)
        gauges = torch.tanh((gauges[:, None] @ on[state])[:, 0] + where[state]) + 0.5 * pushed
        states.append(state)
        seen.append(gauges)
    return torch.stack(seen, 1), torch.stack(states, 1)


# -- which four symbols are in a sound, without their places (CTC): convolutions with and without
# a GRU --------------------------------------------------------------------------------------------

EACH, BANDS, SIGNS, SIGN_TIMES, SYMBOLS, FRAMES = 4, 8, 6, 32, 8, 28


class Listener(nn.Module):
    """sounds (batch, 8, 32) -> log-probabilities (batch, 32, 7), where 0 is the blank"""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        first, second = (nn.Conv1d(a, width, 5, padding=2) for a in (BANDS, width))
        self.first = nn.Sequential(first, nn.ReLU(), second, nn.ReLU())
        self.body = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, SIGNS + 1)

    def forward(self, sounds: Tensor) -> Tensor:
        return self.out(self.body(self.first(sounds).mT)[0]).log_softmax(-1)


def _ctc(said: Tensor, symbols: Tensor, **options: bool) -> Tensor:
    """``said``: log-probabilities (time, batch, symbols)."""
    lengths = (torch.full((len(symbols),), long) for long in (len(said), EACH))
    return F.ctc_loss(said, symbols, *lengths, reduction="none", **options) / EACH


def _sign_losses(model: nn.Module, batch: Batch) -> Tensor:
    sounds, signs = batch
    return _ctc(model(sounds).transpose(0, 1), signs, zero_infinity=True)


@FIELD.workload(
    "gru-ctc-signs", "signs in a sound, no alignment", "adamw-0.999", "cosine", 1e-3,
    Listener, _sign_losses, key="spoken", size=16,
)  # fmt: skip
def _sign_sounds(g: Draw, count: int) -> Batch:
    """Each of four signs lasts for 3 to 7 ticks; then there is silence."""
    signs, ends = g.between(1, SIGNS + 1, count, EACH), g.between(3, 8, count, EACH).cumsum(1)
    at = (torch.arange(SIGN_TIMES)[None, :, None] >= ends[:, None, :]).sum(-1)
    now = torch.cat([signs, torch.zeros(count, 1, dtype=torch.long)], 1).gather(1, at)
    sounds = 1.5 * Draw("spoken", "sounds").randn(SIGNS + 1, BANDS)
    return (sounds[now] + g.randn(count, SIGN_TIMES, BANDS)).mT, signs


def _ctc_cnn() -> nn.Module:
    first, second, last = (
        nn.Conv1d(a, b, 5, padding=2) for a, b in ((12, 48), (48, 48), (48, SYMBOLS + 1))
    )
    return nn.Sequential(first, nn.GELU(), second, nn.GELU(), last)


def _symbol_losses(model: nn.Module, batch: Batch) -> Tensor:
    x, symbols = batch
    return _ctc(F.log_softmax(model(x), 1).permute(2, 0, 1), symbols)


@FIELD.workload(
    "cnn-ctc-symbols", "symbols in a sound, no alignment", "adamw-0.999", "one-cycle", 1e-3,
    _ctc_cnn, _symbol_losses, key="spelled",
)  # fmt: skip
def _symbol_sounds(g: Draw, count: int) -> Batch:
    symbols, ends = g.between(1, SYMBOLS + 1, count, EACH), g.between(4, 8, count, EACH).cumsum(1)
    place = (torch.arange(FRAMES)[None, :, None] >= ends[:, None]).sum(2).clamp(max=EACH - 1)
    voices = Draw("spelled", "voices").randn(SYMBOLS + 1, 12)
    heard = voices[symbols.gather(1, place)] + 0.8 * g.randn(count, FRAMES, 12)
    return heard.transpose(1, 2), symbols


# -- convolutions with weight normalisation: a sound without its echoes and noise ------------------


def _echo_cnn() -> nn.Module:
    first, second, last = (
        weight_norm(nn.Conv1d(a, b, 9, padding=4)) for a, b in ((1, 16), (16, 16), (16, 1))
    )
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)


@FIELD.workload(
    "cnn-dereverberation", "a sound without its echoes", "adamw-0.95", "wsd", 1e-3,
    _echo_cnn, mean_squares, key="echoed",
)  # fmt: skip
def _echoes(g: Draw, count: int, times: int = 64) -> Batch:
    time = torch.arange(times) / times
    pitch, shift = 20 * g.rand(count, 3, 1), 6 * g.rand(count, 3, 1)
    sound = torch.sin(pitch * time + shift).sum(1) * torch.exp(-3 * (time - g.rand(count, 1)).abs())
    echo = sound + 0.6 * sound.roll(3, 1) + 0.4 * sound.roll(7, 1)
    return (echo + 0.2 * g.randn(count, times))[:, None], sound[:, None]


# -- convolutions: which of eight knocks is in a recording; one label in ten is random -------------

KNOCK_TIMES, KNOCKS, KNOCK_LENGTH = 32, 8, 7


def _knock_cnn(width: int = 16) -> nn.Module:
    """Recordings (batch, moments) -> logits of the knocks"""
    return nn.Sequential(
        nn.Unflatten(1, (1, -1)), nn.Conv1d(1, width, KNOCK_LENGTH, 2, KNOCK_LENGTH // 2),
        nn.GELU(), nn.Conv1d(width, 2 * width, 5, padding=2), nn.GELU(),
        nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(2 * width, KNOCKS),
    )  # fmt: skip


@cache
def _knocks() -> Tensor:
    return 1.5 * Draw("knocked", "knocks").randn(KNOCKS, KNOCK_LENGTH)


@FIELD.workload(
    "cnn-knocks", "which knock is in a recording, 10 % of the labels random, seen 15 times",
    "lion", "linear", 1e-4, _knock_cnn, labelled, key="knocked", epochs=15, spare_validates=True,
)  # fmt: skip
def _recordings(g: Draw, count: int) -> Batch:
    x, knock = 0.7 * g.randn(count, KNOCK_TIMES), g.below(KNOCKS, count)
    at = g.below(KNOCK_TIMES - KNOCK_LENGTH + 1, count, 1) + torch.arange(KNOCK_LENGTH)
    loud = 0.5 + g.rand(count, 1)
    return x.scatter_add(1, at, loud * _knocks()[knock]), g.wrong(knock, KNOCKS, 0.1)
