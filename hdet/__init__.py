"""hdet: the replicas of data-parallel training as a live search for hyperparameters.

Replicas train at multiples of a shared value and are averaged every T steps, or copies of the run
train for a short while at other rates; what they show moves the shared value. Start with `Ensemble`
and `AutoLR` (any optimizer, any scheduler), or with `OneCycleAutoLR`, the drop-in.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""The module of each public name, as the stub has it; None: the name is a module."""
__all__ = [*_HOMES, "__version__"]  # noqa: PLE0604 - the keys are the names


def __getattr__(name: str) -> Any:
    """On first use, so that the command line answers --help without importing torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f".{_HOMES[name] or name}", __name__)
    return getattr(home, name) if _HOMES[name] else home


def __dir__() -> list[str]:
    return sorted(__all__)
