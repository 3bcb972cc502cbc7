"""What the compiled module says of itself, and what the compilers say of its sources."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hdet
from hdet import _C

from .tools import ROOT, compiler, include_rules, nvcc

SOURCES = ROOT / "csrc"
# threads of the process after torch has used its pool, and after hdet has had a parallel region
THREADS = """
import os, torch
import hdet.kernels
torch.set_num_threads(3)
torch.ones(1 << 20).exp()
print(len(os.listdir("/proc/self/task")))
hdet.kernels.average_(torch.ones(2, 1 << 20), [1, 1])
print(len(os.listdir("/proc/self/task")))
"""


def test_the_module_says_how_it_was_built() -> None:
    assert _C.__version__ == hdet.__version__
    assert re.match(r"\w+ \d+\.\d+", _C.compiler)
    assert _C.isa[-1] == "baseline"
    assert isinstance(_C.openmp, bool)
    assert _C.cuda == bool(_C.cuda_archs) == bool(_C.cuda_compiler) == (not _C.cuda_note)


def test_cuda_is_compiled_where_nvcc_is_found() -> None:
    if nvcc() is None:
        pytest.skip("there is no nvcc here")
    if "HDET_CUDA=0" in _C.cuda_note:
        pytest.skip("hdet was installed with HDET_CUDA=0")
    assert _C.cuda is True
    assert _C.cuda_archs


def test_the_module_loads_without_a_driver_and_needs_no_cuda_library() -> None:
    code = (
        "from hdet import _C; print([line.split()[-1] for line in open('/proc/self/maps') if "
        "'cuda' in line.split()[-1].rsplit('/', 1)[-1]])"
    )
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.strip()
    assert found == "[]"


def test_torch_and_hdet_share_one_openmp_runtime() -> None:
    if not _C.openmp or not Path("/proc/self/maps").exists():
        pytest.skip("built without OpenMP, or no /proc")
    found = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.split()
    assert found[0] == found[1], f"threads before and after a parallel region of hdet's: {found}"


@pytest.mark.skipif(
    compiler() is None or shutil.which("nm") is None, reason="needs a C++ compiler and nm"
)
@pytest.mark.parametrize("source", ["step.cpp", "average.cpp", "copy.cpp", "norm.cpp"])
def test_loops_share_no_function_between_instruction_sets(source: str, tmp_path: Path) -> None:
    """A weak symbol could be taken from the AVX-512 object by a processor without it. -O0 inlines
    nothing that need not be."""
    result = tmp_path / "loop.o"
    flags = ["-std=c++17", "-O0", "-DHDET_ISA=baseline", include_rules(tmp_path)]
    subprocess.run(
        [str(compiler()), *flags, "-c", str(SOURCES / "cpu" / source), "-o", str(result)],
        check=True,
    )
    symbols = subprocess.run(["nm", str(result)], capture_output=True, text=True, check=True).stdout
    assert "_baseline" in symbols
    assert not re.findall(r" [WVu] .*", symbols)
