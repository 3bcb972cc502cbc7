"""Tensors whose memory has no gaps, but another order than their dimensions, such as channels_last.

What works element by element does not care for the order, as long as all tensors of a parameter
have the same one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .dtensor import mapped

Order = tuple[int, ...]
"""dimensions as they lie in memory, the slowest first"""


def memory_order(tensor: Tensor) -> Order | None:
    """None where the dimensions are in order, or the memory has gaps or holds an element twice:
    then nothing can be done."""
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return None
    steps, sizes = tensor.stride(), tensor.shape
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (-steps[d], -sizes[d])))
    return order if tensor.permute(order).is_contiguous() else None


def laid(tensor: Tensor, order: Order | None) -> Tensor:
    """A view in that order: contiguous, if the tensor lies so."""
    return tensor if order is None else tensor.permute(order)


def laid_columns(columns: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Equally long lists of what belongs to the same parameters, which the first one has: each as
    that lies. None stays None."""
    orders = [memory_order(tensor) for tensor in columns[0]]
    return [
        [None if t is None else laid(t, order) for t, order in zip(column, orders, strict=True)]
        for column in columns
    ]


def laid_state(state: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """A parameter's state with all that is like the parameter in its memory's order, also in
    lists."""
    order = memory_order(param)
    if order is None:
        return dict(state)
    shape = param.shape
    lay = lambda value: laid(value, order) if value.shape == shape else value
    return {key: mapped(value, lay) for key, value in state.items()}


def alike(tensor: Tensor, like: Tensor) -> bool:
    """Do tensors of one shape lie in the same order? Of another shape: does it lie in its own
    order?"""
    if tensor.shape != like.shape:
        return tensor.is_contiguous()
    steps = zip(like.shape, tensor.stride(), like.stride(), strict=True)
    return not like.numel() or all(size == 1 or a == b for size, a, b in steps)


def like(tensor: Tensor, param: Tensor) -> Tensor:
    """The tensor, or a copy that lies as the parameter does."""
    if alike(tensor, param):
        return tensor
    if tensor.shape != param.shape:
        return tensor.contiguous()
    made = torch.empty_like(param.detach(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)
