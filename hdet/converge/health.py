"""Facts about a set of tensors, each a small tensor on their device: nothing here synchronises with the host."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

DIGEST_BITS = 40
"""a digest's numbers are below 2^40, so that the sum over up to 8192 ranks of a replica is exact in float64"""

PICKED = 16
"""elements of a tensor in its fingerprint"""
_SAME_SIZE_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_SLICE = 1 << 17
"""words of 64 bits looked at together: 1 MiB, which stays in a cache between the two sums over it"""


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
    """(2,) float64 whole numbers below 2^40: equal for bitwise equal tensors, and practically never for others.

    Memory is read as 64-bit words, whatever the dtypes: sum of w_i x_i and of w_i (x_i >> 31) modulo 2^64 over each MiB, with fixed
    random w. The second sum sees the upper halves in its lower bits, where no even number of flipped signs cancels out.
    """
    filled = [t.detach() for t in tensors if t.numel()]
    if not filled:
        return torch.zeros(2, dtype=torch.float64)
    device = filled[0].device
    sums = [sum_ for tensor in _together(filled) for words in _words(tensor) for sum_ in _sums(words)]
    places = torch.arange(len(sums), device=device)
    mixed = _mix(torch.stack([s if s.device == device else s.to(device) for s in sums]) + places * -0x61C8864680B583EB)
    return (mixed.view(-1, 2).sum(0) & ((1 << DIGEST_BITS) - 1)).double()


@torch.no_grad()
def fingerprints(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """(tensors, 17) float64: the norm of each and 16 of its elements, evenly spaced. Equal for equal tensors, and for hardly any others.

    One read of the data, as `all_finite`; a tensor that is not contiguous is copied for as long as it is looked at.
    """
    device = tensors[0].device
    norms = torch._foreach_norm([tensor.detach() for tensor in tensors])
    rows = torch.zeros(len(tensors), 1 + PICKED, dtype=torch.float64, device=device)
    rows[:, 0] = torch.stack([norm.double().to(device) for norm in norms])
    for row, tensor in zip(rows, tensors, strict=True):
        picked = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // PICKED)][:PICKED]
        row[1 : 1 + len(picked)] = picked
    return rows


def _together(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Small tensors in a row as one: each alone would cost a handful of calls."""
    row: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        small = tensor.nbytes < _SLICE
        if row and (not small or size >= 8 * _SLICE or (tensor.dtype, tensor.device) != (row[0].dtype, row[0].device)):
            yield torch.cat(row)
            row, size = [], 0
        if small:
            row.append(tensor.reshape(-1))
            size += tensor.nbytes
        else:
            yield tensor
    if row:
        yield torch.cat(row)


def _words(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor's memory as int64, a slice at a time; what is left over at the end, an element in each word."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous().view(-1)
    each = 8 // flat.element_size()
    for piece in flat.split(_SLICE * each):
        whole = piece.numel() // each * each
        if whole:
            aligned = piece[:whole] if piece.storage_offset() % each == 0 else piece[:whole].clone()
            yield aligned.view(torch.int64)
        if whole < piece.numel():
            yield piece[whole:].view(_SAME_SIZE_INTEGER[flat.element_size()]).long()


def _sums(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = _weights(words.device)[: words.numel()]
    if words.device.type == "cpu":
        return torch.dot(words, weights), torch.dot(words >> 31, weights)
    return (words * weights).sum(), ((words >> 31) * weights).sum()


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0x48444554)
    return (torch.randint(-(1 << 62), 1 << 62, (_SLICE,), generator=generator) | 1).to(device)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Every bit of a word depends on all of them (the finalizer of splitmix64)."""
    x = (x ^ _shifted(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shifted(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, zeros from the left."""
    return (x >> by) & ((1 << (64 - by)) - 1)
