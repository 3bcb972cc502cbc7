"""Launches triton_kernels/symmetric.py: products of Newton-Schulz, of which half are computed."""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from ...triton_kernels.symmetric import symmetric_product
from .launch import Memory, interpreted

BLOCK, SMALL_BLOCK, DEPTH = 128, 64, 64
"""rows of a tile; of matrices that would fill few tiles; elements of a row that are multiplied at a
time"""
_LARGE = 512
_OPTIONS = {"num_warps": 4, "num_stages": 3}
_SMALL_OPTIONS = {"num_warps": 4, "num_stages": 4}


@functools.cache
def _memory(device: torch.device) -> Memory:
    return Memory(device)


def product(left: Tensor, right: Tensor, added: Tensor | None, alpha: float, beta: float) -> Tensor:
    """beta * added + alpha * left @ right.mT, which the caller knows to be symmetric: (B, m, k),
    (B, m, k) -> (B, m, m).

    bfloat16 or float16 on a CUDA device, or in Triton's interpreter on a CPU; sums are float32, and
    the result is rounded once. (Of float32 tensor cores would round the factors.)
    """
    # Triton's interpreter multiplies the bits of bfloat16 as whole numbers
    if interpreted and left.dtype == torch.bfloat16:
        third = None if added is None else added.float()
        return product(left.float(), right.float(), third, alpha, beta).bfloat16()
    left, right = left.contiguous(), right.contiguous()
    batch, m, length = left.shape
    made = left.new_empty(batch, m, m)
    large = m >= _LARGE
    block = 16 if interpreted else BLOCK if large else SMALL_BLOCK
    across = triton.cdiv(m, block)
    tiles = across * (across + 1) // 2
    options: dict[str, object] = {} if interpreted else {**(_OPTIONS if large else _SMALL_OPTIONS)}
    _memory(left.device).launch(
        symmetric_product,
        batch * tiles,
        left,
        right,
        made if added is None else added.contiguous(),
        made,
        m,
        length,
        tiles,
        float(alpha),
        float(beta),
        ADDED=added is not None,
        BLOCK=block,
        DEPTH=16 if interpreted else DEPTH,
        **options,
    )
    return made
