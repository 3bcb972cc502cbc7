"""What an optimizer does beside its step: the mean over its replicas, and clipping over shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from hdet import kernels
from hdet.kernels import AveragePlan, StepOptions
from hdet.kernels.interface import Column
from hdet.tensors import dtensor as shards
from hdet.tensors import strides

from . import lists
from .masters import with_shards


class Averaging:
    """The plan of a mean over co-resident replicas, kept from one converge to the next."""

    def __init__(self) -> None:
        self._plan: AveragePlan | None = None
        self._noted: lists.NotedObjects | None = None

    def __call__(
        self,
        sets: list[list[Tensor]],
        masters: list[Column] | None,
        weights: Sequence[float],
        backend: str,
    ) -> None:
        """`sets`: K lists of tensors; `masters` as they lie on this rank."""
        own: list[Column] = [shards.locals_of(column) for column in sets]
        columns = [*own, *(masters or ())]
        tensors = [tensor for tensor in chain(*columns) if tensor is not None]
        if self._plan is None or self._noted is None or not self._noted.same(tensors):
            laid = strides.laid_columns(columns)
            self._plan = kernels.average_plan(
                laid[: len(sets)], masters and laid[len(sets) :], backend
            )
            self._noted = lists.NotedObjects(tensors)
        self._plan.average(weights)
        torch.autograd.graph.increment_version(
            with_shards([param for param in chain(*sets) if not param.is_inference()])
        )


class ShardedClip:
    """Clipping by the global norm of gradients of which this rank holds shards: the full norm takes
    a collective, which a kernel cannot.

    The kernels get it as a larger scale of the gradients: g / (scale / c), c = min(1, max_norm /
    (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_. Nothing waits for the device.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        """`params`: all of the optimizer, so that all ranks add up the same sums."""
        self._sums = shards.FullSums(params)
        self.norm: Tensor | None = None
        """0-d float32, of the unscaled gradients of the last step"""

    def __call__(self, gradients: Sequence[Tensor | None], options: StepOptions) -> StepOptions:
        """The options of a step on these gradients, which are those of this rank, with clipping and
        skipping in them."""
        norms = torch._foreach_norm(
            [gradient for gradient in gradients if gradient is not None], 2, dtype=torch.float64
        )
        found, nothing = iter(norms), norms[0].new_zeros(())
        all_norms = torch.stack(
            [nothing if gradient is None else next(found) for gradient in gradients]
        )
        self._squares = self._sums(all_norms.square())
        norm = self._squares.sum().sqrt()
        self._scale = scale = options.grad_scale
        if scale is not None:
            norm = norm / scale.reshape(())
            self._scale = scale.clone()  # the scaler changes it after the step
        clip = (options.max_norm / (norm + 1e-6)).clamp(max=1.0)
        scale = 1.0 / clip if scale is None else scale.reshape(()) / clip
        skip = (~norm.isfinite()).to(torch.float32)
        if options.found_inf is not None:
            skip = skip + options.found_inf.reshape(())
        self.norm = norm.to(torch.float32)
        return replace(options, max_norm=0.0, grad_scale=scale.to(torch.float32), found_inf=skip)

    def gradient_norms(self) -> Tensor:
        """(n,) float32: of each full gradient, unscaled, in the last step; 0 where there was
        none."""
        norms = self._squares.sqrt()
        return (norms if self._scale is None else norms / self._scale).float()


def check_copies(param: Tensor, copies: Sequence[Tensor], count: int) -> list[Tensor]:
    """The K tensors of a parameter."""
    made = list(copies)
    if count < 1 or len(made) != count or made[0] is not param:
        raise ValueError(
            f"copies must give {count} tensors for a parameter, at least one, the parameter itself "
            f"first; got {len(made)}"
        )
    for k, tensor in enumerate(made):
        if (tensor.shape, tensor.dtype, tensor.device) != (param.shape, param.dtype, param.device):
            raise ValueError(
                f"copy {k} of a parameter is {tensor.dtype} of shape {tuple(tensor.shape)} on "
                f"{tensor.device}, the parameter {param.dtype} of shape {tuple(param.shape)} on "
                f"{param.device}: replicas are alike"
            )
        own, first = shards.local(tensor), shards.local(param)
        if strides.memory_order(own) != strides.memory_order(first):
            raise ValueError(
                f"copy {k} of a parameter of shape {tuple(param.shape)} has the strides "
                f"{own.stride()}, the parameter {first.stride()}: "
                "replicas are alike; param.detach().clone() lies as param"
            )
        shards.check_alike(
            tensor,
            param,
            f"copy {k} of a parameter",
            "replicas are alike; param.detach().clone() is laid out as param",
        )
    return made
