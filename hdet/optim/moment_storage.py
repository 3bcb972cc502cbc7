"""How moments are stored in an optimizer's state: in float32 or bfloat16; or in 8 bits, then
codes stand under the moment's name and their scales beside it. What is saved are values: codes
never leave a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hdet.kernels.numbers import CODES, count_scales, decode, encode
from hdet.tensors.strides import alike

EIGHT_BIT = "8bit"
SMALLEST = 4096
"""Elements.

Tensors with fewer keep float32 moments: biases and norms are few bytes, and they matter.
"""

Dtype = torch.dtype | str
"""of moments: torch.float32, torch.bfloat16 or "8bit" """


def dtype_for(wanted: Dtype, param: Tensor) -> torch.dtype:
    """How the moments of this parameter are stored.

    Of a DTensor all elements count, so that every rank says the same.
    """
    if isinstance(wanted, torch.dtype):
        return wanted
    return CODES if param.numel() >= SMALLEST else torch.float32


def scale_key(name: str) -> str:
    return f"{name}_scale"


def are_coded(state: Mapping[str, Any]) -> bool:
    """Does the state of a parameter hold codes?"""
    return any(key.endswith("_scale") for key in state)


def zeros(name: str, param: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The entries of a moment before the first step."""
    made = {name: torch.zeros_like(param.detach(), dtype=dtype)}
    if dtype == CODES:
        made[scale_key(name)] = torch.zeros(
            count_scales(param.numel()), dtype=torch.float32, device=param.device
        )
    return made


def values_of(name: str, state: Mapping[str, Any], signed: bool) -> Tensor:
    """A moment as it is stored; codes as float32."""
    kept: Tensor = state[name]
    return (
        decode(kept, _scales(name, state).to(kept.device), signed) if kept.dtype == CODES else kept
    )


def _scales(name: str, state: Mapping[str, Any]) -> Tensor:
    scales: Tensor | None = state.get(scale_key(name))
    if scales is None:
        raise ValueError(
            f"{name} of a parameter's state is codes of 8 bits, but its {scale_key(name)} is "
            f"missing: load a saved state, or delete {name}, too"
        )
    return scales


def entries(
    name: str, values: Tensor, dtype: torch.dtype, signed: bool
) -> dict[str, Tensor | None]:
    """The entries of a moment with these values, on their device and as they lie; None: the entry
    must go."""
    if dtype == CODES:
        return dict(zip((name, scale_key(name)), encode(values.float(), signed), strict=True))
    return {name: values.to(dtype), scale_key(name): None}


def fits(name: str, state: Mapping[str, Any], param: Tensor, dtype: torch.dtype) -> bool:
    """Is a moment stored so, where the parameter is?"""
    if state[name].dtype != dtype:
        return False  # and a float32 one, which is to be codes, has no scales
    scales = [_scales(name, state)] if dtype == CODES else []
    on_device = all(t.device == param.device for t in (state[name], *scales))
    return on_device and alike(state[name], param) and all(t.is_contiguous() for t in scales)
