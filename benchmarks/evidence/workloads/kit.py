"""What workloads are made of: random numbers, parts of models, losses, and `Field`, which makes a
workload of a model, its losses, and a function that draws examples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

import hdet

from ..problems.problem import Batch, Losses, Problem, drawn, seeded
from ..training import OPTIMIZERS, SCHEDULES

Key = tuple[object, ...]
PRETRAINING = 1500
"""Steps that train the weights from which a workload begins."""
WHOLE = 10_000
"""Steps of a run in which a finite set is seen as often as its number of epochs says."""
STAGES = (2000, 4000, 6000)
"""From these steps on the next stage of data that changes is trained on."""
FAR = 10_000_000
"""A step that no run has: its examples are the spare ones of text and of handwritten digits."""


# -- random numbers --------------------------------------------------------------------------------


class Draw:
    """Random numbers that are a function of a key."""

    def __init__(self, *key: object) -> None:
        self.key, self.generator = key, seeded(*key)

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def below(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)

    def between(self, low: int, high: int, *shape: int) -> Tensor:
        """Whole numbers from ``low`` to ``high`` - 1."""
        return torch.randint(low, high, shape, generator=self.generator)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * self.rand(*shape)

    def coins(self, chance: Tensor) -> Tensor:
        """1.0 with this probability, else 0.0."""
        return (self.rand(*chance.shape) < chance).float()

    def choose(self, weights: Tensor) -> Tensor:
        """(rows,): an index for each row of weights."""
        return torch.multinomial(weights, 1, generator=self.generator)[:, 0]

    def zipf(self, many: int, *shape: int) -> Tensor:
        """Integers below ``many`` with Zipf's frequencies."""
        return (many ** self.rand(*shape)).long().clamp(max=many) - 1

    def wrong(self, labels: Tensor, classes: int, part: float) -> Tensor:
        """A ``part`` of the labels is replaced by random ones."""
        careless = self.rand(len(labels)) < part
        return torch.where(careless, self.below(classes, *labels.shape), labels)


@cache
def sines(
    key: Key, inputs: int, count: int = 24, frequency: float = 0.5, outs: Key = (), spread: int = 0
) -> Callable[[Tensor], Tensor]:
    """The function sin(x @ waves) @ weights of (examples, inputs) to (examples, *outs).

    The weights have variance 1 / spread (0: 1 / count).
    """
    g = Draw(*key)
    waves = frequency * g.randn(inputs, count)
    weights = g.randn(count, *outs) / (spread or count) ** 0.5  # type: ignore[arg-type]
    return lambda x: torch.sin(x @ waves) @ weights


# -- parts of models -------------------------------------------------------------------------------


def mlp(*sizes: int, of: type[nn.Module] = nn.ReLU, flat: bool = False) -> nn.Sequential:
    """Linear layers with ``of`` between them. ``flat``: (batch, 1) becomes (batch,)."""
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), of())]
    return nn.Sequential(*layers[:-1], *([nn.Flatten(0)] if flat else []))


def encoder(width: int, inner: int, heads: int = 4, layers: int = 2, **options: Any) -> nn.Module:
    options = {"dropout": 0.0, "batch_first": True, "norm_first": True} | options
    layer = nn.TransformerEncoderLayer(width, heads, inner, **options)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class Transformer(nn.Module):
    """tokens (batch, length) -> logits (batch, length, outs), with learned positions.

    ``read``: of one position alone, (batch, outs).
    """

    def __init__(
        self,
        symbols: int,
        length: int,
        outs: int,
        width: int = 32,
        inner: int = 128,
        *,
        causal: bool = False,
        read: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(symbols, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.body, self.out = encoder(width, inner, **options), nn.Linear(width, outs)
        self.mask = nn.Transformer.generate_square_subsequent_mask(length) if causal else None
        self.read = read

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        x = self.body(x, mask=self.mask, is_causal=self.mask is not None)
        return self.out(x if self.read is None else x[:, self.read])


class Recurrent(nn.Module):
    """x (batch, time, inputs) -> (batch, time, outs), or (batch, outs) of the last time."""

    def __init__(
        self, kind: type[nn.RNNBase], inputs: int, outs: int, width: int = 48, last: bool = True
    ) -> None:
        super().__init__()
        self.body, self.out = kind(inputs, width, batch_first=True), nn.Linear(width, outs)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        states = self.body(x)[0]
        return self.out(states[:, -1] if self.last else states)


# -- parameter groups ------------------------------------------------------------------------------

Groups = Callable[[nn.Module], list[dict[str, Any]]]


def decaying(decay: float) -> Groups:
    """Matrices and kernels decay, vectors do not; what is not trained is left out."""

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        trained = [p for p in model.parameters() if p.requires_grad]
        matrices, vectors = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() < 2]
        named = [
            {"name": "matrices", "params": matrices, "weight_decay": decay},
            {"name": "vectors", "params": vectors, "weight_decay": 0.0},
        ]
        return [group for group in named if group["params"]]

    return groups


def for_muon(model: nn.Module) -> list[dict[str, Any]]:
    """Hidden matrices, and the rest."""
    hidden, named = hdet.hidden_matrices(model), list(model.named_parameters())
    return [
        {"params": [p for n, p in named if hidden(n, p) == use], "use_muon": use}
        for use in (True, False)
    ]


# -- losses, one for each example ------------------------------------------------------------------


def loss_of(function: Callable[..., Tensor], **options: Any) -> Losses:
    """One of torch's, of the model's output and a batch's last column; of several outputs their
    mean."""

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        *x, y = batch
        each = function(model(*x), y, reduction="none", **options)
        return each if each.dim() == 1 else each.flatten(1).mean(1)

    return losses


labelled = loss_of(F.cross_entropy)
either = loss_of(F.binary_cross_entropy_with_logits)
"""y may be a probability."""
mean_squares = loss_of(F.mse_loss)


def squares(model: nn.Module, batch: Batch) -> Tensor:
    *x, y = batch
    return (model(*x) - y).square()


def contrast(model: nn.Module, batch: Batch) -> Tensor:
    similar, same = model(*batch), torch.arange(len(batch[0]))
    rows, columns = (F.cross_entropy(x, same, reduction="none") for x in (similar, similar.T))
    return (rows + columns) / 2


def each_place(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over a sequence's places of their cross entropies."""
    *x, y = batch
    return F.cross_entropy(model(*x).transpose(1, 2), y, reduction="none").mean(1)


# -- workloads -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """A problem, and how it is trained."""

    problem: Problem
    field: str
    what: str
    """What is learned, in a few words."""
    optimizer: str
    """One of `OPTIMIZERS`."""
    schedule: str
    """One of `SCHEDULES`."""
    rate: float
    """The peak that people would try first."""
    val_batches: Callable[[], list[Batch]] | None = None
    """Held-out mini-batches, other than those that validate."""

    @property
    def name(self) -> str:
        return self.problem.name

    def lasting(self, steps: int) -> Problem:
        return replace(self.problem, steps=steps)

    def optimizer_for(self, model: nn.Module, exponent: float = 0) -> Optimizer:
        """At 2^exponent times the usual rate."""
        return OPTIMIZERS[self.optimizer](self.problem.groups(model), self.rate * 2.0**exponent)

    def scheduler_for(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        return SCHEDULES[self.schedule](optimizer, steps)


ALL: dict[str, Workload] = {}
"""By name, in the order of the modules."""
Drawing = Callable[..., Batch]
"""(random numbers, count, ...) -> that many examples"""


class Examples(NamedTuple):
    """What is trained on, and what is not; the functions are those of `Problem`."""

    batch: Callable[[int, int], Batch]
    spare: Callable[[int, int, int], Batch]
    held_out: Callable[[], list[Batch]]


@dataclass(frozen=True)
class Field:
    """Workloads of one kind."""

    name: str

    def known(self, problem: Problem, *how: Any, **more: Any) -> None:
        """``how``: what is learned, optimizer, schedule, usual rate."""
        ALL[problem.name] = Workload(problem, self.name, *how, **more)

    def add(
        self,
        name: str,
        what: str,
        optimizer: str,
        schedule: str,
        rate: float,
        build: Callable[[], nn.Module],
        losses: Losses,
        examples: Examples,
        *,
        size: int = 32,
        decay: float | Groups = 0.01,
        steps: int = 1500,
        val_batches: Callable[[], list[Batch]] | None = None,
    ) -> None:
        """Makes a workload.

        Args:
            build: makes a model; torch's global random numbers are seeded before it is called.
            size: examples of a batch.
            decay: of matrices; or a function from the model to parameter groups.
        """
        groups = decaying(decay) if isinstance(decay, (int, float)) else decay
        examples = examples._replace(held_out=cache(examples.held_out))
        made = drawn(build)
        problem = Problem(name, steps, size, made, groups, *examples[:2], losses, examples[2])
        self.known(problem, what, optimizer, schedule, rate, val_batches=val_batches)

    def workload(
        self,
        name: str,
        what: str,
        optimizer: str,
        schedule: str,
        rate: float,
        build: Callable[[], nn.Module],
        losses: Losses,
        *,
        key: str | Key = (),
        size: int = 32,
        epochs: int = 0,
        rows: int = 0,
        part: int = 0,
        varies: Callable[[int | None], Any] | None = None,
        spare_validates: bool = False,
        pretrained_on: tuple[Drawing, Key] | None = None,
        **more: Any,
    ) -> Callable[[Drawing], Drawing]:
        """Makes a workload, as `add` does, of a function that draws examples, and returns it.

        Args:
            key: with what the keys of its random numbers begin; often an old name of the workload.
                Another one would be other data.
            epochs: how often `WHOLE` steps see a finite set; or rows: how large that is. Without
                either every example is new.
            part: validated is with one mini-batch of so many examples; 0: 32 of ``size``.
            varies: a last argument of the function, by the step, and that of the validation by
                None.
            spare_validates: `val_batches` are eight spare mini-batches.
            pretrained_on: a function that draws what trains the weights from which every run
                begins, and its key.
        """
        prefix = (key,) if isinstance(key, str) else key

        def decorate(function: Drawing) -> Drawing:
            def draw(key: Key, count: int, step: int | None = None) -> Batch:
                return function(Draw(*prefix, *key), count, *([varies(step)] if varies else []))

            def spare(seed: int, step: int, number: int) -> Batch:
                return draw((seed, "spare", number), size, step)

            def held_out() -> list[Batch]:
                keys: list[Key] = [("validation", n) for n in range(32)]
                return [draw(one, part or size) for one in ([("validation",)] if part else keys)]

            batch = lambda seed, step: draw((seed, step), size, step)
            if epochs or rows:
                every = cache(lambda: draw(("rows",), rows or WHOLE * size // epochs))
                batch = in_epochs(every, size, *(prefix if rows else (*prefix, "order")))
            if spare_validates:
                more["val_batches"] = lambda: [spare(0, 0, number) for number in range(8)]
            made = pretrained(build, *pretrained_on) if pretrained_on else build
            how = what, optimizer, schedule, rate, made, losses
            self.add(name, *how, Examples(batch, spare, held_out), size=size, **more)
            return function

        return decorate


def rising(*values: float) -> Callable[[int | None], float]:
    """What `Field.workload` takes for data that becomes harder: a value for each of four stages."""
    return lambda step: values[-1 if step is None else bisect_right(STAGES, step)]


def in_epochs(rows: Callable[[], Batch], size: int, *key: object) -> Callable[[int, int], Batch]:
    """(seed, step) -> a batch of a finite set, in a new order in each epoch."""

    @cache
    def order(seed: int, epoch: int) -> Tensor:
        return torch.randperm(len(rows()[0]), generator=seeded(*key, seed, epoch))

    def batch(seed: int, step: int) -> Batch:
        epoch, at = divmod(step, len(rows()[0]) // size)
        chosen = order(seed, epoch)[at * size : (at + 1) * size]
        return tuple(column[chosen] for column in rows())

    return batch


def trained(
    model: nn.Module, optimizer: Optimizer, schedule: LRScheduler, losses: Iterable[Tensor]
) -> dict[str, Tensor]:
    """The model's weights after a step on each of the losses."""
    for loss in losses:
        loss.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.state_dict()


def pretrained(
    build: Callable[[], nn.Module], draw: Drawing, prefix: Key
) -> Callable[[], nn.Module]:
    """A function that builds models with trained weights, always the same.

    The weights are trained once, for `PRETRAINING` steps, when the first model is built.
    """

    @cache
    def weights() -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = OneCycleLR(optimizer, 3e-3, total_steps=PRETRAINING)
        batches = (draw(Draw(*prefix, "pretraining", n), 64) for n in range(PRETRAINING))
        return trained(model, optimizer, schedule, (labelled(model, batch) for batch in batches))

    def built() -> nn.Module:
        model = build()
        model.load_state_dict(weights())
        return model

    return built
