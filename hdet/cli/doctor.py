"""`hdet doctor`: what can be used here, and why the rest cannot.

It never fails: a part that is broken says so in its own line.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from collections.abc import Iterator

import hdet

Lines = Iterator[tuple[str, object]]


def run(_: argparse.Namespace) -> int:
    for title, lines in SECTIONS.items():
        print(title)
        try:
            for name, value in lines():
                print(f"  {name:<18}{value}")
        except Exception as error:  # noqa: BLE001 - one broken part must not hide the others
            reason = " ".join(str(error).split())
            print(f"  {'unknown':<18}{type(error).__name__}: {reason}")
    print(_steps())
    return 0


def _steps() -> str:
    """What an optimizer gets with backend="auto", on what this machine trains on."""
    import torch

    from hdet.kernels.selection import automatic

    # A torch with CUDA names it where there is no GPU, too.
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = found or torch.device("cpu")
    try:
        name, why = automatic(device)
    except Exception as error:  # noqa: BLE001 - as above
        return f"steps run on {device.type}: unknown, {type(error).__name__}: {error}"
    words = {"cpu": "hdet's C++ kernels", "cuda": "hdet's CUDA kernels"}
    how = words.get(name, f"the {name} backend")
    return f"steps run on {device.type} by {how}{why and f': {why}'}"


def _versions() -> Lines:
    yield "hdet", f"{hdet.__version__} ({os.path.dirname(os.path.abspath(hdet.__file__))})"
    yield "python", f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    for package in ("torch", "rich", "matplotlib"):
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, f"missing: pip install {package}"


def _build() -> Lines:
    import torch  # noqa: F401  (first, so that both share one OpenMP runtime)

    try:
        from hdet import _C
        from hdet.kernels.selection import cuda_version
    except ImportError as error:
        remedy = "reinstall hdet with a C++ compiler, pip install -e ."
        yield "native module", f"missing ({error}): {remedy}"
        return
    runtime = ".".join(map(str, cuda_version(_C.cuda_compiler)))
    compiled = f"for {_C.cuda_archs}, with CUDA {runtime}, which is in the module"
    yield "compiler", _C.compiler
    yield "instruction sets", ", ".join(_C.isa)
    yield "OpenMP", "yes" if _C.openmp else "no: kernels use one thread"
    yield "CUDA kernels", compiled if _C.cuda else f"none: {_C.cuda_note}"


def _backends() -> Lines:
    for name, state in hdet.kernels.available().items():
        yield name, state if state == hdet.kernels.USABLE else f"not usable: {state}"


def _devices() -> Lines:
    import torch

    from hdet.kernels.selection import driver_version

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    wanted = os.environ.get("OMP_NUM_THREADS", "not set")
    yield "CPU cores", f"{cores} for this process, {os.cpu_count()} in the machine"
    yield "torch's threads", f"{torch.get_num_threads()} (OMP_NUM_THREADS {wanted})"
    yield "torch's CUDA", torch.version.cuda or "none: this torch was built without CUDA"
    yield "GPUs", torch.cuda.device_count()
    if torch.cuda.is_available() and torch.version.hip is None:
        yield "CUDA driver", "for CUDA " + ".".join(map(str, driver_version()))
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        capability = f"compute capability {gpu.major}.{gpu.minor}"
        yield f"GPU {number}", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, {capability}"


def _process_groups() -> Lines:
    import torch.distributed as dist

    if not dist.is_available():
        yield "none", "this torch was built without torch.distributed: one replica only"
        return
    missing = "not usable: not in this torch; needed for replicas on"
    yield "gloo", "usable" if dist.is_gloo_available() else f"{missing} CPUs"
    yield "nccl", "usable" if dist.is_nccl_available() else f"{missing} GPUs"


SECTIONS = {
    "versions": _versions,
    "build": _build,
    "backends": _backends,
    "devices": _devices,
    "process groups": _process_groups,
}
