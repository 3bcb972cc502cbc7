"""Muon's step of all matrices of a device: two kernel calls for those that step together, and
Newton-Schulz in between.

A matrix that is cut over a mesh is put together on one rank, its owner, and its direction is cut
again. As in Moonlight's distributed Muon (Liu et al. 2025, Algorithm 1), but in a few rounds: the
matrices of the next round are on their way while those of this one are computed. An element is
sent twice, in the dtype of Newton-Schulz; there in float32 if that is float16.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hdet import kernels
from hdet.kernels import StepOptions, StepSettings, StepTensors
from hdet.kernels.checks import check_step_tensors
from hdet.kernels.interface import PLAIN, Column
from hdet.tensors import dtensor as shards
from hdet.tensors import strides

from .newton_schulz import Iteration, given_in, of_stacks, orthogonalise, stands, work
from .readings import Reading, adjustment
from .step_plans import Member

_BATCH_ELEMENTS = 1 << 26
"""of the matrices that go through Newton-Schulz together: 256 MB for each float32 copy. More
gains nothing."""

_ROUNDS = 4
"""exchanges of a step, as far as an owner has so many matrices.

More hide more, in smaller messages.
"""

Readings = Mapping[int, Reading]
"""by place"""

MakeTensors = Callable[[Sequence[Member], Sequence[int]], StepTensors]
"""(matrices, the settings that each uses) -> what a plan for these works on"""


class Row(NamedTuple):
    """What a parameter group says."""

    settings: StepSettings
    how: Iteration
    adjust: str | None

    def factor(self, shape: Sequence[int], reading: Reading) -> float:
        """Of directions (..., m, n) in memory."""
        rows, columns = shape[-2:][::-1] if reading.transposed else shape[-2:]
        return adjustment(self.adjust, rows, columns)


class MatrixStep(NamedTuple):
    """What one step brings. `rows`: by group. `gradients`: by place, of those that have one."""

    rows: Mapping[int, Row]
    gradients: Mapping[int, Tensor]
    options: StepOptions


def batches(matrices: Sequence[Member], readings: Readings) -> list[list[Member]]:
    """Of one group and one shape, up to transposition: first those that lie, then those that
    stand."""
    alike: dict[Any, list[Member]] = {}
    for matrix in matrices:
        sides = [tuple(sorted(shape[-2:])) for shape in shapes_of(matrix, readings)]
        is_transposed = readings[matrix.place].transposed
        alike.setdefault((matrix.group, is_transposed, *sides), []).append(matrix)
    found: list[list[Member]] = []
    for members in alike.values():
        room = 0
        for matrix in members:
            elements = matrix.shape.numel()
            if elements > room or matrix is members[0]:
                found.append([])
                room = _BATCH_ELEMENTS
            found[-1].append(matrix)
            room -= elements
    first_stands = lambda matrix: stands(shapes_of(matrix, readings)[0])
    return [sorted(members, key=first_stands) for members in found]


def shapes_of(matrix: Member, readings: Readings) -> list[torch.Size]:
    """Of all of a parameter, not this rank's shard, in the order of its memory."""
    given = strides.laid(torch.empty(matrix.param.shape, device="meta"), matrix.order)
    return [view.shape for view in readings[matrix.place].matrices(given)]


def make_directions(
    made: Sequence[Tensor],
    given: Sequence[Tensor],
    readings: Sequence[Reading],
    row: Row,
    backend: str,
) -> None:
    """Writes the direction of each tensor, times `adjustment`. They may share memory."""
    pairs = [
        (to, of, row.factor(of.shape, reading))
        for x, y, reading in zip(made, given, readings, strict=True)
        for to, of in zip(reading.matrices(x), reading.matrices(y), strict=True)
    ]
    alike: dict[tuple[int, ...], list[tuple[Tensor, Tensor, float]]] = {}
    for pair in pairs:
        alike.setdefault(tuple(sorted(pair[1].shape[-2:])), []).append(pair)
    targets: list[Tensor] = []
    found: list[Tensor] = []
    for members in alike.values():
        to, of, factors = map(list, zip(*members, strict=True))
        directions = orthogonalise(of, row.how, backend)
        torch._foreach_mul_(directions, factors)
        targets += to
        found += directions
    torch._foreach_copy_(targets, found)


class Batch:
    """The kernel calls of some matrices that step together.

    `given`: what is to be made orthogonal, negated, one matrix after the other. `directions`: of
    the same matrices, in the same memory. Nobody steps along those of a matrix without a gradient.
    All that kernels read lies where it lay in the last step, so that a CUDA graph may capture a
    step.
    """

    def __init__(
        self,
        matrices: Sequence[Member],
        readings: Readings,
        room: Tensor,
        dtype: torch.dtype,
        tensors: MakeTensors,
        backend: str,
    ) -> None:
        """`room`: others may use it between two steps. `dtype`: of directions."""
        self.matrices = matrices
        self.readings = [readings[matrix.place] for matrix in matrices]
        self.given = room[: sum(matrix.shape.numel() for matrix in matrices)]
        self.directions = room.view(dtype)[: len(self.given)]
        self.slots, self.ways = self._views(self.given), self._views(self.directions)
        self._groups = list(dict.fromkeys(matrix.group for matrix in matrices))
        every = tensors(matrices, [self._groups.index(matrix.group) for matrix in matrices])
        nothing = [None] * len(matrices)
        not_theirs = torch.zeros(len(matrices), dtype=torch.float32, device=room.device).unbind()
        average = replace(
            every,
            params=[self.slots],
            steps=not_theirs,
            masters=None,
            stochastic=None,
            averages=(),
            emas=(),
            ema_steps=(),
        )
        follow = replace(every, moments=[nothing], scales=None)
        self._average = kernels.step_plan(average, backend)
        self._follow = kernels.step_plan(follow, backend)
        self._rows: Mapping[int, Row] = {}
        self.skipped = self._average.skipped

    def _views(self, line: Tensor) -> list[Tensor]:
        shapes = [matrix.shape for matrix in self.matrices]
        parts = line.split([shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    @functools.cached_property
    def _stacks(self) -> list[tuple[Tensor, Tensor]]:
        """Of what is given and of directions, where all is here: those that lie, and those that
        stand. [] where a matrix has blocks of several shapes."""
        views = [r.matrices(slot) for r, slot in zip(self.readings, self.slots, strict=True)]
        if max(map(len, views)) > 1:
            return []
        short, long = sorted(views[0][0].shape[-2:])
        cut = sum(view.numel() for (view,) in views if not stands(view.shape))
        counts = [n // max(1, short * long) for n in (cut, len(self.given) - cut)]
        return [
            (line[:cut].view(counts[0], short, long), line[cut:].view(counts[1], long, short))
            for line in (self.given, self.directions)
        ]

    def _take(self, rows: Mapping[int, Row]) -> None:
        if rows == self._rows:
            return
        self._rows = rows
        settings = [rows[group].settings for group in self._groups]
        # a step from zeros along u, at rate 1, is -u
        self._averaging = [
            StepSettings(1.0, momentum=s.momentum, nesterov=s.nesterov, maximize=s.maximize)
            for s in settings
        ]
        self._following = [
            s._replace(momentum=0.0, nesterov=False, maximize=True) for s in settings
        ]

    def upload(self, rows: Mapping[int, Row], options: StepOptions) -> None:
        self._take(rows)
        self._average.upload(self._averaging, options)
        self._follow.upload(self._following, _without_gradients(options))

    def average(self, step: MatrixStep) -> list[int]:
        """Moves the momentum and fills `given`. Returns the numbers of the matrices that have a
        gradient."""
        self._take(step.rows)
        self.given.zero_()
        gradients = [step.gradients.get(matrix.place) for matrix in self.matrices]
        self._average.step(gradients, self._averaging, step.options)
        return [i for i, gradient in enumerate(gradients) if gradient is not None]

    def follow(self, step: MatrixStep) -> None:
        """All replicas take one step along `directions`."""
        pairs = zip(self.matrices, self.ways, strict=True)
        given = [way if matrix.place in step.gradients else None for matrix, way in pairs]
        self._follow.step(given, self._following, _without_gradients(step.options))

    def whole(self, step: MatrixStep, backend: str) -> None:
        """A step of matrices that this rank has all of."""
        present = self.average(step)
        if not present:
            return
        row = step.rows[self.matrices[0].group]
        if len(present) < len(self.matrices) or not self._stacks:
            made, given = ([line[i] for i in present] for line in (self.ways, self.slots))
            make_directions(made, given, [self.readings[i] for i in present], row, backend)
        else:
            of_given, of_directions = self._stacks
            stacks = of_stacks(*of_given, row.how, backend)
            for kept, stack in zip(of_directions, stacks, strict=True):
                torch.mul(stack, row.factor(stack.shape, self.readings[0]), out=kept)
        self.follow(step)

    def gathered(self, step: MatrixStep, backend: str) -> None:
        """Cut over several dimensions of a mesh: each rank gathers all and keeps its part."""
        present = self.average(step)
        if not present:
            return
        params = [self.matrices[i].param for i in present]
        cut: list[Any] = [
            shards.like(self.slots[i], param) for i, param in zip(present, params, strict=True)
        ]
        full = [tensor.full_tensor() for tensor in cut]
        made = [torch.empty_like(tensor, dtype=self.directions.dtype) for tensor in full]
        readings, row = [self.readings[i] for i in present], step.rows[self.matrices[0].group]
        make_directions(made, full, readings, row, backend)
        parts = [shards.part_of(x, param) for x, param in zip(made, params, strict=True)]
        torch._foreach_copy_([self.ways[i] for i in present], parts)
        self.follow(step)


def _without_gradients(options: StepOptions) -> StepOptions:
    """Of a step along directions."""
    return StepOptions(found_inf=options.found_inf)


@dataclass(frozen=True)
class _Piece:
    """A matrix and how it is cut: into `sizes[rank]` rows or columns, along `dim`."""

    matrix: Member
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


def _shard_dim(param: Any, mesh_dim: int) -> int:
    dim: int = param.placements[mesh_dim].dim
    return dim % param.ndim


def shares(work_of: Sequence[int], ranks: int) -> list[list[int]]:
    """The numbers of the matrices that each rank owns: the largest first, each to whoever has least
    to do."""
    loads, owned = [0] * ranks, [[] for _ in range(ranks)]  # type: ignore[var-annotated]
    for i in sorted(range(len(work_of)), key=lambda i: (-work_of[i], i)):
        owner = loads.index(min(loads))
        owned[owner].append(i)
        loads[owner] += work_of[i]
    return owned


class _Exchange:
    """Of matrices that are cut along one dimension of a mesh. `rounds`: of each the pieces, by
    owner."""

    def __init__(
        self,
        matrices: Sequence[Member],
        readings: Readings,
        mesh: Any,
        mesh_dim: int,
        dtype: torch.dtype,
    ) -> None:
        self._readings = readings
        self.group, self.dtype = mesh.get_group(mesh_dim), dtype
        self.rank, self.ranks = mesh.get_local_rank(mesh_dim), mesh.size(mesh_dim)
        own = matrices[0].sets[0].device
        # another where shards are offloaded
        self.device = own if own.type == mesh.device_type else torch.device(mesh.device_type)
        pieces = [self._piece(matrix, mesh_dim) for matrix in matrices]
        shapes = [shapes_of(matrix, readings) for matrix in matrices]
        owned = shares([sum(map(work, blocks)) for blocks in shapes], self.ranks)
        count = min(_ROUNDS, max(map(len, owned)))
        self.rounds = [
            [
                [pieces[i] for i in mine[len(mine) * t // count : len(mine) * (t + 1) // count]]
                for mine in owned
            ]
            for t in range(count)
        ]

    def _piece(self, matrix: Member, mesh_dim: int) -> _Piece:
        dim = _shard_dim(matrix.param, mesh_dim)
        size = matrix.param.shape[dim]
        step = -(-size // self.ranks)  # as torch.chunk, and so Shard
        cuts = [min(size, rank * step) for rank in range(self.ranks + 1)]
        return _Piece(matrix, dim, [cuts[r + 1] - cuts[r] for r in range(self.ranks)])

    def _swap(self, sent: Tensor, send: list[int], receive: list[int]) -> tuple[Any, Tensor]:
        received = torch.empty(sum(receive), dtype=sent.dtype, device=self.device)
        return dist.all_to_all_single(
            received, sent.to(self.device), receive, send, group=self.group, async_op=True
        ), received

    def run(
        self, owned: list[list[_Piece]], batch: Batch, step: MatrixStep, backend: str
    ) -> Iterator[None]:
        """One round, in three turns: parts go to their owners; owners send back directions; all
        replicas step. Of matrices without a gradient zeros are sent."""
        if not batch.average(step):
            return
        mine, ranks = owned[self.rank], range(self.ranks)
        here = [sum(piece.numel(self.rank) for piece in of_owner) for of_owner in owned]
        there = [sum(piece.numel(rank) for piece in mine) for rank in ranks]
        waiting, received = self._swap(batch.given, here, there)
        yield
        waiting.wait()
        found = iter(received.split([piece.numel(rank) for rank in ranks for piece in mine]))
        by_rank = [[next(found).view(piece.shape(rank)) for piece in mine] for rank in ranks]
        parts_of = zip(mine, *by_rank, strict=True)
        whole = {p.matrix.place: torch.cat(parts, dim=p.dim) for p, *parts in parts_of}
        made = {place: full.to(self.dtype) for place, full in whole.items()}
        present = [p.matrix for p in mine if p.matrix.place in step.gradients]
        for alike in batches(present, self._readings):
            make_directions(
                [made[m.place] for m in alike],
                [whole[m.place] for m in alike],
                [self._readings[m.place] for m in alike],
                step.rows[alike[0].group],
                backend,
            )
        parts = [p.part(made[p.matrix.place], rank).flatten() for rank in ranks for p in mine]
        nothing = torch.empty(0, dtype=self.dtype, device=self.device)
        waiting, received = self._swap(torch.cat([nothing, *parts]), there, here)
        yield
        waiting.wait()
        batch.directions.copy_(received)
        batch.follow(step)


class MatrixPlan:
    """Muon's step of the matrices of one device, whole or cut: a plan as kernels.StepPlan.

    Collective over the meshes of those that are cut: all ranks have the same matrices in the same
    order.
    """

    def __init__(
        self,
        matrices: Sequence[Member],
        readings: Readings,
        dtype: torch.dtype,
        tensors: MakeTensors,
        backend: str,
    ) -> None:
        """`dtype`: of Newton-Schulz.

        Raises ValueError or TypeError for tensors that cannot be used.
        """
        # all that is written to, together
        check_step_tensors(tensors(matrices, [0] * len(matrices)))
        self.matrices, self._backend = matrices, backend
        whole: list[Member] = []
        along: dict[tuple[Any, int], list[Member]] = {}
        several: list[Member] = []
        for matrix in matrices:
            given: Any = matrix.param
            dims = shards.sharding_dims(given, f"a matrix of shape {tuple(given.shape)}")
            # also a stack that is cut between its matrices
            first = 0 if readings[matrix.place].flat else given.ndim - 2  # dimension of a matrix
            if all(_shard_dim(given, dim) < first for dim in dims):
                whole.append(matrix)
            elif len(dims) == 1 and type(given.placements[dims[0]]).__name__ == "Shard":
                along.setdefault((given.device_mesh, dims[0]), []).append(matrix)
            else:
                several.append(matrix)
        alone, gathered = batches(whole, readings), batches(several, readings)
        exchanges = [_Exchange(members, readings, *cut, dtype) for cut, members in along.items()]
        rounds = [(exchange, owned) for exchange in exchanges for owned in exchange.rounds]
        exchanged = [[piece.matrix for piece in chain(*owned)] for _, owned in rounds]
        together = [*alone, *gathered, *exchanged]
        size = max(sum(matrix.shape.numel() for matrix in members) for members in together)
        # a round begins before the one before the last has ended
        rooms = [
            torch.empty(size, dtype=given_in(dtype), device=matrices[0].sets[0].device)
            for _ in range(3 if rounds else 1)
        ]

        def batch(members: Sequence[Member], t: int = 0) -> Batch:
            return Batch(members, readings, rooms[t % len(rooms)], dtype, tensors, backend)

        self._whole, self._gathered = list(map(batch, alone)), list(map(batch, gathered))
        self._rounds = [
            (exchange, owned, batch(members, t))
            for t, ((exchange, owned), members) in enumerate(zip(rounds, exchanged, strict=True))
        ]
        self._all = [*self._whole, *self._gathered, *(one for _, _, one in self._rounds)]
        self.norm = self.skipped = self._all[0].skipped

    def step(self, gradients: Column, settings: Any, options: StepOptions = PLAIN) -> None:
        """See kernels.StepPlan.step. `settings`: the Row of each group, by its number."""
        pairs = zip(self.matrices, gradients, strict=True)
        found = {matrix.place: gradient for matrix, gradient in pairs if gradient is not None}
        step = MatrixStep(settings, found, options)
        for batch in self._whole:
            batch.whole(step, self._backend)
        turns = [
            exchange.run(owned, batch, step, self._backend)
            for exchange, owned, batch in self._rounds
        ]
        for t in range(len(turns) + 2):
            # the next round is on its way while this one is computed
            for turn in turns[max(0, t - 2) : t + 1][::-1]:
                next(turn, None)
        for batch in self._gathered:
            batch.gathered(step, self._backend)

    def gradient_norms(self) -> Tensor:
        raise NotImplementedError  # of these a ShardedClip takes them

    def upload(self, settings: Any, options: StepOptions = PLAIN) -> None:
        for batch in self._all:
            batch.upload(settings, options)
