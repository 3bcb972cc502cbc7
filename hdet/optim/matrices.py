"""Muon's step on matrices as they lie on this rank: two kernel calls, and what is between them.

The first call moves the momentum and writes what is to be made orthogonal; the second steps all
replicas along its directions. `owners.py` says which matrices go together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdet import kernels
from hdet.kernels import StepOptions, StepSettings, StepTensors
from hdet.kernels.checks import check_step_tensors
from hdet.kernels.interface import Column

from .moment_storage import scale_key
from .newton_schulz import Iteration, of_stacks, orthogonalise, stands

_BATCH_ELEMENTS = 1 << 26
"""of the matrices that go through Newton-Schulz together: 256 MB for each float32 copy. More
gains nothing."""


class Row(NamedTuple):
    """What a parameter group says."""

    settings: StepSettings
    how: Iteration
    adjust: str | None


@dataclass(frozen=True)
class Matrix:
    """A parameter of two dimensions and more: its last two are a matrix, those before number a
    stack of them.

    place: its number among all parameters.
    group: which Row of a step is its own.
    sets, masters: in all replicas; None: there is no master.
    state: moments and counter.

    All tensors but `param` are as they lie on this rank, and transposed if the parameter is so in
    memory.
    """

    place: int
    group: int
    param: Tensor
    sets: list[Tensor]
    masters: Column
    state: Mapping[str, Any]

    @property
    def shape(self) -> torch.Size:
        """On this rank."""
        return self.sets[0].shape


class Kernels(NamedTuple):
    """How matrices are stepped."""

    backend: str
    num_replicas: int
    first_replica: int
    seed: int | None
    """of stochastic rounding"""


class MatrixStep(NamedTuple):
    """What one step brings. `rows`: by group. `gradients`: by place, of those that have one."""

    rows: Sequence[Row]
    gradients: Mapping[int, Tensor]
    options: StepOptions


def check_matrices(matrices: Sequence[Matrix], num_replicas: int) -> None:
    """All that a step of these matrices of one device writes to, together. Raises ValueError or
    TypeError, as a plan of some of them does."""
    states, replicas = [matrix.state for matrix in matrices], range(num_replicas)
    check_step_tensors(
        StepTensors(
            "muon",
            [[matrix.sets[k] for matrix in matrices] for k in replicas],
            [0] * len(states),
            [state["step"] for state in states],
            moments=[[state["momentum_buffer"] for state in states]],
            scales=[[state.get(scale_key("momentum_buffer")) for state in states]],
            masters=[[matrix.masters[k] for matrix in matrices] for k in replicas],
        )
    )


def batches(matrices: Sequence[Matrix]) -> list[list[Matrix]]:
    """Of one group and one shape, up to transposition: first those that lie, then those that
    stand."""
    alike: dict[tuple[int, ...], list[Matrix]] = {}
    for matrix in matrices:
        alike.setdefault((matrix.group, *sorted(matrix.param.shape[-2:])), []).append(matrix)
    found: list[list[Matrix]] = []
    for members in alike.values():
        room = 0
        for matrix in members:
            elements = matrix.sets[0].numel()
            if elements > room or matrix is members[0]:
                found.append([])
                room = _BATCH_ELEMENTS
            found[-1].append(matrix)
            room -= elements
    return [sorted(members, key=lambda matrix: stands(matrix.shape)) for members in found]


def adjustment(adjust: str | None, shape: Sequence[int]) -> float:
    """What the rate of a matrix of `shape` (..., m, n) is multiplied by. torch.optim.Muon's
    `adjust_lr_fn`."""
    rows, columns = shape[-2:]
    if (
        adjust == "match_rms_adamw"
    ):  # Liu et al. 2025, Eq. 4: an orthogonal matrix has the root mean square 1 / sqrt(max(m, n))
        return 0.2 * math.sqrt(max(rows, columns, 1))
    return math.sqrt(max(1.0, rows / max(1, columns)))


class Together:
    """The kernel calls of some matrices that step together.

    All that kernels read lies where it lay in the last step, so that a CUDA graph may capture a
    step."""

    def __init__(
        self, matrices: Sequence[Matrix], room: Tensor, dtype: torch.dtype, how: Kernels
    ) -> None:
        """`room`: a line for what is to be made orthogonal and then for directions, which are of
        `dtype`; others may use it between two steps. Raises ValueError or TypeError for tensors
        that cannot be stepped."""
        self.matrices = matrices
        self.given = room[: sum(matrix.shape.numel() for matrix in matrices)]
        self._directions = room.view(dtype)[: len(self.given)]
        self._slots, self._ways = self._views(self.given), self._views(self._directions)
        kinds = [(matrix.group, matrix.param.shape[-2:]) for matrix in matrices]
        self._kinds = list(dict.fromkeys(kinds))
        groups = list(map(self._kinds.index, kinds))
        states = [matrix.state for matrix in matrices]
        key = "momentum_buffer"
        self._average = kernels.step_plan(
            StepTensors(
                "muon",
                [list(self._slots.values())],
                groups,
                list(torch.zeros(len(states), device=room.device).unbind()),  # not theirs
                moments=[[state[key] for state in states]],
                scales=[[state.get(scale_key(key)) for state in states]],
            ),
            how.backend,
        )
        replicas = range(how.num_replicas)
        self._follow = kernels.step_plan(
            StepTensors(
                "muon",
                [[matrix.sets[k] for matrix in matrices] for k in replicas],
                groups,
                [state["step"] for state in states],
                moments=[[None] * len(states)],
                masters=[[matrix.masters[k] for matrix in matrices] for k in replicas],
                ids=[matrix.place for matrix in matrices],
                stochastic=how.seed,
                first_replica=how.first_replica,
            ),
            how.backend,
        )
        self._rows: Sequence[Row] = ()
        self.skipped = self._average.skipped

    def _take(self, rows: Sequence[Row]) -> None:
        if rows == self._rows:
            return
        self._rows, self._averaging, self._following = rows, [], []
        for group, shape in self._kinds:
            s, _, adjust = rows[group]
            factor = adjustment(adjust, shape)
            # a step from zeros along u, at rate 1, is -u
            self._averaging.append(
                StepSettings(1.0, momentum=s.momentum, nesterov=s.nesterov, maximize=s.maximize)
            )
            self._following.append(
                s._replace(
                    lr=s.lr * factor,
                    weight_decay=s.weight_decay / factor,
                    momentum=0.0,
                    nesterov=False,
                    maximize=True,
                )
            )

    def upload(self, rows: Sequence[Row], options: StepOptions) -> None:
        self._take(rows)
        self._average.upload(self._averaging, options)
        self._follow.upload(self._following, _without_gradients(options))

    def average(self, step: MatrixStep) -> list[Matrix]:
        """Moves the momentum of the matrices that have a gradient, and returns these; their slots
        in `given` have what is to be made orthogonal, negated."""
        self._take(step.rows)
        self.given.zero_()
        gradients = [step.gradients.get(matrix.place) for matrix in self.matrices]
        self._average.step(gradients, self._averaging, step.options)
        return [matrix for matrix in self.matrices if matrix.place in step.gradients]

    def slots(self, matrices: Sequence[Matrix]) -> list[Tensor]:
        """Of these in `given`, like their shards."""
        return [self._slots[matrix.place] for matrix in matrices]

    def follow(self, step: MatrixStep, directions: Mapping[int, Tensor]) -> None:
        """All replicas take one step. `directions`: by place, negated."""
        ways = [self._ways[place] for place in directions]
        if ways:
            torch._foreach_copy_(ways, list(directions.values()))
        self._step(step)

    def _step(self, step: MatrixStep) -> None:
        given = [
            self._ways[matrix.place] if matrix.place in step.gradients else None
            for matrix in self.matrices
        ]
        self._follow.step(given, self._following, _without_gradients(step.options))

    def whole(self, step: MatrixStep, backend: str) -> None:
        """A step of a batch that this rank has all of."""
        present = self.average(step)
        if not present:
            return
        how = step.rows[present[0].group].how
        if len(present) < len(self.matrices):
            made = orthogonalise(self.slots(present), how, backend)
            self.follow(step, {m.place: one for m, one in zip(present, made, strict=True)})
            return
        directions = of_stacks(*self._stacks(self.given), how, backend)
        for kept, stack in zip(self._stacks(self._directions), directions, strict=True):
            kept.copy_(stack)
        self._step(step)

    def _views(self, line: Tensor) -> dict[int, Tensor]:
        """Of each matrix, by its place."""
        found = line.split([matrix.shape.numel() for matrix in self.matrices])
        return {m.place: part.view(m.shape) for m, part in zip(self.matrices, found, strict=True)}

    def _stacks(self, line: Tensor) -> tuple[Tensor, Tensor]:
        """Those of a batch that lie, and those that stand."""
        short, long = sorted(self.matrices[0].shape[-2:])
        cut = sum(m.shape.numel() for m in self.matrices if not stands(m.shape))
        count = cut // max(1, short * long)
        return line[:cut].view(count, short, long), line[cut:].view(-1, long, short)


def _without_gradients(options: StepOptions) -> StepOptions:
    """Of a step along directions."""
    return StepOptions(found_inf=options.found_inf)
