"""Builds the shim: hdet._C with csrc/cuda compiled for the host, under the address and
undefined-behaviour sanitizers."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11

from hdet.kernels.native.sources import digest_of
from hdet.rules import DIGEST
from tests.build.tools import include_rules

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SOURCES = ROOT / "csrc"
COMPILER = os.environ.get("CXX") or shutil.which("c++")
RULES = ("adamw", "adan", "ademamix", "cautious_adamw", "schedule_free_adamw", "sgd")
"""One to four moments; exact ones, and some that may be missing; decoupled and coupled decay, the
new parameter in the place of a direction, and sums over tensors. Kernels of other rules differ in
arithmetic alone, which is the CPU's text, and would double the build."""

FLAGS = [
    "-std=c++17",
    "-g1",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-Wno-switch",  # rules that are left out
    "-Wno-unused-parameter",
]
# As on a GPU: no contraction, and memory is read through vector types.
FLAGS += [
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    # The address sanitizer reports these as well, where memory is read or written: half of the
    # build's time. It calls a function for each access, a quarter more.
    "-fno-sanitize=null,pointer-overflow,object-size",
    "--param=asan-instrumentation-with-call-threshold=0",
]
# Without OpenMP and with one instruction set: the CPU backend is here to compare with.
DEFINES = {
    "VERSION": '"shim"',
    "SOURCES": f'"{digest_of(SOURCES)}"',
    "COMPILER": '"shim"',
    "CUDA_COMPILER": '"shim"',
    "CUDA_ARCHS": '"90"',
    "CUDA_NOTE": '""',
    "ISA": "baseline",
}
FLAGS += ["-DHDET_CUDA", *(f"-DHDET_{name}={value}" for name, value in DEFINES.items())]
FLAGS += [
    f"-I{HERE}",
    "-isystem",
    pybind11.get_include(),
    "-isystem",
    sysconfig.get_paths()["include"],
]


def tag() -> str:
    """Of everything that the result depends on."""
    files = [
        path
        for folder in (SOURCES, HERE)
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".h", ".cuh", ".cu", ".cpp")
    ]
    version = subprocess.run(
        [str(COMPILER), "--version"], capture_output=True, text=True, check=True
    ).stdout
    parts = [
        version.encode(),
        repr((FLAGS, RULES, DIGEST)).encode(),
        *(path.name.encode() + path.read_bytes() for path in files),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def build() -> Path:
    """The module's path. Built once for given sources, in build/, which git does not see."""
    folder = ROOT / "build" / f"shim-{tag()}"
    module = folder / "_C.so"
    if module.exists():
        return module
    for old in folder.parent.glob("shim-*"):
        shutil.rmtree(old, ignore_errors=True)
    copy = folder / "csrc"
    shutil.copytree(SOURCES, copy)
    include_rules(copy / "core")
    rules = copy / "core" / "rules.h"
    others = rf"    case Rule::(?!({'|'.join(RULES)}):)\w+: return call\(.*\n"
    rules.write_text(re.sub(others, "", rules.read_text(encoding="utf-8")), encoding="utf-8")
    kernels = copy / "cuda" / "rule.cu"  # the longest, once for each rule
    text = rules.read_text(encoding="utf-8")
    own = re.findall(r"^struct (\w+Rule) \{$", text, re.MULTILINE)
    wanted = [f"{name.capitalize()}Rule" for name in RULES]
    own = ["AnyRule", *(name for name in own if name in wanted)]
    compiled = [(kernels, name) for name in own]
    rest = [copy / "bindings.cpp", HERE / "counters.cpp", *copy.glob("cpu/*.cpp")]
    rest += {*copy.glob("cuda/*.cu")} - {kernels}
    compiled += [(source, "") for source in rest]
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda one: _compile(folder, *one), compiled))
    fresh = folder / "fresh.so"
    _run([str(COMPILER), "-shared", "-fsanitize=address,undefined", *objects, "-o", str(fresh)])
    fresh.rename(module)
    return module


def _compile(folder: Path, source: Path, rule: str) -> str:
    """`rule`: whose kernels, where there are some of each."""
    result = str(folder / f"{source.parent.name}-{source.name}{rule}.o")
    optimize = (
        "-O0" if source.name == "bindings.cpp" else "-O1"
    )  # half the time is for pybind11's templates, which run seldom
    flags = [*FLAGS, optimize, f"-DHDET_RULE={rule}"]
    _run([str(COMPILER), *flags, "-x", "c++", "-c", str(source), "-o", result])
    return result


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-5000:]


def sanitizer_library(name: str) -> str:
    found = subprocess.run(
        [str(COMPILER), f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return str(Path(found).resolve())
