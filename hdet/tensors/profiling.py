"""Named ranges for profilers: NVTX for nsys and ncu where torch has CUDA, and torch.profiler
everywhere. docs/profiling.md shows how to read them.

They are on if HDET_NVTX=1, or if nsys has started the process (it sets NVTX_INJECTION64_PATH); this
is decided when hdet is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch

__all__ = ["ON", "ranged"]

ON = os.environ.get("HDET_NVTX", "1" if "NVTX_INJECTION64_PATH" in os.environ else "0") == "1"

Function = TypeVar("Function", bound=Callable[..., Any])


def ranged(name: str) -> Callable[[Function], Function]:
    """A range around every call of a function. Off, the function itself: it costs nothing."""
    return _range(name) if ON else lambda function: function


@contextmanager
def _range(name: str) -> Iterator[None]:
    nvtx = torch.cuda.nvtx.range(name) if torch.backends.cuda.is_built() else nullcontext()
    with nvtx, torch.profiler.record_function(name):
        yield
