"""Sequences other than text: sound, series, events, control, and lists of symbols or numbers."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from ..problems.digits import seeded
from ..problems.problem import Batch, Problem, drawn, mean_loss
from .generated import Key, finite, labelled, next_token, problem, squares, with_wrong_labels
from .groups import decaying_matrices
from .staged import staged

# -- a transformer encoder: sort twelve numbers ----------------------------------------------------

NUMBERS, LENGTH, LISTS = 32, 12, 32


class Sorter(nn.Module):
    """numbers (batch, time) -> logits (batch, time, 32) of the numbers in sorted order."""

    def __init__(self, width: int = 32, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.numbers, self.positions = (
            nn.Embedding(NUMBERS, width),
            nn.Parameter(0.02 * torch.randn(LENGTH, width)),
        )
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.body, self.out = (
            nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
            nn.Linear(width, NUMBERS),
        )

    def forward(self, numbers: Tensor) -> Tensor:
        return self.out(self.body(self.numbers(numbers) + self.positions))


def _lists(key: tuple[object, ...], count: int) -> Batch:
    numbers = torch.randint(NUMBERS, (count, LENGTH), generator=seeded("sorting", *key))
    return numbers, numbers.sort(1).values


def _place_losses(model: nn.Module, batch: Batch) -> Tensor:
    numbers, ordered = batch
    return F.cross_entropy(model(numbers).transpose(1, 2), ordered, reduction="none").mean(1)


TRANSFORMER_SORTING = Problem(
    name="transformer-sorting",
    steps=1500,
    batch_size=LISTS,
    build=drawn(Sorter),
    groups=lambda model: decaying_matrices(model, 0.01),
    batch=lambda seed, step: _lists((seed, step), LISTS),
    spare=lambda seed, step, number: _lists((seed, "spare", number), LISTS),
    losses=_place_losses,
    validate=lambda model: mean_loss(model, _place_losses, [_lists(("validation",), 2048)]),
)


# -- a causal transformer: the next of nested brackets of four kinds -------------------------------

BRACKETS, DEPTH = 4, 32


class BracketModel(nn.Module):
    """tokens (batch, time) -> logits (batch, time, 9): causal, with learned positions."""

    def __init__(self, width: int = 32, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(2 * BRACKETS + 1, width),
            nn.Parameter(0.02 * torch.randn(DEPTH, width)),
        )
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body, self.out = (
            nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
            nn.Linear(width, 2 * BRACKETS + 1),
        )
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(DEPTH), persistent=False
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(
            self.body(self.tokens(tokens) + self.positions, mask=self.mask, is_causal=True)
        )


def _brackets(key: Key, count: int) -> Batch:
    """Token 2k opens kind k, 2k + 1 closes it; token 8 begins a text.

    Closing brackets always match; opening ones are of a random kind.
    """
    generator = seeded("brackets", *key)
    opens, kinds = (
        torch.rand(count, DEPTH, generator=generator) < 0.55,
        torch.randint(BRACKETS, (count, DEPTH), generator=generator),
    )
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


TRANSFORMER_BRACKETS = problem(
    "transformer-brackets", drawn(BracketModel), _brackets, next_token, size=16
)


# -- a transformer: six pairs of key and value, then a key; which value belongs to it --------------

KEYS, PAIRS = 16, 6


class _Recall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = (
            nn.Embedding(2 * KEYS, 32),
            nn.Parameter(0.02 * torch.randn(2 * PAIRS + 1, 32)),
        )
        layer = nn.TransformerEncoderLayer(
            32, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(32, KEYS)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.embed(x) + self.place)[:, -1])


def _key_value_pairs(key: Key, count: int) -> Batch:
    generator = seeded("recalled", *key)
    keys = torch.rand(count, KEYS, generator=generator).argsort(1)[:, :PAIRS]
    values = torch.randint(KEYS, (count, PAIRS), generator=generator)
    asked = torch.randint(PAIRS, (count, 1), generator=generator)
    told = torch.stack([keys, KEYS + values], 2).flatten(1)
    return torch.cat([told, keys.gather(1, asked)], 1), values.gather(1, asked)[:, 0]


TRANSFORMER_RECALL = problem("transformer-recall", drawn(_Recall), _key_value_pairs, labelled)


# -- a GRU: the sum of the two marked numbers of twenty (the adding problem) -----------------------

ADDING_LENGTH = 20


class Adder(nn.Module):
    """(batch, time, 2) -> (batch,): a GRU."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.body, self.out = nn.GRU(2, width, batch_first=True), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x)[0][:, -1])[:, 0]


def _marked_numbers(key: Key, count: int) -> Batch:
    generator = seeded("marked", *key)
    numbers, marks = (
        torch.rand(count, ADDING_LENGTH, generator=generator),
        torch.zeros(count, ADDING_LENGTH),
    )
    places = torch.rand(count, ADDING_LENGTH, generator=generator).topk(2).indices
    marks.scatter_(1, places, 1.0)
    return torch.stack([numbers, marks], -1), (numbers * marks).sum(1)


GRU_ADDING = problem("gru-adding", drawn(Adder), _marked_numbers, squares)


# -- a recurrence without gates: three bits, to be remembered for ever longer times ----------------

BITS = 3
LENGTHS = (5, 10, 20, 30)
"""Times in each stage."""


class Memory(nn.Module):
    """(batch, time, 4) -> logits (batch, 8)"""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.body, self.out = nn.RNN(4, width, batch_first=True), nn.Linear(width, 2**BITS)
        nn.init.orthogonal_(self.body.weight_hh_l0)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x)[0][:, -1])


def _bits(key: Key, count: int, length: int) -> Batch:
    """The bits come first, then noise, and a mark at the end."""
    generator = seeded("harder", *key)
    bits, x = torch.randint(2, (count, BITS), generator=generator), torch.zeros(count, length, 4)
    x[:, :BITS, 0], x[:, :BITS, 2], x[:, -1, 3] = 2.0 * bits - 1, 1.0, 1.0
    x[:, :, 1] = 0.5 * torch.randn(count, length, generator=generator)
    return x, (bits * torch.tensor([1, 2, 4])).sum(1)


RNN_MEMORY_RISING_LENGTH = staged(
    "rnn-memory-rising-length",
    drawn(Memory),
    lambda key, count, stage: _bits(key, count, LENGTHS[stage]),
    labelled,
)


# -- an LSTM: the next values of two coupled oscillators with noise --------------------------------

TIMES = 24


class Forecaster(nn.Module):
    """values (batch, time, 2) -> means and log deviations of the next ones (batch, time, 4)."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.body, self.out = nn.LSTM(2, width, batch_first=True), nn.Linear(width, 4)

    def forward(self, values: Tensor) -> Tensor:
        return self.out(self.body(values)[0])


def _series(key: Key, count: int) -> Batch:
    generator = seeded("series", *key)
    x, v = torch.randn(count, 2, generator=generator), torch.randn(count, 2, generator=generator)
    strength, seen = 0.5 + torch.rand(count, 1, generator=generator), []
    for _ in range(TIMES + 1):
        v = 0.98 * v - 0.3 * (strength * torch.sin(x) + 0.5 * (x - x.flip(1)))
        x = x + 0.3 * v
        seen.append(x + 0.05 * torch.randn(count, 2, generator=generator))
    values = torch.stack(seen, 1)
    return values[:, :-1], values[:, 1:]


def _gaussian_losses(model: nn.Module, batch: Batch) -> Tensor:
    values, following = batch
    mean, log_deviation = model(values).chunk(2, -1)
    log_deviation = log_deviation.clamp(-6, 6)
    return (
        0.5 * ((following - mean) / log_deviation.exp()).square()
        + log_deviation
        + 0.5 * math.log(2 * math.pi)
    ).mean((1, 2))


LSTM_OSCILLATORS = problem("lstm-oscillators", drawn(Forecaster), _series, _gaussian_losses)


# -- an MLP, applied step by step: the states of a driven pendulum ---------------------------------

SWING_STEPS, SWING_TIME = 16, 0.25


class Pendulum(nn.Module):
    """first states (batch, 2), pushes (batch, 16) -> states (batch, 16, 2)"""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.change = nn.Sequential(
            nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
        )

    def forward(self, state: Tensor, pushes: Tensor) -> Tensor:
        states = []
        for push in pushes.unbind(1):
            state = state + self.change(torch.cat([state, push[:, None]], 1))
            states.append(state)
        return torch.stack(states, 1)


def _swings(key: Key, count: int) -> Batch:
    generator = seeded("swung", *key)
    angle, speed = (3 * torch.rand(count, generator=generator) - 1.5 for _ in range(2))
    first, pushes, states = (
        torch.stack([angle, speed], 1),
        torch.randn(count, SWING_STEPS, generator=generator),
        [],
    )
    for push in pushes.unbind(1):
        for _ in range(5):
            speed = speed + SWING_TIME / 5 * (push - torch.sin(2 * angle) - 0.2 * speed)
            angle = angle + SWING_TIME / 5 * speed
        states.append(torch.stack([angle, speed], 1))
    return first, pushes, torch.stack(states, 1)


def _state_losses(model: nn.Module, batch: Batch) -> Tensor:
    first, pushes, states = batch
    return (model(first, pushes) - states).square().mean((1, 2))


MLP_PENDULUM = problem("mlp-pendulum", drawn(Pendulum), _swings, _state_losses)


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
    return (
        0.8
        * EVENT_DECAY
        * torch.softmax(2 * torch.randn(EVENTS, EVENTS, generator=seeded("awaited", "brings")), 1)
    )


def _events(key: Key, count: int) -> Batch:
    generator = seeded("awaited", *key)
    excited, gaps, kinds = torch.zeros(count, EVENTS), [], []
    waits = torch.empty(EVENT_STEPS + 1, count, 1).exponential_(generator=generator)
    chosen = torch.rand(EVENT_STEPS + 1, count, 1, generator=generator)
    for wait, part in zip(waits, chosen, strict=True):
        rates = 0.1 + excited
        gap = wait / rates.sum(1, keepdim=True)
        kind = (part * rates.sum(1, keepdim=True) > rates.cumsum(1)).sum(1).clamp(max=EVENTS - 1)
        excited = excited * torch.exp(-EVENT_DECAY * gap) + _excitation()[kind]
        gaps.append(gap[:, 0])
        kinds.append(kind)
    return torch.stack(gaps, 1).clamp(min=1e-4).log(), torch.stack(kinds, 1)


def _event_losses(model: nn.Module, batch: Batch) -> Tensor:
    gaps, kinds = batch
    what, weights, middles, widths = model(gaps[:, :-1], kinds[:, :-1]).split([EVENTS, 3, 3, 3], 2)
    widths = widths.clamp(-4, 4)
    off = (gaps[:, 1:, None] - middles) * torch.exp(-widths)
    when = torch.logsumexp(
        F.log_softmax(weights, 2) - widths - 0.5 * off.square() - 0.5 * math.log(2 * math.pi), 2
    )
    return (F.cross_entropy(what.transpose(1, 2), kinds[:, 1:], reduction="none") - when).mean(1)


GRU_HAWKES = problem("gru-hawkes", drawn(_EventModel), _events, _event_losses)


# -- a conditional random field: the states of a machine, from its gauges --------------------------

STATES, MACHINE_STEPS, GAUGES, GAUGE_SPAN = 5, 8, 3, 5


class _RandomField(nn.Module):
    """Gauges (batch, ticks, gauges) -> scores of states (batch, ticks, states) and transitions."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(GAUGE_SPAN * GAUGES, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, STATES),
        )
        self.goes = nn.Parameter(torch.zeros(STATES, STATES))

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        around = F.pad(seen, (0, 0, GAUGE_SPAN // 2, GAUGE_SPAN // 2)).unfold(1, GAUGE_SPAN, 1)
        return self.layers(around.flatten(2)), self.goes


@cache
def _machine() -> tuple[Tensor, Tensor, Tensor]:
    """Transition probabilities (states, states), and the gauges' dynamics in each state:

    matrices (states, gauges, gauges) and offsets (states, gauges).
    """
    generator = seeded("stated", "machine")
    goes = torch.softmax(
        1.5 * torch.randn(STATES, STATES, generator=generator) + 2 * torch.eye(STATES), 1
    )
    return (
        goes,
        0.5 * torch.randn(STATES, GAUGES, GAUGES, generator=generator),
        torch.randn(STATES, GAUGES, generator=generator),
    )


def _machine_runs(key: Key, count: int) -> Batch:
    generator = seeded("stated", *key)
    goes, on, where = _machine()
    state, gauges = (
        torch.randint(STATES, (count,), generator=generator),
        torch.randn(count, GAUGES, generator=generator),
    )
    noise, chosen = (
        torch.randn(MACHINE_STEPS, count, GAUGES, generator=generator),
        torch.rand(MACHINE_STEPS, count, 1, generator=generator),
    )
    states, seen = [], []
    for pushed, part in zip(noise, chosen, strict=True):
        state = (part > goes.cumsum(1)[state]).sum(1).clamp(max=STATES - 1)
        gauges = torch.tanh((gauges[:, None] @ on[state])[:, 0] + where[state]) + 0.5 * pushed
        states.append(state)
        seen.append(gauges)
    return torch.stack(seen, 1), torch.stack(states, 1)


def _path_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Negative log-likelihood of the path of states, per tick."""
    seen, states = batch
    scores, goes = model(seen)
    right = scores.gather(2, states[..., None]).sum((1, 2)) + goes[
        states[:, :-1], states[:, 1:]
    ].sum(1)
    every, *others = scores.unbind(1)
    for score in others:
        every = torch.logsumexp(every[:, :, None] + goes, 1) + score
    return (torch.logsumexp(every, 1) - right) / MACHINE_STEPS


CRF_STATES = problem("crf-states", drawn(_RandomField), _machine_runs, _path_losses)


# -- convolutions and a GRU: which four signs are in a sound, without their places (CTC) -----------

SIGNS, SIGNS_EACH, SIGN_TIMES, BANDS = 6, 4, 32, 8


class Listener(nn.Module):
    """sounds (batch, 8, 32) -> log-probabilities (batch, 32, 7), where 0 is the blank"""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv1d(BANDS, width, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(width, width, 5, padding=2),
            nn.ReLU(),
        )
        self.body, self.out = (
            nn.GRU(width, width, batch_first=True, bidirectional=True),
            nn.Linear(2 * width, SIGNS + 1),
        )

    def forward(self, sounds: Tensor) -> Tensor:
        return self.out(self.body(self.first(sounds).mT)[0]).log_softmax(-1)


@cache
def _sounds() -> Tensor:
    return 1.5 * torch.randn(SIGNS + 1, BANDS, generator=seeded("spoken", "sounds"))


def _sign_sounds(key: Key, count: int) -> Batch:
    """Each of four signs lasts for 3 to 7 ticks; then there is silence."""
    generator = seeded("spoken", *key)
    signs = torch.randint(1, SIGNS + 1, (count, SIGNS_EACH), generator=generator)
    ends = torch.randint(3, 8, (count, SIGNS_EACH), generator=generator).cumsum(1)
    at = (torch.arange(SIGN_TIMES)[None, :, None] >= ends[:, None, :]).sum(-1)
    now = torch.cat([signs, torch.zeros(count, 1, dtype=torch.long)], 1).gather(1, at)
    return (_sounds()[now] + torch.randn(count, SIGN_TIMES, BANDS, generator=generator)).mT, signs


def _sign_losses(model: nn.Module, batch: Batch) -> Tensor:
    sounds, signs = batch
    count = len(sounds)
    lengths = torch.full((count,), SIGN_TIMES), torch.full((count,), SIGNS_EACH)
    return (
        F.ctc_loss(
            model(sounds).transpose(0, 1), signs, *lengths, reduction="none", zero_infinity=True
        )
        / SIGNS_EACH
    )


GRU_CTC_SIGNS = problem("gru-ctc-signs", drawn(Listener), _sign_sounds, _sign_losses, size=16)


# -- convolutions alone: which four symbols are in a sound, without their places (CTC) -------------

SYMBOLS, FRAMES, SYMBOLS_EACH = 8, 28, 4


def _ctc_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(12, 48, 5, padding=2),
        nn.GELU(),
        nn.Conv1d(48, 48, 5, padding=2),
        nn.GELU(),
        nn.Conv1d(48, SYMBOLS + 1, 5, padding=2),
    )


def _symbol_sounds(key: Key, count: int) -> Batch:
    generator = seeded("spelled", *key)
    symbols = torch.randint(1, SYMBOLS + 1, (count, SYMBOLS_EACH), generator=generator)
    long = torch.randint(4, 8, (count, SYMBOLS_EACH), generator=generator)
    ends = long.cumsum(1)
    place = (
        (torch.arange(FRAMES)[None, :, None] >= ends[:, None]).sum(2).clamp(max=SYMBOLS_EACH - 1)
    )
    voices = torch.randn(SYMBOLS + 1, 12, generator=seeded("spelled", "voices"))
    heard = voices[symbols.gather(1, place)] + 0.8 * torch.randn(
        count, FRAMES, 12, generator=generator
    )
    return heard.transpose(1, 2), symbols


def _symbol_losses(model: nn.Module, batch: Batch) -> Tensor:
    x, symbols = batch
    said = F.log_softmax(model(x), 1).permute(2, 0, 1)
    count = len(symbols)
    lengths = torch.full((count,), FRAMES), torch.full((count,), SYMBOLS_EACH)
    return F.ctc_loss(said, symbols, *lengths, reduction="none") / SYMBOLS_EACH


CNN_CTC_SYMBOLS = problem("cnn-ctc-symbols", drawn(_ctc_cnn), _symbol_sounds, _symbol_losses)


# -- convolutions with weight normalisation: a sound without its echoes and noise ------------------

ECHO_TIMES = 64


def _echo_cnn() -> nn.Module:
    def block(a: int, b: int) -> nn.Module:
        return weight_norm(nn.Conv1d(a, b, 9, padding=4))

    return nn.Sequential(block(1, 16), nn.ReLU(), block(16, 16), nn.ReLU(), block(16, 1))


def _echoes(key: Key, count: int) -> Batch:
    generator = seeded("echoed", *key)
    time = torch.arange(ECHO_TIMES) / ECHO_TIMES
    pitch, shift = (
        20 * torch.rand(count, 3, 1, generator=generator),
        6 * torch.rand(count, 3, 1, generator=generator),
    )
    sound = torch.sin(pitch * time + shift).sum(1) * torch.exp(
        -3 * (time - torch.rand(count, 1, generator=generator)).abs()
    )
    echo = sound + 0.6 * sound.roll(3, 1) + 0.4 * sound.roll(7, 1)
    return (echo + 0.2 * torch.randn(count, ECHO_TIMES, generator=generator))[:, None], sound[
        :, None
    ]


def _sound_losses(model: nn.Module, batch: Batch) -> Tensor:
    return squares(model, batch).mean((1, 2))


CNN_DEREVERBERATION = problem("cnn-dereverberation", drawn(_echo_cnn), _echoes, _sound_losses)


# -- convolutions: which of eight knocks is in a recording; one label in ten is random -------------

KNOCK_TIMES, KNOCKS, KNOCK_LENGTH = 32, 8, 7


class _KnockCNN(nn.Module):
    """Recordings (batch, moments) -> logits of the knocks"""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, width, KNOCK_LENGTH, stride=2, padding=KNOCK_LENGTH // 2),
            nn.GELU(),
            nn.Conv1d(width, 2 * width, 5, padding=2),
            nn.GELU(),
        )
        self.last = nn.Linear(2 * width, KNOCKS)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x[:, None]).amax(2))


@cache
def _knocks() -> Tensor:
    return 1.5 * torch.randn(KNOCKS, KNOCK_LENGTH, generator=seeded("knocked", "knocks"))


def _recordings(key: Key, count: int) -> Batch:
    generator = seeded("knocked", *key)
    x = 0.7 * torch.randn(count, KNOCK_TIMES, generator=generator)
    knock = torch.randint(KNOCKS, (count,), generator=generator)
    at = torch.randint(
        KNOCK_TIMES - KNOCK_LENGTH + 1, (count, 1), generator=generator
    ) + torch.arange(KNOCK_LENGTH)
    loud = 0.5 + torch.rand(count, 1, generator=generator)
    return x.scatter_add(1, at, loud * _knocks()[knock]), with_wrong_labels(
        generator, knock, KNOCKS, 0.1
    )


CNN_KNOCKS = finite(
    problem("cnn-knocks", drawn(_KnockCNN), _recordings, labelled),
    _recordings,
    epochs=15,
    key="knocked",
)
