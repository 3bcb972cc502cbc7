"""Muon's step on matrices as they lie on this rank: momentum, one orthogonal direction for all replicas, and their updates.

torch's multi-tensor calls, as next to the products of Newton-Schulz they take little. `owners.py` steps whole matrices and those that lie over a
mesh by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdet.kernels import StepOptions, StepSettings, StepTensors
from hdet.kernels.reference.rules import Many, store, values_of, where, wide_dtype
from hdet.kernels.spec import rounding
from hdet.kernels.spec.arguments import check_step_tensors
from hdet.tensors import dtensor as shards

from .moment_storage import entries, scale_key
from .moment_storage import values_of as values_of_moment
from .newton_schulz import Iteration, orthogonalise
from .state import kept_masters
from .step_plans import master_columns

_BATCH_ELEMENTS = 1 << 26
"""of the matrices that go through Newton-Schulz together: 256 MB for each float32 copy. More gains nothing."""


class Row(NamedTuple):
    """What a parameter group says. Of `settings`, beta1 is the momentum."""

    settings: StepSettings
    how: Iteration
    adjust: str | None


@dataclass(frozen=True)
class Matrix:
    """A parameter of two dimensions and more, with a gradient: its last two are a matrix, those before number a stack of them.

    `sets`, `state`, `gradient`: as they lie on this rank, and transposed if the parameter is so in memory. `entries`: what is to be added to the
    optimizer's state.
    """

    place: int
    group: int
    param: Tensor
    sets: list[Tensor]
    state: Mapping[str, Any]
    entries: Mapping[str, Any]
    gradient: Tensor


def check_matrices(matrices: Sequence[Matrix], num_replicas: int) -> None:
    """Everything a step of these matrices of one device writes to. Raises ValueError or TypeError, as a plan of the kernels does."""
    states = [matrix.state for matrix in matrices]
    sets = [[matrix.sets[k] for matrix in matrices] for k in range(num_replicas)]
    if any(tensor.is_inference() for tensor in chain.from_iterable(sets)):
        raise ValueError("a matrix was made in inference mode, where torch lets nobody write to it: use .clone() outside of it")
    check_step_tensors(
        StepTensors(
            "lion",  # which keeps one moment, as Muon
            sets,
            groups=[0] * len(matrices),
            steps=[state["step"] for state in states],
            exp_avgs=[state["momentum_buffer"] for state in states],
            exp_avg_scales=[state.get(scale_key("momentum_buffer")) for state in states],
            masters=master_columns(states, num_replicas),
        )
    )


def adjustment(adjust: str | None, shape: Sequence[int]) -> float:
    """What the rate of a matrix of `shape` (..., m, n) is multiplied by. torch.optim.Muon's `adjust_lr_fn`."""
    rows, columns = shape[-2:]
    if adjust == "match_rms_adamw":  # Liu et al. 2025, Eq. 4: an orthogonal matrix has the root mean square 1 / sqrt(max(m, n))
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / max(1, columns)))


class MatrixStep:
    """The parts of one step of some matrices of one device."""

    def __init__(
        self,
        rows: Mapping[int, Row],
        options: StepOptions,
        *,
        backend: str,
        stochastic: int | None,
        first_replica: int,
    ) -> None:
        """`rows`: by parameter group. `stochastic`: the seed, or None."""
        self.rows, self.backend = rows, backend
        self.stochastic, self.first_replica = stochastic, first_replica
        self.skip = None if options.found_inf is None else options.found_inf.reshape(()) != 0
        scale = options.grad_scale
        self.scale = None if scale is None else (1.0 / scale.reshape(()).to(wide_dtype(scale.device))).float()
        self.zero = options.zero_gradients

    def whole(self, matrices: Sequence[Matrix]) -> None:
        """Directions and updates of matrices that this rank has all of."""
        for batch in self.batches(matrices):
            self.update(batch, orthogonalise(self.directions(batch), self.rows[batch[0].group].how, self.backend))

    def end(self, matrices: Sequence[Matrix]) -> None:
        """All of them are updated: counters, gradients, and versions."""
        steps = [matrix.state["step"] for matrix in matrices]
        torch._foreach_add_(steps, 1.0 if self.skip is None else 1.0 - self.skip.float())
        if self.zero:
            torch._foreach_zero_([matrix.gradient for matrix in matrices])
        # a DTensor and its shard count their versions apart
        torch.autograd.graph.increment_version([m.param for m in matrices if shards.is_sharded(m.param) and not m.param.is_inference()])

    def batches(self, matrices: Sequence[Matrix]) -> Iterator[list[Matrix]]:
        """Of one group and one shape, up to transposition."""
        alike: dict[tuple[int, ...], list[Matrix]] = {}
        for matrix in matrices:
            alike.setdefault((matrix.group, *sorted(matrix.param.shape[-2:])), []).append(matrix)
        for members in alike.values():
            batch: list[Matrix] = []
            for matrix in members:
                if batch and sum(m.gradient.numel() for m in batch) + matrix.gradient.numel() > _BATCH_ELEMENTS:
                    yield batch
                    batch = []
                batch.append(matrix)
            yield batch

    def directions(self, matrices: Sequence[Matrix]) -> list[Tensor]:
        """Moves the momentum of matrices of one group, and returns what is to be orthogonalised, float32, as it lies on this rank. Momentum in
        8 bits is decoded and encoded by torch's calls, which is little beside Newton-Schulz."""
        momentum, nesterov, maximize = (getattr(self.rows[matrices[0].group].settings, key) for key in ("beta1", "nesterov", "maximize"))
        gradients = [matrix.gradient.float() for matrix in matrices]
        if self.scale is not None:
            gradients = list(torch._foreach_mul(gradients, self.scale))
        if maximize:
            gradients = list(torch._foreach_neg(gradients))
        kept = [matrix.state["momentum_buffer"] for matrix in matrices]
        new = kept
        if self.skip is None and all(buffer.dtype == torch.float32 for buffer in kept):
            torch._foreach_lerp_(kept, gradients, 1.0 - momentum)
        else:
            old = [values_of_moment("momentum_buffer", matrix.state, signed=True).float() for matrix in matrices]
            new = list(torch._foreach_lerp(old, gradients, 1.0 - momentum))
            for matrix, after in zip(matrices, new, strict=True):
                for key, made in entries("momentum_buffer", after, matrix.state["momentum_buffer"].dtype, signed=True).items():
                    if made is not None:
                        matrix.state[key].copy_(made if self.skip is None else torch.where(self.skip, matrix.state[key], made))
        return list(torch._foreach_lerp(gradients, new, momentum)) if nesterov else new

    def update(self, matrices: Sequence[Matrix], directions: Sequence[Tensor]) -> None:
        """All replicas of matrices of one group take one step along their directions."""
        shapes: dict[torch.Size, tuple[list[Matrix], list[Tensor]]] = {}
        for matrix, direction in zip(matrices, directions, strict=True):
            members, ways = shapes.setdefault(matrix.param.shape[-2:], ([], []))
            members.append(matrix)
            ways.append(direction)
        for shape, (members, ways) in shapes.items():
            row = self.rows[members[0].group]
            s, adjusted = row.settings, adjustment(row.adjust, shape)
            for k, rho in enumerate(s.multipliers):
                rate = float(s.lr) * rho  # Eq. 2
                decay = 1.0 - (float(s.lr) if s.decay_at_base else rate) * s.weight_decay
                self._step(k, members, ways, decay, rate * adjusted)

    def _step(self, k: int, matrices: Sequence[Matrix], directions: Sequence[Tensor], decay: float, rate: float) -> None:
        """p = p * decay - rate * direction, of replica k."""
        params = [matrix.sets[k] for matrix in matrices]
        all_masters = [kept_masters(matrix.state) for matrix in matrices]
        masters = [of_each[k] if of_each else None for of_each in all_masters]
        if self.skip is None and all(param.dtype == torch.float32 for param in params):
            torch._foreach_mul_(params, decay)
            torch._foreach_add_(params, list(directions), alpha=-rate)
            return
        old = values_of(params, masters)
        new = Many([p * decay - u.float() * rate for p, u in zip(old.tensors, directions, strict=True)])
        if self.skip is not None:
            new = where(self.skip, old, new)
        for matrix, value, param, master in zip(matrices, new.tensors, params, masters, strict=True):
            if self.stochastic is not None and param.dtype == torch.bfloat16 and master is None:
                words = rounding.random_words(self.stochastic, matrix.state["step"] + 1, self.first_replica + k, matrix.place, value)
                rounded = rounding.stochastic_bfloat16(value, words & 0xFFFF)
                # a value that is not moved is not rounded anew, as it is exact
                value = rounded if self.skip is None else torch.where(self.skip, param, rounded)
            store(value, param, master)
