"""One step of all matrices.

One that is cut over a mesh is put together on one rank, its owner, and its direction is cut again.

As in Moonlight's distributed Muon (Liu et al. 2025, Algorithm 1), but in a few rounds: the matrices
of the next round are on their way while those of this one are computed. An element is sent twice,
in the dtype of Newton-Schulz; there in float32 if that is float16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hdet.kernels import StepOptions
from hdet.kernels.interface import PLAIN, Column
from hdet.tensors import dtensor as shards

from .matrices import Kernels, Matrix, MatrixStep, Together, batches, check_matrices
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

    def __init__(self, matrices: Sequence[Matrix], dtype: torch.dtype, how: Kernels) -> None:
        """`dtype`: of Newton-Schulz. Raises ValueError or TypeError for matrices that cannot be
        stepped."""
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
        exchanges = [_Exchange(members, *cut, dtype) for cut, members in along.items()]
        alone, gathered = batches(whole), batches(several)
        rounds = [exchange.members(t) for exchange in exchanges for t in exchange.turns]
        together = [*alone, *gathered, *rounds]
        size = max(sum(matrix.shape.numel() for matrix in members) for members in together)
        device = matrices[0].sets[0].device
        given, count = given_in(dtype), 3 if rounds else 1
        rooms = [torch.empty(size, dtype=given, device=device) for _ in range(count)]

        def calls(members: Sequence[Matrix], t: int = 0) -> Together:
            return Together(members, rooms[t % count], dtype, how)

        self._whole, self._several = list(map(calls, alone)), list(map(calls, gathered))
        self._exchanges, self._backend = exchanges, how.backend
        for exchange in exchanges:  # a round begins before the one before the last has ended
            exchange.calls = [calls(exchange.members(t), t) for t in exchange.turns]
        self.calls = [*self._whole, *self._several, *chain(*(e.calls for e in exchanges))]

    def run(self, step: MatrixStep) -> None:
        for calls in self._whole:
            calls.whole(step, self._backend)
        for exchange in self._exchanges:
            exchange.run(step, self._backend)
        for calls in self._several:
            _gathered(calls, step, self._backend)


def _gathered(calls: Together, step: MatrixStep, backend: str) -> None:
    """Cut over several dimensions of a mesh: each rank gathers all and keeps its part."""
    present = calls.average(step)
    if not present:
        return
    whole: list[Any] = [
        shards.like(slot, m.param) for slot, m in zip(calls.slots(present), present, strict=True)
    ]
    made = orthogonalise(
        [tensor.full_tensor() for tensor in whole], step.rows[present[0].group].how, backend
    )
    pairs = zip(present, made, strict=True)
    calls.follow(step, {m.place: shards.part_of(full, m.param) for m, full in pairs})


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

    calls: Sequence[Together]
    """of each round"""

    def __init__(
        self, matrices: Sequence[Matrix], mesh: Any, mesh_dim: int, dtype: torch.dtype
    ) -> None:
        self.group, self.dtype = mesh.get_group(mesh_dim), dtype
        self.rank, self.ranks = mesh.get_local_rank(mesh_dim), mesh.size(mesh_dim)
        own = matrices[0].sets[0].device
        # another where shards are offloaded
        self.device = own if own.type == mesh.device_type else torch.device(mesh.device_type)
        pieces = [self._piece(matrix, mesh_dim) for matrix in matrices]
        owned = shares([work(matrix.param.shape) for matrix in matrices], self.ranks)
        self.turns = range(min(_ROUNDS, max(map(len, owned))))
        by_owner = [_in_rounds(mine, len(self.turns)) for mine in owned]
        self.rounds = [
            [[pieces[i] for i in of_owner[t]] for of_owner in by_owner] for t in self.turns
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

    def members(self, t: int) -> list[Matrix]:
        """Of a round, by their owners."""
        return [piece.matrix for piece in chain(*self.rounds[t])]

    def run(self, step: MatrixStep, backend: str) -> None:
        there = self._collect(step, 0)
        back: tuple[int, Any, Tensor] | None = None
        for t in self.turns:
            following = self._collect(step, t + 1) if t + 1 in self.turns else None
            returned = self._return(step, t, self._solved(step, t, there, backend))
            if back is not None:
                self._finish(step, *back)
            back = returned
            if following is not None:
                there = following
        assert back is not None
        self._finish(step, *back)

    def _present(self, step: MatrixStep, t: int) -> list[list[_Piece]]:
        """Those of a round that have a gradient, by owner."""
        return [
            [piece for piece in of_owner if piece.matrix.place in step.gradients]
            for of_owner in self.rounds[t]
        ]

    def _swap(self, sent: Tensor, send: list[int], receive: list[int]) -> tuple[Any, Tensor]:
        received = torch.empty(sum(receive), dtype=sent.dtype, device=self.device)
        return dist.all_to_all_single(
            received, sent.to(self.device), receive, send, group=self.group, async_op=True
        ), received

    def _collect(self, step: MatrixStep, t: int) -> tuple[Any, Tensor]:
        """Sends this rank's parts of all matrices of a round to their owners."""
        calls, rounds = self.calls[t], self._present(step, t)
        present = calls.average(step)
        sent = calls.given
        if len(present) < len(calls.matrices):
            sent = torch.cat([sent[:0], *(slot.flatten() for slot in calls.slots(present))])
        send = [sum(piece.numel(self.rank) for piece in of_owner) for of_owner in rounds]
        receive = [sum(p.numel(rank) for p in rounds[self.rank]) for rank in range(self.ranks)]
        return self._swap(sent, send, receive)

    def _solved(
        self, step: MatrixStep, t: int, arrived: tuple[Any, Tensor], backend: str
    ) -> list[Tensor]:
        """The directions of the matrices that this rank owns."""
        waiting, received = arrived
        waiting.wait()
        mine = self._present(step, t)[self.rank]
        found = iter(
            received.split([piece.numel(rank) for rank in range(self.ranks) for piece in mine])
        )
        table = [
            [next(found).view(piece.shape(rank)) for piece in mine] for rank in range(self.ranks)
        ]
        whole = {
            p.matrix.place: torch.cat([row[i] for row in table], dim=p.dim)
            for i, p in enumerate(mine)
        }
        made: dict[int, Tensor] = {}
        for batch in batches([piece.matrix for piece in mine]):
            how = step.rows[batch[0].group].how
            directions = orthogonalise([whole[matrix.place] for matrix in batch], how, backend)
            made |= {m.place: one for m, one in zip(batch, directions, strict=True)}
        return [made[piece.matrix.place] for piece in mine]

    def _return(self, step: MatrixStep, t: int, made: list[Tensor]) -> tuple[int, Any, Tensor]:
        rounds = self._present(step, t)
        mine = rounds[self.rank]
        found = [
            piece.part(full, rank).flatten()
            for rank in range(self.ranks)
            for piece, full in zip(mine, made, strict=True)
        ]
        sent = torch.cat([torch.empty(0, dtype=self.dtype, device=self.device), *found])
        send = [sum(piece.numel(rank) for piece in mine) for rank in range(self.ranks)]
        receive = [sum(piece.numel(self.rank) for piece in of_owner) for of_owner in rounds]
        return t, *self._swap(sent, send, receive)

    def _finish(self, step: MatrixStep, t: int, waiting: Any, received: Tensor) -> None:
        waiting.wait()
        members = list(chain(*self._present(step, t)))
        found = received.split([piece.numel(self.rank) for piece in members])
        self.calls[t].follow(
            step,
            {
                p.matrix.place: part.view(p.shape(self.rank))
                for p, part in zip(members, found, strict=True)
            },
        )


class MatrixPlan:
    """Muon's step of the matrices of one device: several of the kernels' plans (kernels.StepPlan),
    and Newton-Schulz in between."""

    def __init__(self, matrices: Sequence[Matrix], dtype: torch.dtype, how: Kernels) -> None:
        """`dtype`: of Newton-Schulz.

        Raises ValueError or TypeError for tensors that cannot be used.
        """
        check_matrices(matrices, how.num_replicas)
        self.matrices = matrices
        self._course = Course(matrices, dtype, how)
        self.norm = self.skipped = self._course.calls[0].skipped

    def step(
        self, gradients: Column, settings: Sequence[Any], options: StepOptions = PLAIN
    ) -> None:
        """See kernels.StepPlan.step. `settings`: a Row for each group."""
        found = {
            matrix.place: gradient
            for matrix, gradient in zip(self.matrices, gradients, strict=True)
            if gradient is not None
        }
        self._course.run(MatrixStep(settings, found, options))

    def gradient_norms(self) -> Tensor:
        raise NotImplementedError  # of these a ShardedClip takes them

    def upload(self, settings: Sequence[Any], options: StepOptions = PLAIN) -> None:
        for calls in self._course.calls:
            calls.upload(settings, options)
