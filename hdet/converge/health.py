"""Two facts about a set of tensors, each a 0-d or 1-d tensor on their device: nothing here synchronises with the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["all_finite", "digest"]

_SAME_SIZE_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def all_finite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """1.0 if every element is finite, else 0.0; 0-d float64. One read of the data: the largest magnitude carries NaN and inf along."""
    filled = [t.detach() for t in tensors if t.numel()]
    if not filled:
        return torch.ones((), dtype=torch.float64)
    largest = torch._foreach_norm(filled, ord=float("inf"))
    return torch.stack([x.double() for x in largest]).sum().isfinite().double()


def digest(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """(2,) float64 whole numbers below 2^52: equal for bitwise equal tensors, and practically never for others."""
    sums = [torch.zeros(2, dtype=torch.int64)]
    for position, tensor in enumerate(tensors):
        if tensor.numel():
            bits = tensor.detach().contiguous().view(_SAME_SIZE_INTEGER[tensor.element_size()]).long()
            # The second sum is not linear, so exchanged or compensating differences still show.
            sums.append(torch.stack([bits.sum(), (bits * (bits + 2 * position + 1)).sum()]).mul_(2 * position + 1))
    sums[0] = sums[0].to(sums[-1].device)
    return (torch.stack(sums).sum(0) & ((1 << 52) - 1)).double()
