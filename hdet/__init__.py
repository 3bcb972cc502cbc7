"""hdet: the replicas of data-parallel training as a live search for hyperparameters.

Replicas train at multiples of a shared value and are averaged every T steps, or copies of the run
train for a short while at other rates; what they show moves the shared value. Start with `Ensemble`
and `AutoLR` (any optimizer, any scheduler), or with `OneCycleAutoLR`, the drop-in.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

with open(f"{__path__[0]}/__init__.pyi", encoding="utf-8") as _stub:
    # "from .home import name as name"
    _IMPORTS = [line.split() for line in _stub if line.startswith("from .")]
_HOMES = {words[-1]: words[1] for words in _IMPORTS}
"""The module of each public name, as the stub has it; ".": the name is a module."""
__all__ = [*_HOMES, "__version__"]  # noqa: PLE0604 - the keys are the names


def __getattr__(name: str) -> object:
    """On first use, so that the command line answers --help without importing torch."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home == ".":
        return importlib.import_module(f".{name}", __name__)
    return getattr(importlib.import_module(home, __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
