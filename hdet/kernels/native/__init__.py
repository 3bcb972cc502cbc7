"""The compiled module, or the reason why it is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch  # noqa: F401  before _C: both then share torch's OpenMP runtime (cpu/dispatch.cpp)

from ...rules import DIGEST
from .interface import find_interface
from .sources import digest_of

try:
    from hdet import _C
except ImportError as error:  # reported by name wherever a native backend is asked for
    missing: str | None = (
        f"hdet's native module cannot be imported: {error}. Reinstall hdet (pip install -e .) with "
        "a C++ compiler"
    )
else:
    # After an update without a new build it would be called with tables that it does not know. An
    # installed wheel has no sources, and its module and Python files come together.
    sources = digest_of(Path(__file__).resolve().parents[3] / "csrc")
    stale = _C.RULES != DIGEST or (sources and getattr(_C, "SOURCES", "") != sources)
    missing = (
        "hdet's native module was built from other sources: run pip install -e . again"
        if stale
        else None
    )


def _torch() -> Any:
    """_C.Torch; None without a native module, or where this torch keeps tensors in another way."""
    try:
        return None if missing else _C.Torch(find_interface())
    except (AttributeError, OSError, ValueError):
        return None


torch_interface = _torch()
