"""Compiling for an H100 (sm_90) on a machine without a GPU: what the backend would launch, and what
became of it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from hdet.kernels.tables import DeviceMemory
from hdet.kernels.triton.launch import COMPILER

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Driver:
    """As much of a driver as Triton asks for to compile: a device of compute capability 9.0 that
    nothing runs on."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """A number that no device has: what is compiled here stays apart from what runs on a GPU in
        the same process."""
        return 1000

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiling(DeviceMemory):
    """Tables on the CPU; a launch only compiles, as it would for CUDA tensors at these addresses,
    and is noted."""

    launches: ClassVar[list[tuple[str, Any]]] = []

    def refresh(self, table: Tensor, placed: Tensor) -> None:
        placed.copy_(table)

    def launch(self, kernel: Any, programs: int, *arguments: object, **options: object) -> None:
        if programs:
            compiled = kernel.warmup(*arguments, **options, **COMPILER, grid=(programs,))
            self.launches.append((kernel.fn.__name__, compiled))


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run(
        [os.fspath(TOOLS / name), *arguments], capture_output=True, text=True, check=True
    ).stdout


class Binary:
    """The machine code of a compiled kernel, and the PTX it was made from."""

    def __init__(self, compiled: Any, folder: Path) -> None:
        path = folder / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "--dump-resource-usage", os.fspath(path))
        self.usage = {
            name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)
        }
        self.ptx = compiled.asm["ptx"]
        self.code = _tool("nvdisasm", "-c", os.fspath(path))

    def instructions(self, pattern: str) -> int:
        return len(re.findall(rf"\b{pattern}", self.code))

    def accesses(self, kind: str, size: str) -> int:
        """Accesses of elements in the PTX, which are those under a mask: `kind` ld or st, `size`
        v4.b32, v2.b32, b32, b16."""
        return len(
            re.findall(rf"@%p\d+ {kind}\.global(?:\.L\w+::\w+)*\.{re.escape(size)}\s", self.ptx)
        )
