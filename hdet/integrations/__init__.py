"""hdet inside the frameworks that people use, one module each.

A module is loaded when it is asked for, and says so where its framework is not installed.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["accelerate", "lightning", "megatron", "torchtitan", "transformers"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f".{name}", __name__)
