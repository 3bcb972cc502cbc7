"""What nvcc and ptxas make of csrc/cuda: no warnings, no spills, no local memory, and accesses of
16 bytes in the main loops."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import compiled
from hdet import _C
from hdet.rules import RULES

from .tools import ROOT, include_rules, nvcc

SOURCES = ROOT / "csrc" / "cuda"
pytestmark = pytest.mark.skipif(nvcc() is None, reason="there is no nvcc here")

OWN = [rule for rule in RULES.values() if not rule.generic]
# of several replicas: those of most rules
MANY = [not rule.gives_parameter for rule in OWN]
# kernels by source
KERNELS = {
    "rule.cu": sum(10 + 3 * many for many in MANY) + 2 + 4,  # AdamW's of mixtures; of AnyRule
    "step.cu": 0,
    "derive.cu": 1,
    "norm.cu": 1,
    "sums.cu": 2,
    "average.cu": 2,
    "copy.cu": 2,
}

ARCH = "90" if "90" in _C.cuda_archs.split() else _C.cuda_archs.split()[-1] if _C.cuda_archs else ""

needs_tools = pytest.mark.skipif(bool(compiled.missing()), reason=compiled.missing())


@pytest.fixture(scope="module")
def ptx() -> dict[str, str]:
    """By kernel, of the module that has been built."""
    if compiled.missing():
        pytest.skip(compiled.missing())
    return compiled.ptx(ARCH)


@pytest.mark.parametrize("source", KERNELS)
def test_no_source_has_a_warning(source: str, tmp_path: Path) -> None:
    """As far as PTX; of the rules one."""
    given = [
        "-std=c++17",
        "-arch=compute_90",
        "-Werror=all-warnings",
        "-Xcompiler=-Wall,-Wextra",
        "-fmad=false",
        "-DHDET_RULE=AdamwRule",
        include_rules(tmp_path),
    ]
    built = subprocess.run(
        [str(nvcc()), *given, "-ptx", "-o", os.devnull, str(SOURCES / source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr


def test_every_source_is_listed() -> None:
    assert sorted(KERNELS) == sorted(path.name for path in SOURCES.glob("*.cu"))


@needs_tools
def test_no_kernel_spills_or_has_a_stack() -> None:
    """Of the module that has been built, on every architecture.

    The registers leave enough threads to keep the memory busy: 512 of them have 50 KiB in flight.
    A T4's multiprocessor (7.5) has a third of an H100's bandwidth, and 384 do. Kernels of any rule
    and any formats do not wait for memory alone.
    """
    for arch in [one for one in _C.cuda_archs.split() if not one.endswith("-virtual")]:
        threads = 384 if arch.startswith("75") else 512
        used = compiled.resources(arch)
        fewest = {name: 256 if "coded" in name else 384 for name in used if "AnyRule" in name}
        assert len(used) == sum(KERNELS.values())
        assert not {
            name: one
            for name, one in used.items()
            if one.stack
            or one.local
            or one.registers > compiled.REGISTERS // fewest.get(name, threads)
        }


@needs_tools
def test_formats_that_kernels_are_compiled_for_are_bound_by_memory() -> None:
    """As the table says that benchmarks.compiled prints.

    In the kernel of any formats the same loop takes twice as many instructions.
    """
    made = {(line["rule"], line["formats"]): line for line in compiled.lines(ARCH)}
    assert len(made) == (len(compiled.KNOWN) - 1) * len(OWN) + len(RULES)  # all have "any"
    for (rule, formats), line in made.items():
        if formats != "any":
            fewest = 5 if len(RULES[rule].moments) < 3 else 4  # each has more in flight
            assert line["bound"] == "memory" and line["blocks"] >= fewest, line
            assert 10 < line["instructions"] < made[rule, "any"]["instructions"]
    masters = made["adamw", "bf16 with float32 masters"]
    assert masters["instructions"] < 0.5 * made["adamw", "any"]["instructions"]


def test_main_loops_access_16_bytes_of_global_memory(ptx: dict[str, str]) -> None:
    assert len(ptx) == sum(KERNELS.values())
    for name, code in ptx.items():
        accesses = re.findall(r"^\s*(?:@%p\d+ )?((?:ld|st)\.[\w.]+)", code, re.MULTILINE)
        assert not [access for access in accesses if ".local" in access], name
        if "derive" in name or "sums" in name or "prepare_again" in name:  # by element
            continue
        spaces = (".global", ".param", ".shared")
        generic = [one for one in accesses if not any(space in one for space in spaces)]
        generic = [one for one in generic if one.startswith("st") or re.search(r"\.v[24]\.", one)]
        assert not generic, f"{name}: generic stores, or vectors: {generic}"
        loads, stores = (
            [
                a
                for a in accesses
                if a.startswith(f"{kind}.global") and a.endswith((".v4.u32", ".v4.b32", ".v4.f32"))
            ]
            for kind in ("ld", "st")
        )
        assert len(loads) >= 2, f"{name}: loads of 16 bytes: {loads}"
        assert len(stores) >= 2 or "norm" in name, f"{name}: stores of 16 bytes: {stores}"


@pytest.mark.parametrize("rule", [rule.name for rule in OWN])
def test_a_float_step_streams_gradient_and_moments(ptx: dict[str, str], rule: str) -> None:
    """Two vectors a turn of each stream, plain accesses, and all loads before the first store."""
    kernel = re.compile(
        rf"step_kernel.*{len(rule) + 4}{rule}RuleELb0ELNS_\d+KnownE1ELb0E", re.IGNORECASE
    )  # of SgdRule for sgd
    (code,) = [code for name, code in ptx.items() if kernel.search(name)]
    moments = len(RULES[rule].moments)
    # a parameter that is read for the new one alone is loaded in the branch of a step that is taken
    at_once = 1 + moments + (not RULES[rule].gives_parameter)
    before, stores = code[: code.index("st.global.v4")], code[code.index("st.global.v4") :]
    assert len(re.findall(r"ld\.global\.v4\.u32", before)) == 2 * at_once
    assert not re.findall(r"ld\.global\.v4", stores)
    assert len(re.findall(r"st\.global\.v4", stores)) == 2 * (2 + moments)
    assert not re.findall(r"\.global\.cs", code)
