"""A plan that is two: every step runs on Triton and, on copies of the same tensors, on the native CPU backend, and is compared bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hdet import kernels
from hdet.kernels import StepOptions, StepSettings, StepTensors
from tests.kernels.problem import one_nan


def _clones(column: Sequence[Tensor | None] | None) -> list[Any] | None:
    return None if column is None else [None if tensor is None else tensor.clone() for tensor in column]


def _sets(columns: Sequence[Sequence[Tensor | None]] | None) -> list[Any] | None:
    return None if columns is None else [_clones(column) for column in columns]


def _all(t: StepTensors) -> list[Tensor]:
    columns = [t.steps, t.exp_avgs, t.exp_avg_sqs, *t.params, *(t.masters or [])]
    return [tensor for column in columns for tensor in column or [] if tensor is not None]


class Twin:
    def __init__(self, tensors: StepTensors) -> None:
        t = tensors
        single = {name: _clones(getattr(t, name)) for name in ("steps", "exp_avgs", "exp_avg_sqs")}
        self.copies = replace(t, params=_sets(t.params), masters=_sets(t.masters), **single)  # type: ignore[arg-type]
        self.tensors = tensors
        self.native = kernels.step_plan(self.copies, "cpu")
        self.plan = kernels.step_plan(tensors, "triton")
        self.norm, self.skipped = self.plan.norm, self.plan.skipped

    def step(self, gradients: Sequence[Tensor], settings: Sequence[StepSettings], options: StepOptions) -> None:
        native_gradients = _clones(gradients)
        assert native_gradients is not None
        self.native.step(native_gradients, settings, options)
        self.plan.step(gradients, settings, options)
        pairs = zip([*_all(self.tensors), *gradients], [*_all(self.copies), *native_gradients], strict=True)
        for i, (ours, theirs) in enumerate(pairs):
            one, other = (one_nan(x.reshape(-1).clone()).view(torch.uint8) for x in (ours, theirs))
            assert torch.equal(one, other), f"tensor {i} has other bits"

    def upload(self, settings: Sequence[StepSettings], options: StepOptions) -> None:
        self.plan.upload(settings, options)
