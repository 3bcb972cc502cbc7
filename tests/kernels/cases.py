"""Tensor sets that find mistakes at edges, in memory with guards around every tensor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hdet import _C, kernels
from hdet.kernels import StepTensors
from hdet.kernels.tables import CHUNK_ELEMENTS

CHUNK = CHUNK_ELEMENTS
GUARD = 96  # bytes before and after each tensor: more than one 64-byte vector
SENTINEL = 0xA5

# around the widths of vectors (4, 8, 16), the block of the average (2048) and the chunk; empty
# first, last and alone
SIZES: dict[str, list[int]] = {
    "one": [1],
    "vector edges": [1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33],
    "block edges": [2047, 2048, 2049],
    "chunk edges": [CHUNK, CHUNK + 1],
    "several chunks": [2 * CHUNK + 5, 3],
    "empty first": [0, 5, CHUNK + 1],
    "empty last": [17, 0],
    "empty between": [4, 0, 0, 9],
    "only empty": [0, 0],
    "tiny": [1 + i % 13 for i in range(300)],
}


def why_not(backend: str) -> str | None:
    """None, or why that backend cannot be tested here on its device."""
    if backend in ("cuda", "triton") and not torch.cuda.is_available():
        return "there is no GPU here"
    state = kernels.available()[backend]
    return None if state == kernels.USABLE else f'backend="{backend}": {state}'


BACKENDS = ["cpu", "torch"] + [
    pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda",) if not why_not(name)
]
"""those the tables of this folder run on; test_shim.py and the tests of hdet.triton_kernels run
them without a GPU"""


def device_of(backend: str) -> str:
    return "cpu" if backend in ("cpu", "torch") else "cuda"


def of_sgd(params: Sequence[Tensor]) -> StepTensors:
    """Of one group, without momentum: what a test needs that is about something else."""
    steps = [torch.zeros((), device=param.device) for param in params]
    return StepTensors("sgd", [list(params)], [0] * len(steps), steps, [[None] * len(steps)])


class Guarded:
    """Tensors cut from one buffer of bytes, each `shift` elements past a 64-byte boundary, with
    sentinels between them.

    `dtypes`: one for all, or one for each; None leaves a tensor out. Filled with normal numbers,
    integers with all their bits.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        shift: int,
        seed: int,
        device: str = "cpu",
        dtypes: torch.dtype | Sequence[torch.dtype | None] = torch.float32,
    ) -> None:
        kinds = [dtypes] * len(sizes) if isinstance(dtypes, torch.dtype) else list(dtypes)
        spans, position = [], GUARD
        for size, dtype in zip(sizes, kinds, strict=True):
            width = 0 if dtype is None else dtype.itemsize
            start = (position + 63) // 64 * 64 + shift * width
            spans.append((start, start + size * width))
            position = start + size * width + GUARD
        self.buffer = torch.full((position,), SENTINEL, dtype=torch.uint8, device=device)
        self.outside = torch.ones(position, dtype=torch.bool, device=device)
        for start, end in spans:
            self.outside[start:end] = False
        self.tensors: list[Any] = [
            None if dtype is None else self.buffer[start:end].view(dtype)
            for dtype, (start, end) in zip(kinds, spans, strict=True)
        ]
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.given():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            else:
                tensor.copy_(torch.randint(-(1 << 15), 1 << 15, tensor.shape, generator=generator))

    def given(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors if tensor is not None]

    def zero(self) -> Guarded:
        for tensor in self.given():
            tensor.zero_()
        return self

    def assert_guards(self) -> None:
        assert bool((self.buffer[self.outside] == SENTINEL).all()), (
            "a kernel wrote outside its tensors"
        )


def check_same_bits(
    run: Callable[[str], Sequence[Tensor]],
    patch: pytest.MonkeyPatch,
    backend: str = "cpu",
    threads: Sequence[int] = (2,),
) -> None:
    """`run` gives on that backend what it gives on the CPU, whatever the instruction set and the
    number of threads."""
    expected = [tensor.cpu().clone() for tensor in run(backend)]
    for isa, count in itertools.product(_C.isa, threads):
        patch.setenv("HDET_ISA", isa)
        torch.set_num_threads(count)
        assert all(a.equal(b) for a, b in zip(expected, run("cpu"), strict=True)), (
            f"{isa}, {count} threads"
        )
