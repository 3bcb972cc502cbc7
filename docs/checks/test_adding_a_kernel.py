"""docs/adding-a-kernel.md: its C++, its Triton and its reference run, and give the same bits.

(Its other blocks: test_pages.py.)
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.build.tools import include_rules
from tests.limits import HANG_S

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding-a-kernel.md").read_text(encoding="utf-8")
COMPILER = os.environ.get("CXX") or shutil.which("c++")


def block(language: str, word: str) -> str:
    """The one code block in which ``word`` stands."""
    texts = re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    (found,) = [text for text in texts if word in text]
    return str(found)


def done(command: list[str], **environment: str) -> None:
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=HANG_S, cwd=ROOT,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]


def test_the_kernel_runs_in_tritons_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    script = tmp_path / "clamp.py"  # Triton reads kernels from their file
    script.write_text(block("python", "@triton.jit"))
    here = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done([sys.executable, str(script)], **here)


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
def test_the_loop_in_cpp_has_the_bits_of_torch(tmp_path: Path) -> None:
    source, library = tmp_path / "clamp.cpp", tmp_path / "clamp.so"
    source.write_text(block("cpp", "clamped"))
    flags = ["-std=c++17", "-O2", "-Wall", "-Werror", "-fPIC", "-shared", "-ffp-contract=off"]
    flags += [f"-I{ROOT / 'csrc'}", include_rules(tmp_path)]
    done([str(COMPILER), *flags, str(source), "-o", str(library)])
    torch.manual_seed(0)
    tensors = [torch.randn(n) for n in (1, 1000, 40_000)]
    tensors[1][3] = float("nan")
    expected = [tensor.clamp(-0.5, 0.5) for tensor in tensors]
    addresses = (ctypes.c_void_p * 3)(*[tensor.data_ptr() for tensor in tensors])
    elements = (ctypes.c_int64 * 3)(*[tensor.numel() for tensor in tensors])
    ctypes.CDLL(str(library)).clamp(addresses, elements, ctypes.c_int64(3), ctypes.c_float(0.5))
    bits = [[tensor.view(torch.int32) for tensor in of] for of in (tensors, expected)]
    assert all(map(torch.equal, *bits))
