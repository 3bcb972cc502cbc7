"""Replicas on one line in guarded memory, and what a run of them leaves behind, for comparing backends bit for bit."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hdet import kernels
from hdet.kernels import RankOneTensors, StepOptions, StepSettings
from hdet.kernels.spec import interface

from . import cases
from .cases import Guarded
from .table import F32

SETTINGS = StepSettings(3e-2, beta1=0.9, beta2=0.99, eps=1e-8)
RULES = {
    name: SETTINGS._replace(weight_decay=0.1, decay_at_base=True) if rule.decoupled else SETTINGS
    for name, rule in interface.RULES.items()
}
RULES["sgd"] = SETTINGS._replace(dampening=0.1)


class Line:
    """A rank-one plan. Outputs begin with NaN: they are written, never read."""

    def __init__(
        self,
        rule: str,
        sizes: list[int],
        replicas: int,
        backend: str,
        dtype: torch.dtype = F32,
        moments: torch.dtype = F32,
        stochastic: int | None = None,
    ) -> None:
        self.device = cases.device_of(backend)

        def guarded(seed: int, kind: torch.dtype = F32) -> Guarded:
            return Guarded(sizes, seed % 3, seed, self.device, kind)

        self.groups = [i % min(2, len(sizes)) for i in range(len(sizes))]
        self.base, self.displacement = guarded(1), guarded(2).zero()
        self.outputs = [guarded(10 + k, dtype) for k in range(replicas)]
        for outputs in self.outputs:
            for tensor in outputs.tensors:
                tensor.fill_(math.nan)
        self.first, self.second = guarded(3, moments).zero(), guarded(4, moments).zero()
        self.steps = [torch.zeros((), device=self.device) for _ in sizes]
        self.tensors = RankOneTensors(
            rule,
            self.base.tensors,
            self.displacement.tensors,
            [outputs.tensors for outputs in self.outputs],
            self.groups,
            self.steps,
            self.first.tensors,
            self.second.tensors if "exp_avg_sqs" in interface.RULES[rule].moments else None,
            stochastic=stochastic,
        )
        self.plan = kernels.rank_one_plan(self.tensors, backend)

    def everything(self) -> list[Tensor]:
        parts = [self.base, self.displacement, *self.outputs, self.first, self.second]
        return [part.buffer.cpu().clone() for part in parts] + [torch.stack(self.steps).cpu()]


def settings_of(rule: str, multipliers: list[float], rate: float = 1.0) -> list[StepSettings]:
    one = RULES[rule]._replace(multipliers=multipliers)
    return [one._replace(lr=one.lr * rate), one._replace(lr=one.lr * rate * 0.5)]


def line_left(
    rule: str, count: int, formats: tuple[torch.dtype, ...], sizes: list[int], backend: str
) -> list[Tensor]:
    """All memory, guards included, after each of seven steps with two converges and a skipped step.

    `formats`: dtypes of outputs, gradients and moments.
    """
    output, gradient, moments = formats
    line = Line(rule, sizes, count, backend, output, moments, stochastic=11)
    weights = [(k + 1) / (count * (count + 1) / 2) for k in range(count)]
    multipliers = [0.5 + 0.25 * k for k in range(count)]
    left = []
    for turn in range(7):
        gradients = Guarded(sizes, 1, 100 + turn, line.device, gradient)
        if turn == 5:
            gradients.tensors[0][-1] = math.nan  # skipped
        line.plan.step(
            gradients.tensors,
            settings_of(rule, multipliers),
            StepOptions(max_norm=50.0, zero_gradients=turn > 2),
        )
        if turn in (3, 6):
            line.plan.converge(weights)
            multipliers = [1.1 * rho for rho in multipliers]
        left += [*line.everything(), gradients.buffer.cpu().clone()]
    return left
