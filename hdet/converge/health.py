"""Two facts about a set of tensors, each a 0-d or 1-d tensor on their device: nothing here synchronises with the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["all_finite", "digest"]

_SAME_SIZE_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SLICE = 1 << 18
"""elements looked at together: the digest's integers are 64 bits wide, and memory for a whole tensor of them would be too much"""


def all_finite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """1.0 if every element is finite, else 0.0; 0-d float64 on the first tensor's device.

    One read of the data: the largest magnitude carries NaN and infinity along.
    """
    filled = [t.detach() for t in tensors if t.numel()]
    if not filled:
        return torch.ones((), dtype=torch.float64)
    largest = torch._foreach_norm(filled, ord=float("inf"))
    return torch.stack([x.double().to(filled[0].device) for x in largest]).sum().isfinite().double()


def digest(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """(2,) float64 whole numbers below 2^52: equal for bitwise equal tensors, and practically never for others."""
    filled = [t.detach() for t in tensors if t.numel()]
    total = torch.zeros(2, dtype=torch.int64, device=filled[0].device if filled else None)
    for position, tensor in enumerate(filled):
        flat = tensor.contiguous().view(-1).view(_SAME_SIZE_INTEGER[tensor.element_size()])
        for piece in flat.split(_SLICE):
            bits = piece.long()
            # The second sum is not linear, so exchanged or compensating differences still show.
            both = torch.stack([bits.sum(), (bits * (bits + 2 * position + 1)).sum()])
            total += both.mul_(2 * position + 1).to(total.device)
    return (total & ((1 << 52) - 1)).double()
