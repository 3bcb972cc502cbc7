"""Hooks on a user's modules, which outlive neither us nor a copy of the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Hook"]


class Hook:
    """Calls a method without holding its object. A copy or a pickle of the module that has it has one that does nothing, and so has a compiled
    model."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = None if call is None else weakref.WeakMethod(call)

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        call = None if self._call is None else self._call()
        if call is not None:
            call(*args)

    def __reduce__(self) -> Any:
        return Hook, ()
