"""Muon's step on matrices as they lie on this rank: momentum, one orthogonal direction for all
replicas, and their updates.

torch's multi-tensor calls, as next to the products of Newton-Schulz they take little. `owners.py`
steps whole matrices and those that lie over a mesh by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdet.kernels import StepOptions, StepSettings, StepTensors, numbers
from hdet.kernels.checks import check_step_tensors, wide_dtype
from hdet.kernels.interface import Column
from hdet.kernels.numbers import store, value_of

from .moment_storage import entries, scale_key
from .moment_storage import values_of as values_of_moment
from .newton_schulz import Iteration, orthogonalise

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


def check_matrices(matrices: Sequence[Matrix], num_replicas: int) -> None:
    """Everything a step of these matrices of one device writes to.

    Raises ValueError or TypeError, as a plan of the kernels does.
    """
    states = [matrix.state for matrix in matrices]
    sets = [[matrix.sets[k] for matrix in matrices] for k in range(num_replicas)]
    if any(tensor.is_inference() for tensor in chain.from_iterable(sets)):
        raise ValueError(
            "a matrix was made in inference mode, where torch lets nobody write to it: use "
            ".clone() outside of it"
        )
    check_step_tensors(
        StepTensors(
            "lion",  # which keeps one moment, as Muon
            sets,
            groups=[0] * len(matrices),
            steps=[state["step"] for state in states],
            moments=[[state["momentum_buffer"] for state in states]],
            scales=[[state.get(scale_key("momentum_buffer")) for state in states]],
            masters=[[matrix.masters[k] for matrix in matrices] for k in range(num_replicas)],
        )
    )


def batches(matrices: Sequence[Matrix]) -> list[list[Matrix]]:
    """Of one group and one shape, up to transposition."""
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
    return found


def wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in float32, themselves where they are that."""
    if all(tensor.dtype == torch.float32 for tensor in tensors):
        return list(tensors)
    made = [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
    torch._foreach_copy_(made, list(tensors))
    return made


def adjustment(adjust: str | None, shape: Sequence[int]) -> float:
    """What the rate of a matrix of `shape` (..., m, n) is multiplied by. torch.optim.Muon's
    `adjust_lr_fn`."""
    rows, columns = shape[-2:]
    if (
        adjust == "match_rms_adamw"
    ):  # Liu et al. 2025, Eq. 4: an orthogonal matrix has the root mean square 1 / sqrt(max(m, n))
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / max(1, columns)))


class MatrixStep:
    """The parts of one step of some matrices of one device.

    One call for many tensors is one launch on a GPU where all of them have one dtype and lie alike.
    `_foreach_mul` takes a tensor of one number in the place of a number; `_foreach_add` and
    `_foreach_lerp` read it, and wait for the device.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        options: StepOptions,
        gradients: Mapping[int, Tensor],
        *,
        backend: str,
        stochastic: int | None,
        first_replica: int,
    ) -> None:
        """`rows`: by group.

        `gradients`: by place, as their matrices lie. `stochastic`: the seed, or None.
        """
        self.rows, self.gradients, self.backend = rows, gradients, backend
        self.stochastic, self.first_replica = stochastic, first_replica
        self.skip = None if options.found_inf is None else options.found_inf.reshape(()) != 0
        scale = options.grad_scale
        self.scale = (
            None
            if scale is None
            else (1.0 / scale.reshape(()).to(wide_dtype(scale.device))).float()
        )
        self.zero = options.zero_gradients

    def whole(self, batch: Sequence[Matrix]) -> None:
        """Directions and updates of a batch that this rank has all of."""
        how = self.rows[batch[0].group].how
        made = orthogonalise(self.directions(batch), how, self.backend)
        if self.skip is not None:
            torch._foreach_copy_(made, [torch.where(self.skip, 0.0, one) for one in made])
        self.update(batch, made)

    def end(self, matrices: Sequence[Matrix]) -> None:
        """All of them are updated: counters and gradients."""
        steps = [matrix.state["step"] for matrix in matrices]
        if self.skip is None:
            torch._foreach_add_(steps, 1.0)
        else:
            torch._foreach_add_(steps, [1.0 - self.skip.float()] * len(steps))
        if self.zero:
            torch._foreach_zero_([self.gradients[matrix.place] for matrix in matrices])

    def directions(self, matrices: Sequence[Matrix]) -> list[Tensor]:
        """Moves the momentum of matrices of one group, and returns what is to be orthogonalised,
        float32, as it lies on this rank. Momentum in 8 bits is decoded and encoded by torch's
        calls, which is little beside Newton-Schulz."""
        momentum, nesterov, maximize = (
            getattr(self.rows[matrices[0].group].settings, key)
            for key in ("momentum", "nesterov", "maximize")
        )
        gradients = wide([self.gradients[matrix.place] for matrix in matrices])
        if self.scale is not None:
            gradients = list(torch._foreach_mul(gradients, self.scale))
        if maximize:
            gradients = list(torch._foreach_neg(gradients))
        new = [matrix.state["momentum_buffer"] for matrix in matrices]
        if self.skip is None and all(buffer.dtype == torch.float32 for buffer in new):
            torch._foreach_lerp_(new, gradients, 1.0 - momentum)
        else:
            old = wide(
                [
                    values_of_moment("momentum_buffer", matrix.state, signed=True)
                    for matrix in matrices
                ]
            )
            new = list(torch._foreach_lerp(old, gradients, 1.0 - momentum))
            self._keep(matrices, new)
        return list(torch._foreach_lerp(gradients, new, momentum)) if nesterov else new

    def _keep(self, matrices: Sequence[Matrix], momenta: Sequence[Tensor]) -> None:
        """Momenta go into states, as these keep them, if the step is not skipped."""
        pairs = [
            (matrix.state[key], made)
            for matrix, after in zip(matrices, momenta, strict=True)
            for key, made in entries(
                "momentum_buffer", after, matrix.state["momentum_buffer"].dtype, signed=True
            ).items()
            if made is not None
        ]
        if self.skip is None:
            torch._foreach_copy_([kept for kept, _ in pairs], [made for _, made in pairs])
        else:
            for kept, made in pairs:
                torch.where(self.skip, kept, made, out=kept)

    def update(self, matrices: Sequence[Matrix], directions: Sequence[Tensor]) -> None:
        """All replicas of matrices of one group take one step along their directions."""
        shapes: dict[torch.Size, tuple[list[Matrix], list[Tensor]]] = {}
        for matrix, direction in zip(matrices, wide(directions), strict=True):
            members, ways = shapes.setdefault(matrix.param.shape[-2:], ([], []))
            members.append(matrix)
            ways.append(direction)
        for shape, (members, ways) in shapes.items():
            row = self.rows[members[0].group]
            s, adjusted = row.settings, adjustment(row.adjust, shape)
            for k, rho in enumerate(s.multipliers):
                rate = float(s.lr) * rho  # Eq. 2
                decay = 1.0 - (float(s.lr) if s.decay_at_base else rate) * s.weight_decay
                self._step(k, members, ways, decay, rate * adjusted, s.cautious_decay)

    def _step(
        self,
        k: int,
        matrices: Sequence[Matrix],
        directions: list[Tensor],
        decay: float,
        rate: float,
        cautious: bool,
    ) -> None:
        """p = p * decay - rate * direction, of replica k. Cautious: without decay where they are of
        different signs."""
        params = [matrix.sets[k] for matrix in matrices]
        masters = [matrix.masters[k] for matrix in matrices]
        # float32 parameters and masters are these themselves
        values = list(map(value_of, params, masters))
        factor: float | Tensor = decay
        if self.skip is not None:  # directions are zeros then
            factor = torch.full((), decay, dtype=torch.float32, device=self.skip.device)
            factor.masked_fill_(self.skip, 1.0)
        if cautious:
            for value, direction in zip(values, directions, strict=True):
                value.mul_(torch.where(value * direction < 0, 1.0, factor))
        else:
            torch._foreach_mul_(values, factor)
        torch._foreach_add_(values, directions, alpha=-rate)
        copies: list[tuple[Tensor, Tensor]] = []
        for matrix, value, param, master in zip(matrices, values, params, masters, strict=True):
            if self.stochastic is not None and param.dtype == torch.bfloat16 and master is None:
                words = numbers.random_words(
                    self.stochastic,
                    matrix.state["step"] + 1,
                    self.first_replica + k,
                    matrix.place,
                    value,
                )
                rounded = numbers.stochastic_bfloat16(value, words & 0xFFFF)
                # a value that is not moved is not rounded again, as it is exact
                copies.append(
                    (
                        param,
                        rounded if self.skip is None else torch.where(self.skip, param, rounded),
                    )
                )
            elif master is not None and master.dtype == torch.int16:
                store(value, param, master)
            elif param.dtype != torch.float32:
                copies.append((param, value))
        if copies:
            torch._foreach_copy_([param for param, _ in copies], [value for _, value in copies])
