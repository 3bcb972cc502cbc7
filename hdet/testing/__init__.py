"""What parts of hdet promise, as tests that a part of yours runs: subclass a contract in a file of
tests, and say how your part is made. pytest is needed, and hypothesis for controllers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapters import AdapterContract, Trained
    from .averages import AveragingContract
    from .controllers import ControllerContract
    from .rules import RuleContract

__all__ = ["AdapterContract", "AveragingContract", "ControllerContract", "RuleContract", "Trained"]

_FILES = {
    "AdapterContract": "adapters", "Trained": "adapters", "AveragingContract": "averages",
    "ControllerContract": "controllers", "RuleContract": "rules",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_FILES[name]}", __name__), name)
