"""The compiled module, or the reason why it is not there."""

from __future__ import annotations

import torch  # noqa: F401 - before _C: both then share torch's OpenMP runtime (cpu/dispatch.cpp)

from ...rules import DIGEST

INTERFACE = 16
"""the functions of csrc/bindings.cpp this package calls; counted up there and here whenever they
change"""

try:
    from hdet import _C
except ImportError as error:  # reported by name wherever a native backend is asked for
    missing: str | None = (
        f"hdet's native module cannot be imported: {error}. Reinstall hdet (pip install -e .) with "
        "a C++ compiler"
    )
else:
    # After an update without a new build, a missing function would otherwise surface in the middle
    # of a run.
    stale = getattr(_C, "INTERFACE", 0) != INTERFACE or _C.RULES != DIGEST
    missing = (
        "hdet's native module was built from other sources: reinstall hdet (pip install -e .)"
        if stale
        else None
    )
