"""Facts about tensors, each a small tensor on their device: nothing here waits for the device."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

DIGEST_BITS = 40
"""A digest's numbers are below 2^40, so that the sum over up to 8192 ranks is exact in float64."""

_SAME_SIZE_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_SLICE = 1 << 17
"""Words of 64 bits read together: 1 MiB, which stays in a cache between the two sums over it."""


def all_finite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """1.0 if every element is finite, else 0.0; 0-d float64 on the first tensor's device.

    One read of the data: the largest magnitude carries NaN and infinity along.
    """
    filled = [t.detach() for t in tensors if t.numel()]
    if not filled:
        return torch.ones((), dtype=torch.float64)
    largest = torch._foreach_norm(filled, ord=float("inf"))
    return torch.stack([x.double().to(filled[0].device) for x in largest]).sum().isfinite().double()


@torch.no_grad()
def digest(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """(2,) float64 whole numbers below 2^40: equal for bitwise equal tensors, and practically never
    for others.

    Memory is read as 64-bit words, whatever the dtypes: sum of w_i x_i and of w_i (x_i >> 31)
    modulo 2^64 over each MiB, with fixed random w. The second sum sees the upper halves in its
    lower bits, where no even number of flipped signs cancels out.
    """
    filled = [t.detach() for t in tensors if t.numel()]
    if not filled:
        return torch.zeros(2, dtype=torch.float64)
    device = filled[0].device
    sums = [x for t in _joined(filled) for words in _words(t) for x in _weighted_sums(words)]
    numbers = torch.arange(len(sums), device=device) * -0x61C8864680B583EB
    mixed = _mix(torch.stack([x.to(device) for x in sums]) + numbers)
    return (mixed.view(-1, 2).sum(0) & ((1 << DIGEST_BITS) - 1)).double()


def _joined(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Small neighbours as one tensor: each alone would cost a handful of calls."""
    small: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        is_small = tensor.nbytes < _SLICE
        kind = tensor.dtype, tensor.device
        full = not is_small or size >= 8 * _SLICE
        if small and (full or kind != (small[0].dtype, small[0].device)):
            yield torch.cat(small)
            small, size = [], 0
        if is_small:
            small.append(tensor.reshape(-1))
            size += tensor.nbytes
        else:
            yield tensor
    if small:
        yield torch.cat(small)


def _words(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Its memory as int64, a slice at a time; of the rest at the end each element is a word."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = flat.contiguous().view(-1)
    per_word = 8 // flat.element_size()
    for piece in flat.split(_SLICE * per_word):
        n = piece.numel() // per_word * per_word
        if n:
            aligned = piece.storage_offset() % per_word == 0
            yield (piece[:n] if aligned else piece[:n].clone()).view(torch.int64)
        if n < piece.numel():
            yield piece[n:].view(_SAME_SIZE_INTEGER[flat.element_size()]).long()


def _weighted_sums(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = _weights(words.device)[: words.numel()]
    if words.device.type == "cpu":
        return torch.dot(words, weights), torch.dot(words >> 31, weights)
    return (words * weights).sum(), ((words >> 31) * weights).sum()


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0x48444554)
    weights = torch.randint(-(1 << 62), 1 << 62, (_SLICE,), generator=generator)
    return (weights | 1).to(device)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Every bit of a word depends on all of them (the finalizer of splitmix64)."""
    x = (x ^ _shift_right(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift_right(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, by: int) -> torch.Tensor:
    """With zeros from the left."""
    return (x >> by) & ((1 << (64 - by)) - 1)
