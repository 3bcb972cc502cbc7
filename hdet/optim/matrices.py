"""Muon's step of all matrices of a device: two kernel calls for those that step together, and
Newton-Schulz in between.

A matrix that is cut over a mesh is put together on one rank, its owner, and its direction is cut
again. As in Moonlight's distributed Muon (Liu et al. 2025, Algorithm 1), but in a few rounds: the
matrices of the next round are on their way while those of this one are computed. An element is
sent twice, in the dtype of Newton-Schulz; there in float32 if that is float16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hdet import kernels
from hdet.kernels import StepOptions, StepSettings, StepTensors
from hdet.kernels.checks import check_step_tensors
from hdet.kernels.interface import PLAIN, Column
from hdet.tensors import dtensor as shards

from .newton_schulz import Iteration, given_in, of_stacks, orthogonalise, stands, work
from .readings import Reading
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
        reading = readings[matrix.place]
        sides = [tuple(sorted(shape[-2:])) for shape in reading.shapes]
        alike.setdefault((matrix.group, reading.transposed, *sides), []).append(matrix)
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
    first_stands = lambda matrix: stands(readings[matrix.place].shapes[0])
    return [sorted(members, key=first_stands) for members in found]


def orthogonalise_all(
    tensors: Mapping[int, Tensor], readings: Readings, row: Row, backend: str
) -> None:
    """Puts the directions of parameters of one group, adjusted, in their place."""
    alike: dict[tuple[int, ...], list[tuple[Tensor, float]]] = {}
    for place, tensor in tensors.items():
        for view in readings[place].matrices(tensor):
            factor = readings[place].adjustment(row.adjust, view.shape)
            alike.setdefault(tuple(sorted(view.shape[-2:])), []).append((view, factor))
    for members in alike.values():
        views, factors = map(list, zip(*members, strict=True))
        directions = orthogonalise(views, row.how, backend)
        torch._foreach_mul_(directions, factors)
        torch._foreach_copy_(views, directions)


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
        gathers: bool = False,
    ) -> None:
        """`room`: others may use it between two steps. `dtype`: of directions. `gathers`: are they
        cut over several dimensions of a mesh, of which each rank gathers all?"""
        self.matrices = matrices
        self.readings, self._gathers = readings, gathers
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
    def _stacks(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Of what is given and of directions: those that lie, and those that stand. [] where not
        all is here, or a matrix has blocks of several shapes."""
        if self._gathers:
            return []
        pairs = zip(self.matrices, self.slots, strict=True)
        views = [self.readings[matrix.place].matrices(slot) for matrix, slot in pairs]
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
        self._follow.upload(self._following, StepOptions(found_inf=options.found_inf))

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
        self._follow.step(given, self._following, StepOptions(found_inf=step.options.found_inf))

    def step(self, step: MatrixStep, backend: str) -> None:
        """A step of matrices that this rank has all of, or that each rank gathers."""
        present = self.average(step)
        if not present:
            return
        row = step.rows[self.matrices[0].group]
        if len(present) == len(self.matrices) and self._stacks:
            given, directions = self._stacks
            reading = self.readings[self.matrices[0].place]
            made = of_stacks(*given, row.how, backend)
            for kept, stack in zip(directions, made, strict=True):
                torch.mul(stack, reading.adjustment(row.adjust, stack.shape), out=kept)
        else:
            slots = [self.slots[i] for i in present]
            members = [self.matrices[i] for i in present]
            whole: list[Any] = slots
            if self._gathers:
                cut: list[Any] = [
                    shards.like(slot, m.param) for slot, m in zip(slots, members, strict=True)
                ]
                whole = [tensor.full_tensor() for tensor in cut]
            by_place = {m.place: tensor for m, tensor in zip(members, whole, strict=True)}
            orthogonalise_all(by_place, self.readings, row, backend)
            if self._gathers:
                pairs = zip(whole, members, strict=True)
                torch._foreach_copy_(slots, [shards.part_of(x, m.param) for x, m in pairs])
            self.directions.copy_(self.given.to(self.directions.dtype))  # which share memory
        self.follow(step)


class _Piece(NamedTuple):
    """A matrix and how it is cut along a dimension."""

    matrix: Member
    dim: int
    cuts: list[int]
    """where the parts of all ranks but the first begin"""
    shapes: list[torch.Size]
    """of the parts"""


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
        self, matrices: Sequence[Member], readings: Readings, mesh: Any, mesh_dim: int
    ) -> None:
        self.group = mesh.get_group(mesh_dim)
        self.rank, self.ranks = mesh.get_local_rank(mesh_dim), mesh.size(mesh_dim)
        own = matrices[0].sets[0].device
        # another where shards are offloaded
        self.device = own if own.type == mesh.device_type else torch.device(mesh.device_type)
        pieces = [self._piece(matrix, mesh_dim) for matrix in matrices]
        work_of = [sum(map(work, readings[matrix.place].shapes)) for matrix in matrices]
        owned = shares(work_of, self.ranks)
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
        cuts = [min(size, rank * step) for rank in range(1, self.ranks)]
        parts = torch.empty(matrix.param.shape, device="meta").tensor_split(cuts, dim)
        return _Piece(matrix, dim, cuts, [part.shape for part in parts])

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
        here = [sum(piece.shapes[self.rank].numel() for piece in its) for its in owned]
        shapes = [[piece.shapes[rank] for piece in mine] for rank in ranks]
        there = [sum(shape.numel() for shape in of_rank) for of_rank in shapes]
        waiting, received = self._swap(batch.given, here, there)
        yield
        waiting.wait()
        found = iter(received.split([shape.numel() for shape in chain(*shapes)]))
        by_rank = [[next(found).view(shape) for shape in of_rank] for of_rank in shapes]
        parts_of = zip(mine, *by_rank, strict=True)
        whole = {p.matrix.place: torch.cat(parts, dim=p.dim) for p, *parts in parts_of}
        present = [p.matrix for p in mine if p.matrix.place in step.gradients]
        for alike in batches(present, batch.readings):
            row = step.rows[alike[0].group]
            orthogonalise_all(
                {m.place: whole[m.place] for m in alike}, batch.readings, row, backend
            )
        cut = [whole[p.matrix.place].tensor_split(p.cuts, p.dim) for p in mine]
        parts = [part.flatten() for of_rank in zip(*cut, strict=True) for part in of_rank]
        made = torch.cat([received[:0], *parts]).to(batch.directions.dtype)
        waiting, received = self._swap(made, there, here)
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
        exchanges = [_Exchange(members, readings, *cut) for cut, members in along.items()]
        rounds = [(exchange, owned) for exchange in exchanges for owned in exchange.rounds]
        exchanged = [[piece.matrix for piece in chain(*owned)] for _, owned in rounds]
        together = [*alone, *gathered, *exchanged]
        size = max(sum(matrix.shape.numel() for matrix in members) for members in together)
        # a round begins before the one before the last has ended
        rooms = [
            torch.empty(size, dtype=given_in(dtype), device=matrices[0].sets[0].device)
            for _ in range(3 if rounds else 1)
        ]

        def batch(members: Sequence[Member], t: int = 0, gathers: bool = False) -> Batch:
            return Batch(members, readings, rooms[t % len(rooms)], dtype, tensors, backend, gathers)

        self._alone = [*map(batch, alone), *(batch(members, 0, True) for members in gathered)]
        self._rounds = [
            (exchange, owned, batch(members, t))
            for t, ((exchange, owned), members) in enumerate(zip(rounds, exchanged, strict=True))
        ]
        self._all = [*self._alone, *(one for _, _, one in self._rounds)]
        self.norm = self.skipped = self._all[0].skipped

    def step(self, gradients: Column, settings: Any, options: StepOptions = PLAIN) -> None:
        """See kernels.StepPlan.step. `settings`: the Row of each group, by its number."""
        pairs = zip(self.matrices, gradients, strict=True)
        found = {matrix.place: gradient for matrix, gradient in pairs if gradient is not None}
        step = MatrixStep(settings, found, options)
        for batch in self._alone:
            batch.step(step, self._backend)
        turns = [
            exchange.run(owned, batch, step, self._backend)
            for exchange, owned, batch in self._rounds
        ]
        for t in range(len(turns) + 2):
            # the next round is on its way while this one is computed
            for turn in turns[max(0, t - 2) : t + 1][::-1]:
                next(turn, None)

    def gradient_norms(self) -> Tensor:
        raise NotImplementedError  # of these a ShardedClip takes them

    def upload(self, settings: Any, options: StepOptions = PLAIN) -> None:
        for batch in self._all:
            batch.upload(settings, options)
