"""How a step may end: averages over replicas, running averages, buckets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from hdet import kernels
from hdet.kernels import AveragePlan, PairPlan
from hdet.kernels.checks import normalised
from hdet.kernels.interface import FINISHES, Column

from . import lists


class Averaging:
    """The plan of a mean over co-resident replicas, kept from one converge to the next."""

    def __init__(self) -> None:
        self.plan: AveragePlan | None = None
        self.tensors: list[Tensor] = []
        self.addresses: list[int] = []

    def __call__(self, sets: list[list[Tensor]], masters: list[Column] | None, weights: Sequence[float], backend: str) -> None:
        """`sets`: K lists of tensors."""
        params = list(chain.from_iterable(sets))
        tensors = [*params, *(master for column in masters or () for master in column if master is not None)]
        addresses = lists.addresses(tensors)
        if self.plan is None or addresses != self.addresses or not lists.same(tensors, self.tensors):
            self.plan = kernels.average_plan(sets, masters, backend)
            self.tensors, self.addresses = tensors, addresses
        self.plan.average(weights)
        torch.autograd.graph.increment_version([param for param in params if not param.is_inference()])


def check_finish(
    finish: str, weights: Sequence[float] | None, buckets: Mapping[Tensor, Tensor] | None, num_replicas: int
) -> tuple[float, ...] | None:
    """The weights as the kernels take them."""
    if finish not in FINISHES:
        raise ValueError(f"finish={finish!r} is unknown; choose {', '.join(FINISHES)}")
    if finish != "pack" and buckets:
        raise ValueError(f'buckets are for finish="pack", not {finish!r}')
    if finish == "store":
        return None
    if weights is None:
        raise ValueError(f"finish={finish!r} needs weights, one for each replica")
    if finish == "mean":
        return tuple(normalised(weights, num_replicas))
    if num_replicas != 1 or len(weights) != 1 or not 0 <= weights[0] < math.inf:
        raise ValueError(f'finish="pack" is for one replica with one weight >= 0, got {num_replicas} replicas and weights {list(weights)}')
    if not buckets:
        raise ValueError('finish="pack" needs buckets: a float32 tensor for each parameter')
    return (float(weights[0]),)


def check_copies(param: Tensor, copies: Sequence[Tensor], count: int) -> list[Tensor]:
    """The K tensors of a parameter."""
    made = list(copies)
    if count < 1 or len(made) != count or made[0] is not param:
        raise ValueError(f"copies must give {count} tensors for a parameter, at least one, the parameter itself first; got {len(made)}")
    for k, tensor in enumerate(made):
        if (tensor.shape, tensor.dtype, tensor.device) != (param.shape, param.dtype, param.device):
            raise ValueError(
                f"copy {k} of a parameter is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}, "
                f"the parameter {param.dtype} of shape {tuple(param.shape)} on {param.device}: replicas are alike"
            )
    return made


def values_to(destinations: Sequence[Tensor], params: Sequence[Tensor], masters: Column, backend: str) -> PairPlan:
    """Operations from the float32 values of parameters, which are those of their masters where there are any, to other tensors."""
    sources = [param if master is None or master.dtype == torch.int16 else master for param, master in zip(params, masters, strict=True)]
    lowers = [master if master is not None and master.dtype == torch.int16 else None for master in masters]
    return kernels.pair_plan(sources, destinations, source_lowers=lowers if any(x is not None for x in lowers) else None, backend=backend)
