"""`hdet doctor`: what can be used here, and why the rest cannot.

It never fails: a part that is broken says so in its own line.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator

import hdet

Line = tuple[str, str]


def run(options: argparse.Namespace) -> int:
    print(report())
    return 0


def report() -> str:
    """All sections as text."""
    sections: list[tuple[str, Callable[[], Iterator[Line]]]] = [
        ("versions", _versions),
        ("build", _build),
        ("backends", _backends),
        ("devices", _devices),
        ("threads", _threads),
        ("process groups", _process_groups),
        ("extras", _extras),
    ]
    text = []
    for title, lines in sections:
        text.append(title)
        try:
            text += [f"  {name:<18}{value}" for name, value in lines()]
        except Exception as error:  # noqa: BLE001 - one broken part must not hide the others
            text.append(f"  {'unknown':<18}{type(error).__name__}: {' '.join(str(error).split())}")
    return "\n".join(text)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> Iterator[Line]:
    yield "hdet", f"{hdet.__version__} ({os.path.dirname(os.path.abspath(hdet.__file__))})"
    yield "python", f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    torch = _version("torch")
    if torch is None:
        yield "torch", "missing: pip install torch"
        return
    import torch as module

    yield "torch", module.__version__
    yield "torch's CUDA", module.version.cuda or "none: this torch was built without CUDA"


def _build() -> Iterator[Line]:
    try:
        import torch  # noqa: F401  (first, so that both share one OpenMP runtime)

        from hdet import _C
    except ImportError as error:
        yield (
            "native module",
            f"missing ({error}): reinstall hdet with a C++ compiler, pip install -e .",
        )
        return
    info = _C.build_info()
    yield "compiler", str(info["compiler"])
    yield "instruction sets", ", ".join(info["isa"])
    yield "OpenMP", "yes" if info["openmp"] else "no: kernels use one thread"
    compiled = f"{info['cuda_compiler']}, for {info['cuda_archs']}"
    yield "CUDA kernels", compiled if info["cuda"] else f"none: {info['cuda_note']}"
    yield "nvcc now", _nvcc()


def _nvcc() -> str:
    path = shutil.which("nvcc")
    if path is None:
        return "not on PATH"
    answer = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=20, check=False
    )
    release = re.search(r"release [^,\s]+", answer.stdout)
    return f"{path} ({release[0] if release else 'does not say its release'})"


def _backends() -> Iterator[Line]:
    for name, state in hdet.kernels.available().items():
        yield name, state if state == hdet.kernels.USABLE else f"not usable: {state}"


def _devices() -> Iterator[Line]:
    import torch

    if not torch.cuda.is_available():
        yield "GPUs", "none that torch can use"
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found = torch.cuda.get_device_properties(i)
        memory = f"{found.total_memory / 2**30:.0f} GiB"
        capability = f"compute capability {found.major}.{found.minor}"
        yield f"GPU {i}", f"{found.name}, {memory}, {capability}"


def _threads() -> Iterator[Line]:
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "CPU cores", f"{usable} for this process, {os.cpu_count()} in the machine"
    wanted = os.environ.get("OMP_NUM_THREADS", "not set")
    yield "torch", f"{torch.get_num_threads()} threads (OMP_NUM_THREADS {wanted})"


def _process_groups() -> Iterator[Line]:
    import torch.distributed as dist

    if not dist.is_available():
        yield "none", "this torch was built without torch.distributed: one replica only"
        return
    missing = "not usable: not in this torch; needed for replicas on"
    yield "gloo", "usable" if dist.is_gloo_available() else f"{missing} CPUs"
    yield "nccl", "usable" if dist.is_nccl_available() else f"{missing} GPUs"


def _extras() -> Iterator[Line]:
    for package in ("rich", "matplotlib"):
        missing = "missing, for hdet report: pip install hdet[report]"
        yield package, _version(package) or missing
