"""Refusals: every check runs before anything is written, and its message names the tensor, what is wrong, and the remedy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .interface import AdamWSettings, AdamWTensors


def check_tensor(tensor: object, name: str, device: torch.device) -> None:
    """Accepts a contiguous float32 tensor with memory on `device`."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if is_traceable_wrapper_subclass(tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, which wraps other tensors; pass its local tensor")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} has the layout {tensor.layout}; only dense (strided) tensors are supported: use .to_dense()")
    if tensor.dtype != torch.float32:
        raise TypeError(f"{name} has the dtype {tensor.dtype}; only torch.float32 is supported: use .float()")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, but the first tensor is on {device}; one call works on one device")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} of shape {tuple(tensor.shape)} is not contiguous (strides {tensor.stride()}): use .contiguous()")
    if tensor.numel() > 0 and tensor.data_ptr() == 0:
        raise ValueError(f"{name} of shape {tuple(tensor.shape)} has no memory (meta or fake tensor)")


def device_of(tensor: object, name: str) -> torch.device:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    return tensor.device


def check_same_shape(tensor: Tensor, like: Tensor, name: str, like_name: str) -> None:
    if tensor.shape != like.shape:
        raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, but {like_name} has {tuple(like.shape)}")


def check_adamw_tensors(tensors: AdamWTensors) -> None:
    """Everything a plan relies on for as long as it is used."""
    count = len(tensors.params)
    for name in ("exp_avgs", "exp_avg_sqs", "steps", "rows"):
        if len(getattr(tensors, name)) != count:
            raise ValueError(f"{name} has {len(getattr(tensors, name))} entries, but there are {count} parameters")
    if sorted(set(tensors.rows)) != list(range(len(set(tensors.rows)))):
        raise ValueError(f"rows must number the settings from 0 without a gap, got {sorted(set(tensors.rows))}")
    for i, param in enumerate(tensors.params):
        check_tensor(param, f"parameter {i}", tensors.params[0].device)
        for name in ("exp_avg", "exp_avg_sq"):
            state = getattr(tensors, name + "s")[i]
            check_tensor(state, f"{name} of parameter {i}", param.device)
            check_same_shape(state, param, f"{name} of parameter {i}", "the parameter")
        step = tensors.steps[i]
        if not isinstance(step, Tensor) or step.dtype != torch.float32 or step.device.type != "cpu" or step.dim() != 0:
            raise TypeError(f"step of parameter {i} must be a 0-d float32 tensor on the CPU")


def check_gradients(gradients: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    """The slow, explaining form of what a step checks; see `native.gradient_addresses` for the fast one."""
    if len(gradients) != len(params):
        raise ValueError(f"{len(gradients)} gradients for {len(params)} parameters")
    for i, (gradient, param) in enumerate(zip(gradients, params, strict=True)):
        check_tensor(gradient, f"the gradient of parameter {i}", param.device)
        check_same_shape(gradient, param, f"the gradient of parameter {i}", "the parameter")


def check_parameters(params: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """What an optimizer checks before it creates state: the parameters, then their gradients."""
    for i, param in enumerate(params):
        check_tensor(param, f"parameter {i}", device_of(params[0], "parameter 0"))
    check_gradients(gradients, params)


def check_settings(settings: Sequence[AdamWSettings], num_rows: int) -> None:
    """Hyperparameters that are finite and in range; NaN fails every comparison."""
    if len(settings) != num_rows:
        raise ValueError(f"{len(settings)} settings for {num_rows} rows")
    for s in settings:
        lr, multiplier, beta1, beta2, eps, weight_decay, _ = s
        if not (0 <= lr < math.inf and 0 <= multiplier < math.inf and 0 <= eps < math.inf and 0 <= weight_decay < math.inf):
            raise ValueError(f"lr, multiplier, eps and weight_decay must be finite and not negative, got {s}")
        if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
            raise ValueError(f"betas must be in [0, 1), got {s}")


def check_replicas(replicas: Sequence[Sequence[Tensor]]) -> None:
    """K equally long lists of tensors, of equal shapes at equal places."""
    first = replicas[0]
    for k, row in enumerate(replicas):
        if len(row) != len(first):
            raise ValueError(f"replica {k} has {len(row)} tensors, but replica 0 has {len(first)}")
        for i, tensor in enumerate(row):
            check_tensor(tensor, f"tensor {i} of replica {k}", device_of(first[0], "tensor 0 of replica 0"))
            check_same_shape(tensor, first[i], f"tensor {i} of replica {k}", "replica 0")


def check_apart(rows: Sequence[Sequence[Tensor]]) -> None:
    """No two tensors share memory: a mean written to one would be read again as the other."""
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, k, i) for k, row in enumerate(rows) for i, t in enumerate(row) if t.numel())
    for (_, end, k, i), (start, _, other_k, other_i) in itertools.pairwise(spans):
        if start < end:
            raise ValueError(f"tensor {i} of replica {k} and tensor {other_i} of replica {other_k} overlap in memory: give each its own")


def normalised(weights: Sequence[float], num_replicas: int) -> list[float]:
    """The weights divided by their sum."""
    values = [float(w) for w in weights]
    if num_replicas == 0:
        raise ValueError("replicas is empty; pass at least one list of tensors")
    if len(values) != num_replicas:
        raise ValueError(f"weights has {len(values)} entries for {num_replicas} replicas")
    if not all(0 <= w < math.inf for w in values):
        raise ValueError(f"weights must be finite and not negative, got {values}")
    total = math.fsum(values)
    if total <= 0:
        raise ValueError(f"weights must not all be 0, got {values}: no replica is left to average")
    return [w / total for w in values]
