"""The compiled module, or the reason why it is not there."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch  # before _C: both then share torch's OpenMP runtime (cpu/dispatch.cpp)

from ...rules import DIGEST
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

_ASKED = ("data_ptr", "dtype", "layout", "device_type", "device_index", "dim", "sizes", "strides")


def _interface() -> list[int]:
    """In which word of its Python object a tensor has its implementation, and the addresses of
    torch's functions that csrc/gradients.h calls."""
    library = ctypes.CDLL(torch._C.__file__)  # finds what torch's libraries have, too
    functions = [getattr(library, f"aoti_torch_get_{name}") for name in _ASKED]
    probe = torch.empty(0, device="cpu")
    words = (ctypes.c_size_t * (torch.Tensor.__basicsize__ // 8)).from_address(id(probe))
    addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]
    return [words[:].index(probe._cdata), *addresses]


def _torch() -> Any:
    """_C.Torch; None without a native module, or where this torch has another interface."""
    try:
        return None if missing else _C.Torch(_interface())
    except (AttributeError, OSError, ValueError):
        return None


torch_interface = _torch()
