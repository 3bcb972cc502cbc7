"""Graphs, molecules, and sets of points."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..problems.digits import seeded
from ..problems.problem import Batch, drawn
from .generated import Key, finite, labelled, problem, zipf
from .groups import hidden_matrices

# -- message passing: the number of triangles in a graph of fourteen nodes, in five classes --------

NODES, ROUNDS, EDGES = 14, 3, (4, 9, 16, 26)


class Messages(nn.Module):
    """Adjacency (batch, 14, 14) -> logits (batch, 5): three rounds of messages, then a mean."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(NODES, width)
        self.rounds = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))
            for _ in range(ROUNDS)
        )
        self.norms, self.out = (
            nn.ModuleList(nn.LayerNorm(width) for _ in range(ROUNDS)),
            nn.Linear(width, len(EDGES) + 1),
        )

    def forward(self, adjacency: Tensor) -> Tensor:
        state = self.first(adjacency)
        for update, norm in zip(self.rounds, self.norms, strict=True):
            state = norm(state + update(torch.cat([state, adjacency @ state], -1)))
        return self.out(state.mean(1))


def _graphs(key: Key, count: int) -> Batch:
    generator = seeded("graphs", *key)
    density = 0.2 + 0.35 * torch.rand(count, 1, 1, generator=generator)
    upper = (torch.rand(count, NODES, NODES, generator=generator) < density).float().triu(1)
    adjacency = upper + upper.mT
    triangles = (adjacency @ adjacency * adjacency).sum((1, 2)) / 6
    return adjacency, torch.bucketize(triangles, torch.tensor(EDGES, dtype=torch.float32))


GNN_TRIANGLES = problem("gnn-triangles", drawn(Messages), _graphs, labelled)


# -- complex embeddings (ComplEx, arXiv 1606.06357): facts of a knowledge graph, a finite set ------

THINGS, RELATIONS = 600, 16


def _complex_product(thing: Tensor, relation: Tensor) -> Tensor:
    """The product of complex vectors, stored as real parts and then imaginary parts."""
    (a, b), (c, d) = thing.chunk(2, -1), relation.chunk(2, -1)
    return torch.cat([a * c - b * d, a * d + b * c], -1)


class _ComplEx(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.things, self.relations = nn.Embedding(THINGS, width), nn.Embedding(RELATIONS, width)
        self.fame = nn.Parameter(torch.zeros(THINGS))
        for table in (self.things, self.relations):
            nn.init.normal_(table.weight, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        head, relation = x.T
        return (
            _complex_product(self.things(head), self.relations(relation)) @ self.things.weight.T
            + self.fame
        )


@cache
def _knowledge() -> Tensor:
    """Cumulative probabilities of all answers; those to question n are in (n, n + 1]."""
    generator = seeded("linked", "knowledge")
    things, relations = (torch.randn(many, 12, generator=generator) for many in (THINGS, RELATIONS))
    fame = 0.7 * torch.randn(THINGS, generator=generator)
    liking = _complex_product(things[:, None], relations) @ things.T
    chances = torch.softmax(0.8 * liking + fame, 2).double().flatten(0, 1)
    ends = chances.cumsum(1)
    return (ends / ends[:, -1:] + torch.arange(len(ends))[:, None]).flatten()


def _facts(key: Key, count: int) -> Batch:
    generator = seeded("linked", *key)
    head, relation = (
        zipf(generator, THINGS, count),
        torch.randint(RELATIONS, (count,), generator=generator),
    )
    question = head * RELATIONS + relation
    at = torch.searchsorted(
        _knowledge(),
        question + torch.rand(count, generator=generator, dtype=torch.float64),
        right=True,
    )
    return torch.stack([head, relation], 1), (at - question * THINGS).clamp(0, THINGS - 1)


COMPLEX_KNOWLEDGE_GRAPH = finite(
    problem("complex-knowledge-graph", drawn(_ComplEx), _facts, labelled, size=64),
    _facts,
    epochs=3,
    key="linked",
)


# -- messages between atoms: the energy of eight atoms (Finnis-Sinclair), a finite set -------------

ATOMS, ELEMENTS = 8, 3


class _Potential(nn.Module):
    steps: Tensor

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.register_buffer("steps", torch.linspace(0.5, 3.5, 12))
        self.pairs = nn.Sequential(
            nn.Linear(12 + 2 * ELEMENTS, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.atoms = nn.Sequential(
            nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def forward(self, places: Tensor, elements: Tensor) -> Tensor:
        near = torch.exp(-4 * (torch.cdist(places, places)[..., None] - self.steps).square())
        kinds = F.one_hot(elements, ELEMENTS).float()
        one, other = (
            kinds[:, :, None].expand(-1, -1, ATOMS, -1),
            kinds[:, None].expand(-1, ATOMS, -1, -1),
        )
        others = 1 - torch.eye(ATOMS)[..., None]
        return self.atoms(
            (self.pairs(torch.cat([near, one, other], 3)) * others).sum(2) / ATOMS
        ).sum((1, 2))


def _molecules(key: Key, count: int) -> Batch:
    generator, common = seeded("energies", *key), seeded("energies", "elements")
    reach, depth = (0.7 + 0.6 * torch.rand(ELEMENTS, ELEMENTS, generator=common) for _ in range(2))
    places, elements = (
        torch.randn(count, ATOMS, 3, generator=generator),
        torch.randint(ELEMENTS, (count, ATOMS), generator=generator),
    )
    pair = elements[:, :, None], elements[:, None]
    apart = ((places[:, :, None] - places[:, None]).square().sum(3) + 0.2).sqrt() / (
        reach + reach.T
    )[pair]
    others = 1 - torch.eye(ATOMS)
    pushed = ((depth + depth.T)[pair] * torch.exp(-4 * apart) * others).sum((1, 2))
    bound = ((torch.exp(-2.5 * apart) * others).sum(2) + 1e-3).sqrt().sum(1)
    return places, elements, (1.2 * pushed - 2 * bound + 8.2) / 0.7


def _energy_losses(model: nn.Module, batch: Batch) -> Tensor:
    places, elements, energy = batch
    return (model(places, elements) - energy).square()


GNN_MOLECULES = finite(
    replace(
        problem("gnn-molecules", drawn(_Potential), _molecules, _energy_losses),
        groups=hidden_matrices,
    ),
    _molecules,
    epochs=9,
    key="energies",
)


# -- deep sets: which of eight curves points of the plane are drawn from ---------------------------

CURVES, POINTS = 8, 48


class Sets(nn.Module):
    """points (batch, count, 2) -> logits (batch, 8): deep sets."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.each = nn.Sequential(
            nn.Linear(2, width), nn.GELU(), nn.Linear(width, width), nn.GELU()
        )
        self.norm, self.all = (
            nn.LayerNorm(width),
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, CURVES)),
        )

    def forward(self, points: Tensor) -> Tensor:
        return self.all(self.norm(self.each(points).mean(1)))


def _sets(key: Key, count: int) -> Batch:
    """Curves r(t) = 1 + 0.4 sin(k t), k = 1 ... 8, rotated and scaled at random, with noise."""
    generator = seeded("sets", *key)
    curve = torch.randint(CURVES, (count,), generator=generator)
    t, turn = (
        2 * torch.pi * torch.rand(count, POINTS, generator=generator),
        2 * torch.pi * torch.rand(count, 1, generator=generator),
    )
    radius = (1 + 0.4 * torch.sin((curve + 1)[:, None] * t)) * (
        0.7 + 0.6 * torch.rand(count, 1, generator=generator)
    )
    points = torch.stack([radius * torch.cos(t + turn), radius * torch.sin(t + turn)], -1)
    return points + 0.05 * torch.randn(points.shape, generator=generator), curve


DEEP_SETS_CURVES = problem("deep-sets-curves", drawn(Sets), _sets, labelled)


# -- an MLP: the rotation of a body, some of whose corners are hidden (arXiv 1812.07035) -----------

CORNERS = 12


def _rotation(six: Tensor) -> Tensor:
    """(..., 6) -> rotations (..., 3, 3)"""
    first, second = six[..., :3], six[..., 3:]
    first = F.normalize(first, dim=-1)
    second = F.normalize(second - (first * second).sum(-1, keepdim=True) * first, dim=-1)
    return torch.stack([first, second, torch.linalg.cross(first, second)], -2)


def _rotated(key: Key, count: int) -> Batch:
    generator = seeded("turned", *key)
    body = torch.randn(CORNERS, 3, generator=seeded("turned", "body"))
    rotation = _rotation(torch.randn(count, 6, generator=generator))
    seen = body @ rotation + 0.1 * torch.randn(count, CORNERS, 3, generator=generator)
    shown = (torch.rand(count, CORNERS, 1, generator=generator) < 0.6).float()
    return torch.cat([seen * shown, shown], 2).flatten(1), rotation


def _rotation_losses(model: nn.Module, batch: Batch) -> Tensor:
    x, rotation = batch
    return (_rotation(model(x)) - rotation).square().sum((1, 2))


def _rotation_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4 * CORNERS, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 6)
    )


MLP_ROTATIONS = problem("mlp-rotations", drawn(_rotation_mlp), _rotated, _rotation_losses, size=64)
