"""One step of all matrices.

One that is cut over a mesh is put together on one rank, its owner, and its direction is cut again.

As in Moonlight's distributed Muon (Liu et al. 2025, Algorithm 1), but in a few rounds: the matrices
of the next round are on their way while those of this one are computed. An element is sent twice,
in the dtype of Newton-Schulz; there in float32 if that is float16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hdet.kernels import StepOptions
from hdet.kernels.interface import PLAIN, Column
from hdet.tensors import dtensor as shards

from .matrices import Matrix, MatrixStep, batches, check_matrices
from .newton_schulz import given_in, orthogonalise, work

_ROUNDS = 4
"""exchanges of a step, as far as an owner has so many matrices.

More hide more, in smaller messages.
"""


def _shard_dim(param: Any, mesh_dim: int) -> int:
    dim: int = param.placements[mesh_dim].dim
    return dim % param.ndim


class Course:
    """What is the same in every step of some matrices, whole or cut: which go together, and what
    goes to whom.

    Collective over the meshes of those that are cut: all ranks have the same matrices in the same
    order.
    """

    def __init__(self, matrices: Sequence[Matrix], dtype: torch.dtype) -> None:
        """`dtype`: of Newton-Schulz. Raises ValueError for a Partial matrix."""
        self.matrices = matrices
        whole: list[Matrix] = []
        along: dict[tuple[Any, int], list[Matrix]] = {}
        several: list[Matrix] = []
        for matrix in matrices:
            given: Any = matrix.param
            dims = shards.sharding_dims(given, f"a matrix of shape {tuple(given.shape)}")
            if all(
                _shard_dim(given, dim) < given.ndim - 2 for dim in dims
            ):  # also a stack that is cut between its matrices
                whole.append(matrix)
            elif len(dims) == 1 and type(given.placements[dims[0]]).__name__ == "Shard":
                along.setdefault((given.device_mesh, dims[0]), []).append(matrix)
            else:
                several.append(matrix)
        self._whole, self._several = batches(whole), batches(several)
        self._exchanges = [
            _Exchange(members, mesh, dim, dtype) for (mesh, dim), members in along.items()
        ]

    def run(self, step: MatrixStep) -> None:
        for batch in self._whole:
            step.whole(batch)
        for exchange in self._exchanges:
            exchange.run(step)
        for batch in self._several:
            _gathered(step, batch)
        step.end(self.matrices)


def _gathered(step: MatrixStep, matrices: Sequence[Matrix]) -> None:
    """Cut over several dimensions of a mesh: each rank gathers all and keeps its part."""
    how = step.rows[matrices[0].group].how
    whole: list[Any] = [
        shards.like(u.to(given_in(how.dtype)), m.param)
        for u, m in zip(step.directions(matrices), matrices, strict=True)
    ]
    made = orthogonalise([tensor.full_tensor() for tensor in whole], how, step.backend)
    if step.skip is not None:
        made = [torch.where(step.skip, 0.0, one) for one in made]
    step.update(
        matrices, [shards.part_of(full, m.param) for full, m in zip(made, matrices, strict=True)]
    )


@dataclass(frozen=True)
class _Piece:
    """A matrix and how it is cut: into `sizes[rank]` rows or columns, along `dim`."""

    matrix: Matrix
    dim: int
    sizes: list[int]

    def shape(self, rank: int) -> list[int]:
        shape = list(self.matrix.param.shape)
        shape[self.dim] = self.sizes[rank]
        return shape

    def numel(self, rank: int) -> int:
        return math.prod(self.shape(rank))

    def part(self, full: Tensor, rank: int) -> Tensor:
        return full.narrow(self.dim, [0, *accumulate(self.sizes)][rank], self.sizes[rank])


def shares(work_of: Sequence[int], ranks: int) -> list[list[int]]:
    """The numbers of the matrices that each rank owns: the largest first, each to whoever has least
    to do."""
    loads, owned = [0] * ranks, [[] for _ in range(ranks)]  # type: ignore[var-annotated]
    for i in sorted(range(len(work_of)), key=lambda i: (-work_of[i], i)):
        owner = loads.index(min(loads))
        owned[owner].append(i)
        loads[owner] += work_of[i]
    return owned


def _in_rounds(owned: list[int], rounds: int) -> list[list[int]]:
    bounds = [len(owned) * t // rounds for t in range(rounds + 1)]
    return [owned[bounds[t] : bounds[t + 1]] for t in range(rounds)]


class _Exchange:
    """Of matrices that are cut along one dimension of a mesh."""

    def __init__(
        self, matrices: Sequence[Matrix], mesh: Any, mesh_dim: int, dtype: torch.dtype
    ) -> None:
        self.group, self.dtype = mesh.get_group(mesh_dim), dtype
        self.rank, self.ranks = mesh.get_local_rank(mesh_dim), mesh.size(mesh_dim)
        self.device, self.own_device = (
            torch.device(mesh.device_type),
            matrices[0].sets[0].device,
        )  # another where shards are offloaded
        if self.device.type == self.own_device.type:
            self.device = self.own_device
        self.pieces = [self._piece(matrix, mesh_dim) for matrix in matrices]
        owned = shares([work(matrix.param.shape) for matrix in matrices], self.ranks)
        rounds = min(_ROUNDS, max(map(len, owned)))
        by_owner = [_in_rounds(mine, rounds) for mine in owned]
        self.rounds = [
            [[self.pieces[i] for i in of_owner[t]] for of_owner in by_owner] for t in range(rounds)
        ]
        self.batches = [
            batches([piece.matrix for piece in of_round[self.rank]]) for of_round in self.rounds
        ]

    def _piece(self, matrix: Matrix, mesh_dim: int) -> _Piece:
        dim = _shard_dim(matrix.param, mesh_dim)
        size = matrix.param.shape[dim]
        step = -(-size // self.ranks)  # as torch.chunk, and so Shard
        return _Piece(
            matrix,
            dim,
            [max(0, min(size, (rank + 1) * step) - rank * step) for rank in range(self.ranks)],
        )

    def run(self, step: MatrixStep) -> None:
        there = self._collect(step, 0)
        back: tuple[int, Any, Tensor] | None = None
        for t in range(len(self.rounds)):
            following = self._collect(step, t + 1) if t + 1 < len(self.rounds) else None
            returned = self._return(t, self._solved(step, t, there))
            if back is not None:
                self._finish(step, *back)
            back = returned
            if following is not None:
                there = following
        assert back is not None
        self._finish(step, *back)

    def _swap(
        self, parts: list[Tensor], send: list[int], receive: list[int], dtype: torch.dtype
    ) -> tuple[Any, Tensor]:
        sent = (
            torch.cat([part.reshape(-1).to(dtype) for part in parts])
            if parts
            else torch.empty(0, dtype=dtype)
        )
        received = torch.empty(sum(receive), dtype=dtype, device=self.device)
        return dist.all_to_all_single(
            received, sent.to(self.device), receive, send, group=self.group, async_op=True
        ), received

    def _collect(self, step: MatrixStep, t: int) -> tuple[Any, Tensor]:
        """Sends this rank's parts of all matrices of a round to their owners."""
        members = list(chain.from_iterable(self.rounds[t]))
        made = _directions(step, [piece.matrix for piece in members])
        send = [sum(piece.numel(self.rank) for piece in of_owner) for of_owner in self.rounds[t]]
        mine = self.rounds[t][self.rank]
        receive = [sum(piece.numel(rank) for piece in mine) for rank in range(self.ranks)]
        return self._swap(
            [made[id(piece.matrix)] for piece in members], send, receive, given_in(self.dtype)
        )

    def _solved(self, step: MatrixStep, t: int, arrived: tuple[Any, Tensor]) -> list[Tensor]:
        """The directions of the matrices that this rank owns."""
        waiting, received = arrived
        waiting.wait()
        mine = self.rounds[t][self.rank]
        parts = iter(
            received.split([piece.numel(rank) for rank in range(self.ranks) for piece in mine])
        )
        table = [
            [next(parts).view(piece.shape(rank)) for piece in mine] for rank in range(self.ranks)
        ]
        whole = {
            id(p.matrix): torch.cat([row[i] for row in table], dim=p.dim)
            for i, p in enumerate(mine)
        }
        made: dict[int, Tensor] = {}
        for batch in self.batches[t]:
            how = step.rows[batch[0].group].how
            made.update(
                zip(
                    map(id, batch),
                    orthogonalise([whole[id(m)] for m in batch], how, step.backend),
                    strict=True,
                )
            )
        return [made[id(piece.matrix)] for piece in mine]

    def _return(self, t: int, made: list[Tensor]) -> tuple[int, Any, Tensor]:
        mine = self.rounds[t][self.rank]
        parts = [
            piece.part(full, rank)
            for rank in range(self.ranks)
            for piece, full in zip(mine, made, strict=True)
        ]
        send = [sum(piece.numel(rank) for piece in mine) for rank in range(self.ranks)]
        receive = [sum(piece.numel(self.rank) for piece in of_owner) for of_owner in self.rounds[t]]
        return t, *self._swap(parts, send, receive, self.dtype)

    def _finish(self, step: MatrixStep, t: int, waiting: Any, received: Tensor) -> None:
        waiting.wait()
        members = list(chain.from_iterable(self.rounds[t]))
        received = received.to(self.own_device)
        if (
            step.skip is not None
        ):  # which lies with the shards, perhaps on another device than the products
            received.masked_fill_(step.skip, 0.0)
        parts = received.split([piece.numel(self.rank) for piece in members])
        ways = {
            id(p.matrix): part.view(p.shape(self.rank))
            for p, part in zip(members, parts, strict=True)
        }
        for of_group in _by_group([piece.matrix for piece in members]):
            step.update(of_group, [ways[id(matrix)] for matrix in of_group])


def _directions(step: MatrixStep, matrices: Sequence[Matrix]) -> Mapping[int, Tensor]:
    """By the matrix's id."""
    made: dict[int, Tensor] = {}
    for members in _by_group(matrices):
        made.update(zip(map(id, members), step.directions(members), strict=True))
    return made


def _by_group(matrices: Sequence[Matrix]) -> list[list[Matrix]]:
    found: dict[int, list[Matrix]] = {}
    for matrix in matrices:
        found.setdefault(matrix.group, []).append(matrix)
    return list(found.values())


class MatrixPlan:
    """Muon's step of the matrices of one device, beside the kernels' plans (kernels.StepPlan).

    By torch: it checks its tensors, once, and nothing that a step brings."""

    def __init__(
        self,
        matrices: Sequence[Matrix],
        num_replicas: int,
        dtype: torch.dtype,
        backend: str,
        seed: int | None,
        first_replica: int,
    ) -> None:
        """`dtype`: of Newton-Schulz.

        `seed`: of stochastic rounding, or None. Raises ValueError or TypeError for tensors that
        cannot be used.
        """
        check_matrices(matrices, num_replicas)
        self.matrices, self.dtype = matrices, dtype
        self.backend, self.seed, self.first_replica = backend, seed, first_replica
        self._present = [True] * len(matrices)
        self._course = Course(matrices, dtype)
        self._never = torch.zeros((), dtype=torch.float32, device=matrices[0].sets[0].device)
        self.norm = self.skipped = self._never

    def step(
        self, gradients: Column, settings: Sequence[Any], options: StepOptions = PLAIN
    ) -> None:
        """See kernels.StepPlan.step. `settings`: a Row for each group."""
        found = {
            matrix.place: gradient
            for matrix, gradient in zip(self.matrices, gradients, strict=True)
            if gradient is not None
        }
        present = [matrix.place in found for matrix in self.matrices]
        if present != self._present:
            self._present, self._course = (
                present,
                Course(list(compress(self.matrices, present)), self.dtype),
            )
        step = MatrixStep(
            settings,
            options,
            found,
            backend=self.backend,
            stochastic=self.seed,
            first_replica=self.first_replica,
        )
        self._course.run(step)
        self.skipped = self._never if step.skip is None else step.skip.float()

    def gradient_norms(self) -> Tensor:
        raise NotImplementedError  # of these a ShardedClip takes them

    def upload(self, settings: Sequence[Any], options: StepOptions = PLAIN) -> None:
        raise NotImplementedError
