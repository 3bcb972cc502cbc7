"""What nvcc has made of the step kernels of one replica, and what that predicts for an H200.

Needs hdet with its CUDA kernels, and no GPU.

    python -m benchmarks.compiled [--arch 90] [--json FILE]

Of each kernel: registers of a thread; blocks that fit on a multiprocessor; instructions of the main
loop, in which a thread has eight elements; and bytes that a parameter moves. The prediction is the
larger of two times: of the bytes at the bandwidth that a copy reaches, and of the instructions at
one a cycle for each of the four schedulers. Instructions of branches that are not taken are counted
as well, so theirs is an upper bound. `make gpu` measures the same operations (benchmarks/step.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hdet import _C
from hdet.rules import RULES

BANDWIDTH = 4.3e12
"""bytes a second: what copies reach of an H200's 4.8e12"""
MULTIPROCESSORS, SCHEDULERS, LANES, CLOCK = 132, 4, 32, 1.755e9
REGISTERS, THREADS = 65536, 128
"""of a multiprocessor; of a block"""
GPT2 = 124_439_808
ELEMENTS = 8
"""of a thread's turn"""
KNOWN = ("any", "float32", "bf16 with float32 masters", "bf16, split", "bf16 throughout")
"""csrc/core/numbers.h: Known"""
BYTES = {
    name: (12 + low, 12 + 8 * n, 12 + 8 * n, 10 + 8 * n, 6 + low)  # any: bf16 moments
    for name, n, low in (
        (name, len(rule.moments), 4 * len(rule.moments + rule.exact))
        for name, rule in RULES.items()
    )
}


def tool(name: str) -> str | None:
    """CUDA's, or the one that comes with Triton."""
    spec = importlib.util.find_spec("triton")
    own = (
        None
        if spec is None or spec.origin is None
        else Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name
    )
    return shutil.which(name) or (str(own) if own is not None and own.exists() else None)


def missing() -> str:
    """Why compiled kernels cannot be looked at; empty if they can."""
    for name in ("cuobjdump", "nvdisasm"):
        if tool(name) is None:
            return f"there is no {name}, neither CUDA's nor Triton's"
    return "" if _C.cuda else f"hdet has no CUDA kernels: {_C.cuda_note}"


@dataclass(frozen=True)
class Used:
    """By a kernel."""

    registers: int
    """Of a thread."""
    stack: int
    local: int
    """Bytes of a thread, which spilled registers would take."""


def resources(arch: str) -> dict[str, Used]:
    """By the names of all kernels that hdet has been built with for this compute capability."""
    told = _run("cuobjdump", "-res-usage", "-arch", f"sm_{arch}", _C.__file__)
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) \S+ LOCAL:(\d+)", told)
    return {name: Used(*map(int, numbers)) for name, *numbers in found}


def instructions(arch: str, kernel: str) -> str:
    """Of the files that have kernels of this name."""
    with _extracted("elf", arch) as files:
        return "".join(
            _run("nvdisasm", "-c", str(path))
            for path in files
            if kernel.encode() in path.read_bytes()
        )


def ptx(arch: str) -> dict[str, str]:
    """By kernel."""
    with _extracted("ptx", arch) as files:
        parts = [
            part
            for path in files
            for part in re.split(r"\.visible \.entry |\.entry ", path.read_text(encoding="utf-8"))[
                1:
            ]
        ]
    return {part.split("(", 1)[0]: part for part in parts}


@contextmanager
def _extracted(kind: str, arch: str) -> Iterator[list[Path]]:
    """The module's files for this compute capability."""
    with tempfile.TemporaryDirectory() as folder:
        _run("cuobjdump", f"-x{kind}", f"sm_{arch}", str(_C.__file__), cwd=folder)
        yield sorted(Path(folder).iterdir())


def _run(name: str, *arguments: str, cwd: str | None = None) -> str:
    return subprocess.run(
        [str(tool(name)), *arguments], capture_output=True, text=True, check=True, cwd=cwd
    ).stdout


def loop_length(code: Sequence[str]) -> int:
    """Instructions of the loop that loads the most, from its label to its branch."""
    labels = {
        line[:-1].strip(): place
        for place, line in enumerate(code)
        if line.startswith(".L") and line.endswith(":")
    }
    best: tuple[int, int] = (0, 0)
    for place, line in enumerate(code):
        target = re.search(r"BRA\S*.*`\((\.L\S+)\)", line)
        if target is None or labels.get(target[1], place) >= place:
            continue
        body = [
            one for one in code[labels[target[1]] : place + 1] if ";" in one and "NOP" not in one
        ]
        best = max(best, (sum("LDG" in one for one in body), -len(body)))
    return -best[1]


def lines(arch: str) -> Iterator[dict[str, Any]]:
    used_by, code = resources(arch), instructions(arch, "step_kernel")
    for part in re.split(r"\n\s*\.section\s+\.text\.", code)[1:]:
        name = part.split(",", 1)[0].strip()
        found = re.search(r"\d([A-Z][a-z_]+)RuleELb0ELNS_\d+KnownE(\d)E", name)
        if found is None:
            continue
        rule, known = found[1].lower(), int(found[2])
        used, length, size = (
            used_by[name].registers,
            loop_length(part.splitlines()),
            BYTES[rule][known],
        )
        by_memory = size * GPT2 / BANDWIDTH
        by_issue = length / ELEMENTS * GPT2 / (MULTIPROCESSORS * SCHEDULERS * LANES * CLOCK)
        yield {
            "benchmark": "compiled",
            "arch": arch,
            "rule": rule,
            "formats": KNOWN[known],
            "registers": used,
            "blocks": min(16, REGISTERS // (THREADS * (used + 7 & ~7))),
            "instructions": round(length / ELEMENTS, 1),
            "bytes": size,
            "gpt2_us": round(1e6 * max(by_memory, by_issue), 1),
            "bound": "memory" if by_memory > by_issue else "instructions",
        }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", default="90", help="compute capability without its dot")
    parser.add_argument("--json", type=Path, help="lines are written here, too")
    options = parser.parse_args(arguments)
    if why := missing():
        raise SystemExit(f"python -m benchmarks.compiled: {why}")
    if options.arch not in _C.cuda_archs.split():
        raise SystemExit(
            f"python -m benchmarks.compiled: hdet has been built for {_C.cuda_archs}; "
            f"HDET_CUDA_ARCHS={options.arch} builds for that"
        )
    made = sorted(
        lines(options.arch), key=lambda line: (line["rule"], KNOWN.index(line["formats"]))
    )
    columns = (
        "rule",
        "formats",
        "registers",
        "blocks",
        "instructions",
        "bytes",
        "gpt2_us",
        "bound",
    )
    issued = 28 / BANDWIDTH * MULTIPROCESSORS * SCHEDULERS * LANES * CLOCK
    caption = "instructions, bytes: of an element; gpt2_us: predicted for 124 million parameters"
    table = Table(
        *columns,
        caption=(
            f"{caption}\nIn the time of 28 bytes {issued:.0f} instructions can be issued for an "
            "element."
        ),
    )
    for line in made:
        table.add_row(*(str(line[column]) for column in columns))
    Console(width=120).print(table)
    if options.json is not None:
        options.json.write_text("".join(json.dumps(line) + "\n" for line in made))


if __name__ == "__main__":
    main()
