"""Tensor sets that find mistakes at edges, in memory with guards around every tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from hdet import _C, kernels

CHUNK = _C.CHUNK_ELEMENTS
GUARD = 24  # floats before and after each tensor: more than one 64-byte vector
SENTINEL = 12345.75

# around the widths of vectors (4, 8, 16), the block of the average (2048) and the chunk; empty first, last and alone
SIZES: dict[str, list[int]] = {
    "one": [1],
    "vector edges": [1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33],
    "block edges": [2047, 2048, 2049],
    "chunk edges": [CHUNK - 1, CHUNK, CHUNK + 1],
    "several chunks": [2 * CHUNK + 5, 3, 4 * CHUNK],
    "empty first": [0, 5, CHUNK + 1],
    "empty last": [17, 0],
    "empty between": [4, 0, 0, 9],
    "only empty": [0, 0],
    "tiny": [1 + i % 13 for i in range(2000)],
}


def usable(name: str) -> str | None:
    """None, or why tests on that backend are skipped."""
    reason = kernels.available()[name]
    return None if reason == kernels.USABLE else reason


class Guarded:
    """Tensors cut from one buffer, each `shift` floats past a 64-byte boundary, with sentinels between them."""

    def __init__(self, sizes: list[int], shift: int, seed: int, device: str = "cpu") -> None:
        self.starts = []
        position = GUARD
        for size in sizes:
            position = (position + 15) // 16 * 16 + shift
            self.starts.append(position)
            position += size + GUARD
        generator = torch.Generator().manual_seed(seed)
        self.buffer = torch.full((position,), SENTINEL)
        self.inside = torch.zeros(position, dtype=torch.bool)
        for start, size in zip(self.starts, sizes, strict=True):
            self.buffer[start : start + size] = torch.randn(size, generator=generator)
            self.inside[start : start + size] = True
        self.buffer = self.buffer.to(device)
        self.tensors: list[Tensor] = [self.buffer[start : start + size] for start, size in zip(self.starts, sizes, strict=True)]

    def zero(self) -> Guarded:
        for tensor in self.tensors:
            tensor.zero_()
        return self

    def assert_guards(self) -> None:
        outside = self.buffer.cpu()[~self.inside]
        assert torch.equal(outside, torch.full_like(outside, SENTINEL)), "a kernel wrote outside its tensors"
