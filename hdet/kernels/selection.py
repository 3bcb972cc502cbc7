"""Which backend a user gets: the one that is named, or the fastest that works on the device.

Nothing here runs a kernel. What is asked is what decides whether one could: the module, the
capabilities that it was compiled for, the driver.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import shutil
import warnings
from collections.abc import Callable

import torch

from . import native
from .interface import Backend

BACKENDS = {
    "cpu": "native.plans.CpuBackend",
    "cuda": "native.cuda.CudaBackend",
    "triton": "triton.TritonBackend",
    "torch": "reference.TorchBackend",
}
USABLE = "usable"
_ORDER = {"cpu": ("cpu", "torch"), "cuda": ("cuda", "triton", "torch")}
"""What "auto" tries on a kind of device; on all others torch alone."""


# -- does it work here? ----------------------------------------------------------------------------


def _cuda_state(device: torch.device | None) -> str:
    if native.missing is not None:
        return native.missing
    if torch.version.hip is not None:
        return "hdet's CUDA kernels do not run on AMD's GPUs"
    if not native._C.cuda:
        return (
            f"hdet has no CUDA kernels: {native._C.cuda_note}. Install the CUDA toolkit, 12.0 or "
            "later, and reinstall with HDET_CUDA=1"
        )
    if not torch.backends.cuda.is_built():
        return "this torch was built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no usable CUDA device or driver"
    toolkit, driver = cuda_version(native._C.cuda_compiler), driver_version()
    if driver[0] < toolkit[0]:
        return (
            f"the NVIDIA driver is one of CUDA {_dotted(driver)}, hdet was built with CUDA "
            f"{_dotted(toolkit)}: update the driver, or point CUDA_HOME at a toolkit "
            f"{driver[0]}.x and reinstall"
        )
    capability = torch.cuda.get_device_capability(device)
    compiles = driver >= toolkit
    if not any(_runs_on(arch, capability, compiles) for arch in native._C.cuda_archs.split()):
        return (
            f"the device has compute capability {_dotted(capability)}, hdet was built for "
            f"{native._C.cuda_archs}: reinstall with "
            f'HDET_CUDA_ARCHS="{capability[0]}{capability[1]}"'
        )
    return USABLE


def _runs_on(arch: str, capability: tuple[int, int], compiles: bool) -> bool:
    """Does code for `arch` (CMake's words: 90, 90-real, 90-virtual, 90a, 100f) run on such a
    device? `compiles`: may the driver compile what is newer than the device's own code?"""
    name, _, kind = arch.partition("-")
    digits = name.rstrip("af")
    built = int(digits[:-1]), int(digits[-1])
    if name.endswith("a"):
        return built == capability
    in_family = built[0] == capability[0] and built <= capability
    has_code, has_ptx = kind != "virtual", kind != "real" and not name.endswith("f")
    return (has_code and in_family) or (has_ptx and compiles and built <= capability)


def cuda_version(compiler: str) -> tuple[int, int]:
    """The toolkit of a compiler such as "NVIDIA 12.8.93", whose runtime is linked."""
    found = re.search(r"(\d+)\.(\d+)", compiler)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def driver_version() -> tuple[int, int]:
    """The CUDA version that the driver is for."""
    number: int = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    return number // 1000, number % 1000 // 10


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _triton_state(device: torch.device | None) -> str:
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported: {error}. Install it with pip install hdet[triton]"
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 6):
        return f"Triton {triton.__version__} is too old: install 3.6 or later"
    if triton.knobs.runtime.interpret:
        return USABLE
    if not torch.cuda.is_available():
        return (
            "torch finds no usable CUDA device or driver. Without one Triton's interpreter runs "
            "(TRITON_INTERPRET=1, on CPU tensors, slowly)"
        )
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < (8, 0):
        return f"Triton needs compute capability 8.0, the device has {_dotted(capability)}"
    if not _has_c_compiler():
        return "Triton needs a C compiler to launch kernels: install gcc or set CC"
    return USABLE


@functools.cache
def _has_c_compiler() -> bool:
    return any(map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang"))))


_STATES: dict[str, Callable[[torch.device | None], str]] = {
    "cpu": lambda _: native.missing or USABLE,
    "cuda": _cuda_state,
    "triton": _triton_state,
    "torch": lambda _: USABLE,
}
"""To ask may import Triton or start CUDA: `select` asks those only that it may take."""


def state(backend: str, device: torch.device | None = None) -> str:
    """ "usable", or the reason why that backend is not and what would help. `device`: of the
    tensors; None: the current one."""
    return _STATES[backend](device)


def available() -> dict[str, str]:
    """For each backend "usable", or the reason why it is not."""
    return {name: state(name) for name in BACKENDS}


# -- the choice ------------------------------------------------------------------------------------


def check_name(backend: str) -> None:
    """Raises ValueError for a name that no backend has."""
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; choose auto, {', '.join(BACKENDS)}")


def automatic(device: torch.device) -> tuple[str, str]:
    """The backend that "auto" takes, and what is to be said of it: why it is no faster one. Empty:
    it is the fastest there is."""
    if device.type not in _ORDER:
        return "torch", f"hdet has no kernels of its own for {device.type}"
    reasons = []
    for name in _ORDER[device.type]:
        reason = state(name, device)
        if reason == USABLE:
            break
        reasons.append(reason)
    if name == "cpu" and not native._C.openmp and torch.get_num_threads() > 1:
        reasons.append("it was compiled without OpenMP and uses one thread; build it with GCC")
    return name, ". ".join(reasons)


_warned: set[str] = set()
"""kinds of devices"""


def select(backend: str, device: torch.device) -> Backend:
    """The backend of that name for tensors on that device; "auto": the first usable one of native,
    Triton and torch, with one warning where that is not the native one.

    Raises ValueError for an unknown name or a backend that does not work on the device,
    RuntimeError for one that is not usable.
    """
    check_name(backend)
    if backend == "auto":
        name, why = automatic(device)
        if why and device.type not in _warned:
            _warned.add(device.type)
            warnings.warn(
                f"tensors on {device.type} use the {name} backend: {why}",
                RuntimeWarning,
                stacklevel=3,
            )
    else:
        name = backend
        if name in ("cpu", "cuda") and name != device.type:
            raise ValueError(
                f'backend="{name}" does not work on tensors on {device}; use backend="auto"'
            )
        reason = state(name, device)
        if reason != USABLE:
            raise RuntimeError(
                f'backend="{name}" is not usable: {reason}. backend="torch" works without it'
            )
    module, _, member = BACKENDS[name].rpartition(".")
    return getattr(importlib.import_module(f".{module}", __package__), member)()
