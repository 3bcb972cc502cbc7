"""Named ranges for profilers: NVTX for nsys and ncu where torch has CUDA, and torch.profiler
everywhere. docs/profiling.md shows how to read them.

They are on if HDET_NVTX=1, or if nsys has started the process (it sets NVTX_INJECTION64_PATH); this
is decided when hdet is imported. Off, `ranged` returns the function it is given, so a range costs
nothing, and `span` returns one shared empty context.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ParamSpec, TypeVar

import torch

__all__ = ["ON", "ranged", "span"]

ON = os.environ.get("HDET_NVTX", "1" if "NVTX_INJECTION64_PATH" in os.environ else "0") == "1"

P = ParamSpec("P")
R = TypeVar("R")

_OFF: AbstractContextManager[object] = nullcontext()


def span(name: str) -> AbstractContextManager[object]:
    """A range around a block: ``with span("hdet.converge"): ...``."""
    if not ON:
        return _OFF
    return _marked(name)


@contextmanager
def _marked(name: str) -> Iterator[None]:
    with (
        torch.cuda.nvtx.range(name) if torch.backends.cuda.is_built() else _OFF,
        torch.profiler.record_function(name),
    ):
        yield


def ranged(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A range around every call of a function."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if not ON:
            return function

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with span(name):
                return function(*args, **kwargs)

        return call

    return decorate
