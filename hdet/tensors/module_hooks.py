"""Hooks on a user's modules, which outlive neither us nor a copy of the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Hook"]

_TRACED: weakref.WeakValueDictionary[str, Hook] = weakref.WeakValueDictionary()
"""By key, because what is called while a model is compiled gets no more than constants."""


class Hook:
    """Calls a method without holding its object. A copy or a pickle of the module that has it has one that does nothing.

    In a compiled model it is not called; ``traced`` is, once, while the model is compiled and so before it runs.
    """

    def __init__(self, call: Callable[..., Any] | None = None, traced: Callable[[], Any] | None = None) -> None:
        self._call = None if call is None else weakref.WeakMethod(call)
        self._traced = None if traced is None else weakref.WeakMethod(traced)
        self._key = "" if traced is None else f"{id(self):x}"
        if self._key:
            _TRACED[self._key] = self

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            key = self._key
            if key:
                from torch._dynamo.comptime import comptime  # slow to import, and there already

                comptime(_while_tracing)
            return
        call = None if self._call is None else self._call()
        if call is not None:
            call(*args)

    def traced(self) -> None:
        traced = None if self._traced is None else self._traced()
        if traced is not None:
            traced()

    def __reduce__(self) -> Any:
        return Hook, ()


def _while_tracing(context: Any) -> None:
    hook = _TRACED.get(context.get_local("key").as_python_constant())
    if hook is not None:
        hook.traced()
