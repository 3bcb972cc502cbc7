"""Refusals of parameter groups, by name, before anything is changed. NaN fails every comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hdet.kernels.checks import FLOATS
from hdet.rules import Facts, Rule

from .masters import MASTER_DTYPES
from .moment_storage import EIGHT_BIT

_OFF = ("amsgrad", "differentiable")
"""options of torch's optimizers that fused ones do not have"""


def check_settings(group: dict[str, Any], rule: Rule, name: str, optimizer: str) -> None:
    """What a group says, for its rule."""
    for key in _OFF if rule.takes else ():
        if group.get(key):
            raise ValueError(
                f"{key}={group[key]!r} of {name} is not supported by {optimizer}; use "
                f"torch.optim.{rule.takes} for it"
            )
    if rule.takes and group.get("decoupled_weight_decay", not rule.coupled) == rule.coupled:
        other = "AdamW" if rule.coupled else "Adam"
        raise ValueError(
            f"decoupled_weight_decay={rule.coupled} of {name} is {other}: use Fused{other}"
        )
    values = rule.values(group)
    if len(values) != len(rule.fields):
        count = len(rule.settings["betas"])
        raise ValueError(f"betas={group['betas']} of {name} must be {count} numbers in [0, 1)")
    check_numbers(values, rule, name)


def check_numbers(values: Sequence[Any], rule: Facts, name: str) -> None:
    for field, value in zip(rule.fields, values, strict=True):
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"{field} of {name} must be a number or a one-element tensor, got the shape "
                f"{tuple(value.shape)}"
            )
    rule.check([float(value) for value in values], name)


def _tensors(params: Any) -> list[Any]:
    """What a group's "params" may be: a tensor, tensors, or torch's (name, parameter)."""
    entries: Sequence[Any] = [params] if isinstance(params, Tensor) else list(params or ())
    return [entry[1] if isinstance(entry, tuple) else entry for entry in entries]


def check_params(params: Any, name: str) -> None:
    """Refuses parameters at once that no step could update. Frozen ones may have any dtype."""
    for i, param in enumerate(_tensors(params)):
        if isinstance(param, Tensor) and param.requires_grad and param.dtype not in FLOATS:
            raise TypeError(
                f"parameter {i} of {name} has the dtype {param.dtype}; supported are "
                f"{', '.join(map(str, FLOATS))}. Use torch's own optimizer for it"
            )


def check_storage(
    master_weights: object, moment_dtype: object, seed: object, decay_at: object
) -> None:
    """The arguments that say how the state is kept."""
    if master_weights not in (choices := (None, *MASTER_DTYPES)):
        raise ValueError(
            f"master_weights={master_weights!r} is unknown; choose {', '.join(map(repr, choices))}"
        )
    if moment_dtype not in (None, torch.float32, torch.bfloat16, EIGHT_BIT):
        raise ValueError(
            f"moment_dtype={moment_dtype!r} is not supported; choose torch.float32 (or None), "
            f"torch.bfloat16 or {EIGHT_BIT!r}"
        )
    if not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise ValueError(f"seed={seed!r} must be a whole number from 0 to 2^64 - 1")
    if decay_at not in ("replica", "base"):
        raise ValueError(f'decay_at={decay_at!r} is unknown; choose "replica" or "base"')
