"""Graphs, molecules, and sets of points."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..problems import Batch
from .kit import Draw, Field, for_muon, labelled, mlp, squares

FIELD = Field("graphs")

# -- message passing: the number of triangles in a graph of fourteen nodes, in five classes --------

NODES, ROUNDS, EDGES = 14, 3, (4, 9, 16, 26)


class Messages(nn.Module):
    """Adjacency (batch, 14, 14) -> logits (batch, 5): three rounds of messages, then a mean."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(NODES, width)
        self.rounds = nn.ModuleList(mlp(2 * width, width, width, of=nn.SiLU) for _ in range(ROUNDS))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(ROUNDS))
        self.out = nn.Linear(width, len(EDGES) + 1)

    def forward(self, adjacency: Tensor) -> Tensor:
        state = self.first(adjacency)
        for update, norm in zip(self.rounds, self.norms, strict=True):
            state = norm(state + update(torch.cat([state, adjacency @ state], -1)))
        return self.out(state.mean(1))


@FIELD.workload(
    "gnn-triangles", "the number of triangles in a graph", "adamw-0.95", "wsd", 1e-3,
    Messages, labelled, key="graphs",
)  # fmt: skip
def _graphs(g: Draw, count: int) -> Batch:
    density = 0.2 + 0.35 * g.rand(count, 1, 1)
    upper = (g.rand(count, NODES, NODES) < density).float().triu(1)
    adjacency = upper + upper.mT
    triangles = (adjacency @ adjacency * adjacency).sum((1, 2)) / 6
    return adjacency, torch.bucketize(triangles, torch.tensor(EDGES, dtype=torch.float32))


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
        asked = _complex_product(self.things(x[:, 0]), self.relations(x[:, 1]))
        return asked @ self.things.weight.T + self.fame


@cache
def _knowledge() -> Tensor:
    """Cumulative probabilities of all answers; those to question n are in (n, n + 1]."""
    g = Draw("linked", "knowledge")
    things, relations, fame = g.randn(THINGS, 12), g.randn(RELATIONS, 12), 0.7 * g.randn(THINGS)
    liking = _complex_product(things[:, None], relations) @ things.T
    chances = torch.softmax(0.8 * liking + fame, 2).double().flatten(0, 1)
    ends = chances.cumsum(1)
    return (ends / ends[:, -1:] + torch.arange(len(ends))[:, None]).flatten()


@FIELD.workload(
    "complex-knowledge-graph", "facts, seen 3 times", "adamw-0.999", "cosine", 1e-3,
    _ComplEx, labelled, key="linked", size=64, epochs=3,
)  # fmt: skip
def _facts(g: Draw, count: int) -> Batch:
    head, relation = g.zipf(THINGS, count), g.below(RELATIONS, count)
    question = head * RELATIONS + relation
    drawn = question + torch.rand(count, generator=g.generator, dtype=torch.float64)
    at = torch.searchsorted(_knowledge(), drawn, right=True)
    return torch.stack([head, relation], 1), (at - question * THINGS).clamp(0, THINGS - 1)


# -- messages between atoms: the energy of eight atoms (Finnis-Sinclair), a finite set -------------

ATOMS, ELEMENTS = 8, 3


class _Potential(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.steps = nn.Buffer(torch.linspace(0.5, 3.5, 12))
        self.pairs = mlp(12 + 2 * ELEMENTS, width, width, of=nn.SiLU)
        self.atoms = nn.Sequential(nn.SiLU(), mlp(width, width, 1, of=nn.SiLU))

    def forward(self, places: Tensor, elements: Tensor) -> Tensor:
        near = torch.exp(-4 * (torch.cdist(places, places)[..., None] - self.steps).square())
        kinds = F.one_hot(elements, ELEMENTS).float()
        one = kinds[:, :, None].expand(-1, -1, ATOMS, -1)
        seen = self.pairs(torch.cat([near, one, one.transpose(1, 2)], 3))
        others = 1 - torch.eye(ATOMS)[..., None]
        return self.atoms((seen * others).sum(2) / ATOMS).sum((1, 2))


@FIELD.workload(
    "gnn-molecules", "the energy of 8 atoms, seen 9 times", "fused-muon", "linear", 1e-3,
    _Potential, squares, key="energies", epochs=9, decay=for_muon,
)  # fmt: skip
def _molecules(g: Draw, count: int) -> Batch:
    common = Draw("energies", "elements")
    reach, depth = (0.7 + 0.6 * common.rand(ELEMENTS, ELEMENTS) for _ in range(2))
    places, elements = g.randn(count, ATOMS, 3), g.below(ELEMENTS, count, ATOMS)
    pair = elements[:, :, None], elements[:, None]
    away = ((places[:, :, None] - places[:, None]).square().sum(3) + 0.2).sqrt()
    apart, others = away / (reach + reach.T)[pair], 1 - torch.eye(ATOMS)
    pushed = ((depth + depth.T)[pair] * torch.exp(-4 * apart) * others).sum((1, 2))
    bound = ((torch.exp(-2.5 * apart) * others).sum(2) + 1e-3).sqrt().sum(1)
    return places, elements, (1.2 * pushed - 2 * bound + 8.2) / 0.7


# -- deep sets: which of eight curves points of the plane are drawn from ---------------------------

CURVES, POINTS = 8, 48


class Sets(nn.Module):
    """points (batch, count, 2) -> logits (batch, 8): deep sets."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.each = nn.Sequential(mlp(2, width, width, of=nn.GELU), nn.GELU())
        self.norm, self.all = nn.LayerNorm(width), mlp(width, width, CURVES, of=nn.GELU)

    def forward(self, points: Tensor) -> Tensor:
        return self.all(self.norm(self.each(points).mean(1)))


@FIELD.workload(
    "deep-sets-curves", "which curve points are from", "adamw-0.95", "linear", 1e-3,
    Sets, labelled, key="sets",
)  # fmt: skip
def _sets(g: Draw, count: int) -> Batch:
    """Curves r(t) = 1 + 0.4 sin(k t), k = 1 ... 8, rotated and scaled at random, with noise."""
    curve = g.below(CURVES, count)
    t, turn = 2 * torch.pi * g.rand(count, POINTS), 2 * torch.pi * g.rand(count, 1)
    wave = 1 + 0.4 * torch.sin((curve + 1)[:, None] * t)
    radius = wave * (0.7 + 0.6 * g.rand(count, 1))
    points = torch.stack([radius * torch.cos(t + turn), radius * torch.sin(t + turn)], -1)
    return points + 0.05 * g.randn(*points.shape), curve


# -- an MLP: the rotation of a body, some of whose corners are hidden (arXiv 1812.07035) -----------

CORNERS = 12


def _rotation(six: Tensor) -> Tensor:
    """(..., 6) -> rotations (..., 3, 3)"""
    first, second = six[..., :3], six[..., 3:]
    first = F.normalize(first, dim=-1)
    second = F.normalize(second - (first * second).sum(-1, keepdim=True) * first, dim=-1)
    return torch.stack([first, second, torch.linalg.cross(first, second)], -2)


def _rotation_losses(model: nn.Module, batch: Batch) -> Tensor:
    x, rotation = batch
    return (_rotation(model(x)) - rotation).square().sum((1, 2))


@FIELD.workload(
    "mlp-rotations", "the rotation of a body", "lion", "wsd", 1e-4,
    lambda: mlp(4 * CORNERS, 128, 128, 6, of=nn.GELU), _rotation_losses, key="turned", size=64,
)  # fmt: skip
def _rotated(g: Draw, count: int) -> Batch:
    body = Draw("turned", "body").randn(CORNERS, 3)
    rotation = _rotation(g.randn(count, 6))
    seen = body @ rotation + 0.1 * g.randn(count, CORNERS, 3)
    shown = (g.rand(count, CORNERS, 1) < 0.6).float()
    return torch.cat([seen * shown, shown], 2).flatten(1), rotation
