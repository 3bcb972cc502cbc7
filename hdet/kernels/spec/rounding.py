"""csrc/core/numbers.h and philox.h in torch: ways of storing a float32 in 16 bits, and the random
numbers for one of them.

Unsigned 32-bit arithmetic is done in int64, whose products wrap around where they must.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def _bits(x: Tensor) -> Tensor:
    """The 32 bits of float32 numbers, 0 .. 2^32 - 1."""
    return x.contiguous().view(torch.int32).long() & _LOW


def _as_16(bits: Tensor) -> Tensor:
    """0 .. 65535 as int16 of the same bits."""
    return torch.where(bits >= 0x8000, bits - 0x10000, bits).to(torch.int16)


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """The float32 of a bfloat16 and its int16 lower half: the split form, exact for every number;
    zero where upper was set to zero."""
    # the lower half counts as signed: from 0x8000 on the upper half was rounded up, which never
    # makes a zero
    high = upper.view(torch.int16).int() << 16
    bits = torch.where((upper == 0) & (lower < 0), high, high + lower.int())
    return bits.view(torch.float32)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 as (bfloat16 rounded to nearest, ties away from zero; int16 lower half).

    A NaN is 0x7fc0 and 0.
    """
    bits = torch.where(x.isnan(), 0x7FC00000, _bits(x))
    return _as_16((bits + 0x8000 & _LOW) >> 16).view(torch.bfloat16), _as_16(bits & 0xFFFF)


def stochastic_bfloat16(x: Tensor, random: Tensor) -> Tensor:
    """Rounded up with the probability of what would be cut off.

    `random` is uniform in 0 .. 65535. Infinities and NaN are exact.
    """
    rounded = _as_16((_bits(x) + random) >> 16).view(torch.bfloat16)
    return torch.where(x.isfinite(), rounded, x.bfloat16())


def philox(
    seed: int, counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four words of 32 random bits for a key of 64 bits and a counter of four
    words."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _LOW, seed >> 32
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            _high(product1) ^ c1 ^ k0,
            product1 & _LOW,
            _high(product0) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3  # type: ignore[return-value]


def _high(product: Tensor | int) -> Tensor | int:
    return (product >> 32) & _LOW


def random_words(seed: int, step: Tensor, replica: int, identity: int, like: Tensor) -> Tensor:
    """A word for each element of `like`: four neighbours share a counter (quad, replica, identity,
    step)."""
    count = like.numel()
    quad = torch.arange((count + 3) // 4, device=like.device)
    words = philox(
        seed,
        (
            quad & _LOW,
            quad >> 32 & 0xFFFF | replica << 16,
            identity + 0 * quad,
            step.long() + 0 * quad,
        ),
    )
    return torch.stack(words, dim=1).flatten()[:count].view(like.shape)
