"""Training of weights that are already trained: of all, or of low-rank adapters."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR

from examples.bytes.model import GPT

from ..problems import Batch
from ..problems.transformer import SHAPE, TRANSFORMER
from .kit import Draw, Field, Transformer, labelled, trained
from .tables import FIRST_CLUSTERS, centers, cluster_mlp, clusters
from .text import bytes_of, english
from .vision import FIRST_STROKES, stroke_cnn, strokes

FIELD = Field("weights that are trained already")

# -- from bytes of Python's sources to bytes of English: all weights, or low-rank adapters ---------

RANK = 4
PRETRAINING = 2000


@cache
def pretrained() -> dict[str, Tensor]:
    """Weights after `PRETRAINING` steps on Python's sources, at the best rate of that problem."""
    model = TRANSFORMER.build(0)
    optimizer = torch.optim.AdamW(TRANSFORMER.groups(model), lr=1e-2, betas=(0.9, 0.95))
    schedule = OneCycleLR(optimizer, 1e-2, PRETRAINING, pct_start=0.1, cycle_momentum=False)
    batches = (TRANSFORMER.batch(0, step) for step in range(PRETRAINING))
    losses = (TRANSFORMER.losses(model, batch) for batch in batches)
    return trained(model, optimizer, schedule, losses)


class Adapted(nn.Module):
    """A frozen matrix or kernel with an update of low rank, which begins at 0."""

    def __init__(self, frozen: nn.Module, rank: int = RANK) -> None:
        super().__init__()
        kept, bias = frozen.weight, frozen.bias
        assert isinstance(kept, Tensor)
        self.frozen, inputs = nn.Buffer(kept.detach().clone()), kept[0].numel()
        self.bias = nn.Buffer(bias.detach().clone()) if isinstance(bias, Tensor) else None
        self.down = nn.Parameter(torch.randn(rank, inputs) / math.sqrt(inputs))
        self.up = nn.Parameter(torch.zeros(len(kept), rank))

    @property
    def weight(self) -> Tensor:
        return self.frozen + 2 * (self.up @ self.down).view_as(self.frozen)

    def forward(self, x: Tensor) -> Tensor:
        """Of a matrix."""
        return F.linear(x, self.frozen) + 2 * F.linear(F.linear(x, self.down), self.up)


def _model() -> GPT:
    model = GPT(SHAPE)
    model.load_state_dict(pretrained())
    return model


def _adapted() -> nn.Module:
    begin = torch.get_rng_state()
    model = _model()
    torch.set_rng_state(begin)  # adapters have the first numbers of a seed
    model.requires_grad_(False)
    for block in model.blocks:
        for name, module in list(block.named_children()):
            if isinstance(module, nn.Linear):
                setattr(block, name, Adapted(module))
    return model


MOVED = "from Python's sources to English"
FIELD.add(
    "gpt-finetuned-bytes", MOVED, "adamw-0.999", "linear", 1e-4,
    _model, TRANSFORMER.losses, bytes_of(english), size=8, decay=0.0,
)  # fmt: skip
FIELD.add(
    "gpt-lora-bytes", MOVED, "lion", "linear", 1e-4,
    _adapted, TRANSFORMER.losses, bytes_of(english), size=8, decay=0.0,
)  # fmt: skip


# -- from clusters to the same ones, each moved a little; from sixteen strokes to sixteen others ---


@FIELD.workload(
    "mlp-finetuned-clusters", "from clusters to moved ones", "lion", "linear", 1e-4,
    cluster_mlp, labelled, key=FIRST_CLUSTERS, pretrained_on=(clusters, FIRST_CLUSTERS),
)  # fmt: skip
def _moved_clusters(g: Draw, count: int) -> Batch:
    x, y = clusters(g, count)
    return x + 0.8 * centers("second")[y].mean(1), y


FIELD.workload(
    "cnn-finetuned-strokes", "from strokes to other strokes", "adamw-0.999", "linear", 1e-4,
    stroke_cnn, labelled, key=("letters", "second"), pretrained_on=(strokes, FIRST_STROKES),
)(strokes)  # fmt: skip


# -- a transformer: from one rule of what phrases mean to another ----------------------------------

VOCABULARY, PHRASE, MEANINGS, FIRST_PHRASES = 30, 10, 10, ("retold", "first")


@cache
def _meanings() -> Tensor:
    """By the first token and the named one."""
    return Draw(*FIRST_PHRASES).below(MEANINGS, VOCABULARY, VOCABULARY)


def _phrases(g: Draw, count: int) -> Batch:
    """The label depends on the first token, and on the token at the place that this one names."""
    tokens = g.below(VOCABULARY, count, PHRASE)
    named = tokens.gather(1, 1 + tokens[:, :1] % (PHRASE - 1))[:, 0]
    return tokens, _meanings()[tokens[:, 0], named]


@FIELD.workload(
    "transformer-finetuned-phrases",
    "from phrases to permuted labels", "adamw-0.95", "linear", 1e-4,
    lambda: Transformer(VOCABULARY, PHRASE, MEANINGS, 48, 96, read=0),
    labelled, key=("retold", "second"), pretrained_on=(_phrases, FIRST_PHRASES),
)  # fmt: skip
def _permuted_phrases(g: Draw, count: int) -> Batch:
    """A third of the labels is permuted."""
    tokens, said = _phrases(g, count)
    other = torch.arange(MEANINGS)
    other[: MEANINGS // 3] = other[: MEANINGS // 3].roll(1)
    return tokens, other[said]
