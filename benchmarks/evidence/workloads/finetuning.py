"""Training of weights that are already trained: of all, or of low-rank adapters."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR

from ..problems.digits import seeded
from ..problems.problem import Batch, Problem, mean_loss
from ..problems.transformer import TRANSFORMER
from ..problems.transformer import losses as window_losses
from . import generated
from .generated import Key, labelled, problem
from .groups import decaying_matrices
from .tables import centers, cluster_mlp, clusters
from .text import WINDOWS, held_out, windows
from .vision import stroke_cnn, strokes

# -- from bytes of Python's sources to bytes of English: all weights, or low-rank adapters ---------

RANK = 4
PRETRAINING = 2000


@cache
def pretrained() -> dict[str, Tensor]:
    """Weights after `PRETRAINING` steps on Python's sources, at the best rate of that problem."""
    model = TRANSFORMER.build(0)
    optimizer = torch.optim.AdamW(TRANSFORMER.groups(model), lr=1e-2, betas=(0.9, 0.95))
    schedule = OneCycleLR(
        optimizer, 1e-2, total_steps=PRETRAINING, pct_start=0.1, cycle_momentum=False
    )
    for step in range(PRETRAINING):
        TRANSFORMER.losses(model, TRANSFORMER.batch(0, step)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.state_dict()


class Adapted(nn.Module):
    """A frozen matrix and an update of rank `RANK`, which begins at 0."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Buffer(frozen.weight.detach().clone())
        self.down = nn.Parameter(
            torch.randn(RANK, frozen.in_features) / math.sqrt(frozen.in_features)
        )
        self.up = nn.Parameter(torch.zeros(frozen.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + 2 * F.linear(F.linear(x, self.down), self.up)


def _model(seed: int) -> nn.Module:
    model = TRANSFORMER.build(seed)
    model.load_state_dict(pretrained())
    return model


def _adapted(seed: int) -> nn.Module:
    model = _model(seed)
    torch.manual_seed(seed)
    model.requires_grad_(False)
    for block in model.blocks:
        for name, module in list(block.named_children()):
            if isinstance(module, nn.Linear):
                setattr(block, name, Adapted(module))
    return model


def _problem(name: str, build: object) -> Problem:
    return Problem(
        name=name,
        steps=1500,
        batch_size=WINDOWS,
        build=build,  # type: ignore[arg-type]
        groups=lambda model: decaying_matrices(model, 0.0),
        batch=windows,
        spare=lambda seed, step, number: windows(seed, 10_000_000 + number),
        losses=window_losses,
        validate=lambda model: mean_loss(model, window_losses, held_out()),
    )


GPT_FINETUNED_BYTES = _problem("gpt-finetuned-bytes", _model)
GPT_LORA_BYTES = _problem("gpt-lora-bytes", _adapted)


# -- from clusters to the same ones, each moved a little -------------------------------------------


def _moved_clusters(key: Key, count: int) -> Batch:
    """The clusters of the first set, each moved a little."""
    x, y = clusters(key, count)
    return x + 0.8 * centers("second")[y].mean(1), y


MLP_FINETUNED_CLUSTERS = problem(
    "mlp-finetuned-clusters", generated.pretrained(cluster_mlp, clusters), _moved_clusters, labelled
)


# -- from sixteen strokes to sixteen others --------------------------------------------------------

CNN_FINETUNED_STROKES = problem(
    "cnn-finetuned-strokes",
    generated.pretrained(stroke_cnn, strokes),
    lambda key, count: strokes(key, count, "second"),
    labelled,
)


# -- a transformer: from one rule of what phrases mean to another ----------------------------------

VOCABULARY, PHRASE, MEANINGS = 30, 10, 10


class Phrases(nn.Module):
    """tokens (batch, 10) -> logits (batch, 10): a transformer, read out at its first position."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(VOCABULARY, width),
            nn.Parameter(0.02 * torch.randn(PHRASE, width)),
        )
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body, self.out = (
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Linear(width, MEANINGS),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.body(self.tokens(tokens) + self.positions)[:, 0])


@cache
def _meanings(rule: str) -> Tensor:
    return torch.randint(MEANINGS, (VOCABULARY, VOCABULARY), generator=seeded("retold", rule))


def _phrases(key: Key, count: int, rule: str = "first") -> Batch:
    """The label depends on the first token, and on the token at the place that this one names."""
    generator = seeded("retold", rule, *key)
    tokens = torch.randint(VOCABULARY, (count, PHRASE), generator=generator)
    named = tokens.gather(1, 1 + tokens[:, :1] % (PHRASE - 1))[:, 0]
    said = _meanings("first")[tokens[:, 0], named]
    if rule == "second":  # a third of the labels is permuted
        other = torch.arange(MEANINGS)
        other[: MEANINGS // 3] = other[: MEANINGS // 3].roll(1)
        said = other[said]
    return tokens, said


TRANSFORMER_FINETUNED_PHRASES = problem(
    "transformer-finetuned-phrases",
    generated.pretrained(Phrases, _phrases),
    lambda key, count: _phrases(key, count, "second"),
    labelled,
)
