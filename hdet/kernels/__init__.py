"""One interface to the kernels, four backends: "cpu" and "cuda" (native), "triton", and "torch"
(the reference).

A backend asked for by name that is missing raises and says why. "auto" takes the native backend of
the tensors' device; where that cannot run Triton, or else torch, with one warning that says which,
why, and what would help.

Operations are prepared once for a set of tensors and then called: a plan holds addresses and is
valid until one changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..rules import StepSettings
from . import checks
from .interface import (
    AveragePlan,
    Backend,
    Column,
    CopyPlan,
    StepOptions,
    StepPlan,
    StepTensors,
)
from .selection import USABLE, available, check_name, select, state

__all__ = [
    "USABLE",
    "AveragePlan",
    "Backend",
    "CopyPlan",
    "StepOptions",
    "StepPlan",
    "StepSettings",
    "StepTensors",
    "available",
    "average_",
    "average_plan",
    "check_name",
    "copy_plan",
    "select",
    "state",
    "step_plan",
]


def step_plan(tensors: StepTensors, backend: str = "auto") -> StepPlan:
    """Prepares an optimizer step that updates all the tensors, in all K replicas, in one call.

    See StepTensors for what it takes.

    Raises ValueError or TypeError for tensors, dtypes or combinations that cannot be stepped, by
    name.

    Example::

        params, gradients = [torch.ones(4)], [torch.full((4,), 0.5)]
        tensors = hdet.kernels.StepTensors(
            "sgd", [params], groups=[0], steps=[torch.tensor(0.0)], moments=[[None]]
        )
        plan = hdet.kernels.step_plan(tensors)
        plan.step(gradients, [hdet.kernels.StepSettings(lr=0.1)])
        assert torch.allclose(params[0], torch.full((4,), 0.95))
    """
    if len(tensors.params) == 0 or len(tensors.params[0]) == 0:
        raise ValueError("there are no parameters to plan for")
    chosen = select(backend, checks.device_of(tensors.params[0][0], "parameter 0"))
    checks.check_step_tensors(tensors)
    return chosen.step_plan(tensors)


def average_plan(
    params: Sequence[Sequence[Tensor]],
    masters: Sequence[Column] | None = None,
    backend: str = "auto",
) -> AveragePlan:
    """Prepares the weighted mean of K co-resident sets: K lists of tensors of equal shapes and
    dtypes, contiguous, on one device, apart.

    Where a parameter has a master (float32, or int16 or int8 of a split form, `numbers.LOWER`) the
    mean is of the masters and both are written. Raises ValueError or TypeError for anything else.

    Example::

        replicas = [[torch.tensor([1.0, 2.0])], [torch.tensor([3.0, 4.0])]]
        hdet.kernels.average_plan(replicas).average([0.5, 0.5])
        assert replicas[1][0].tolist() == [2.0, 3.0]
    """
    if len(params) == 0 or len(params[0]) == 0:
        raise ValueError("there are no parameters to plan for")
    chosen = select(backend, checks.device_of(params[0][0], "tensor 0 of replica 0"))
    checks.check_apart(checks.check_sets(params, masters, noun="tensor"))
    return chosen.average_plan(params, masters)


def copy_plan(
    sources: Sequence[Tensor],
    destinations: Sequence[Tensor],
    *,
    source_lowers: Column | None = None,
    masters: Column | None = None,
    backend: str = "auto",
) -> CopyPlan:
    """Prepares `copy(scale)` of one set of tensors to another; a source and a destination may not
    overlap.

    float32, bfloat16 and float16 in any combination. `source_lowers`: the lower halves of bfloat16
    sources in a split form (`numbers.LOWER`). `masters`: float32 or split masters of the
    destinations, written with them: the way back from a communication bucket. The native backends
    take contiguous tensors on one device, the torch backend any floating dtypes and strides. Raises
    ValueError or TypeError for anything else.

    Example::

        source, bucket = torch.ones(4, dtype=torch.bfloat16), torch.empty(4)
        hdet.kernels.copy_plan([source], [bucket]).copy(0.5)
        assert bucket.tolist() == [0.5] * 4
    """
    if len(sources) == 0 or len(sources) != len(destinations):
        raise ValueError(
            f"{len(sources)} sources for {len(destinations)} destinations: there must be as many, "
            "and at least one"
        )
    chosen = select(backend, checks.device_of(sources[0], "source 0"))
    checks.check_pairs(
        sources, destinations, source_lowers, masters, any_layout=chosen.name == "torch"
    )
    return chosen.copy_plan(sources, destinations, source_lowers, masters)


def average_(
    replicas: Sequence[Sequence[Tensor]] | Tensor, weights: Sequence[float], backend: str = "auto"
) -> None:
    """Replaces K co-resident replicas by their weighted mean, in place (Eq. 3). Prepares a plan for
    this one call.

    `replicas` is a list of K lists of tensors with equal shapes, or one tensor of shape (K, n);
    contiguous, on one device, not overlapping. `weights` are K numbers >= 0; they are divided by
    their sum. Afterwards all rows are bitwise equal. A replica of weight 0 is not read, so NaN in
    it does no harm, but receives the mean. Sums are float32 in the order of the replicas. Raises
    ValueError or TypeError, before anything is written, for anything else.
    """
    rows = _rows(replicas)
    shares = checks.normalised(weights, len(rows))
    if len(rows[0]) == 0:
        check_name(backend)
        checks.check_sets(rows, None)
        return
    average_plan(rows, None, backend).average(shares)
    # A kernel writes behind autograd's back: what a backward pass has saved of these tensors is no
    # longer valid.
    torch.autograd.graph.increment_version(
        [tensor for row in rows for tensor in row if not tensor.is_inference()]
    )


def _rows(replicas: Sequence[Sequence[Tensor]] | Tensor) -> Sequence[Sequence[Tensor]]:
    if not isinstance(replicas, Tensor):
        return replicas
    if replicas.layout != torch.strided or replicas.dim() != 2:
        raise ValueError(
            "replicas must be lists of tensors or one dense tensor of shape (K, n), got "
            f"{replicas.layout}, {tuple(replicas.shape)}"
        )
    return [[row] for row in replicas.detach()]
